"""AdamW, and the learning rate as a function of the step, so that there is no schedule's state to lose."""

import math
from collections.abc import Iterable

import torch

from rlhf.stages.sharding import reshard

FIRST_BETA = 0.9


def learning_rate_at(
    step: int,
    num_steps: int,
    peak: float,
    warmup: int,
    end_share: float,
    schedule: str = "cosine",
    decay_share: float = 0.2,
) -> float:
    """Linear warm-up to `peak`, then down to `end_share * peak` at the last step. `step` from 0.

    cosine and linear go down from the end of the warm-up, wsd (warm-up, stable, decay) along a line over the last
    `decay_share` of all steps; constant stays at the peak. noam (Vaswani et al. 2017, section 5.3) is, step from 1,
    peak · min(step^-0.5, step · warmup^-1.5) with no end: the paper's peak is hidden_size^-0.5.
    """
    if schedule == "noam":
        return peak * min((step + 1) ** -0.5, (step + 1) * max(warmup, 1) ** -1.5)
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    start = max(warmup, num_steps - 1 - round(decay_share * num_steps)) if schedule == "wsd" else warmup
    progress = min(max((step - start) / max(num_steps - 1 - start, 1), 0.0), 1.0)
    left = 0.5 * (1 + math.cos(math.pi * progress)) if schedule == "cosine" else 1 - progress
    return peak * (end_share + (1 - end_share) * left)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The weights that learn, by name; of a sharded model those that its optimizer has."""
    reshard(model)
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def adamw(
    weights: Iterable[torch.nn.Parameter], learning_rate: float, weight_decay: float, beta2: float = 0.95
) -> torch.optim.AdamW:
    """AdamW over some weights; only matrices decay (norms and biases do not)."""
    weights = list(weights)
    groups = [
        {"params": [p for p in weights if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (FIRST_BETA, beta2)
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=learning_rate, betas=betas, fused=True)


def scaled_step(scaler: torch.amp.GradScaler, optimizers: list[torch.optim.Optimizer], take: bool) -> None:
    """A step of float16, whose gradients the clipping has unscaled already; the scaler itself leaves out those that
    overflow while it looks for its scale.

    For optimizers without accelerate's wrapper, which would bring the scale up to date after each of them, and then
    unscale the next one's gradients once more.
    """
    for optimizer in optimizers:
        if take:
            scaler.step(optimizer)
    scaler.update()
    for optimizer in optimizers:
        optimizer.zero_grad()
