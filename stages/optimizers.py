"""AdamW and the learning rate as a function of the step, so that there is no schedule's state to lose."""

import math

import torch


def learning_rate_at(step: int, num_steps: int, peak: float, warmup: int, end_share: float) -> float:
    """Linear warm-up, then cosine from `peak` to `end_share * peak` at the last step. `step` from 0."""
    if step < warmup:
        return peak * (step + 1) / warmup
    progress = (step - warmup) / max(num_steps - 1 - warmup, 1)
    return peak * (end_share + (1 - end_share) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The weights that learn, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def adamw(model: torch.nn.Module, learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW over the trainable weights; only matrices decay (norms and biases do not)."""
    weights = trained(model).values()
    groups = [
        {"params": [p for p in weights if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in weights if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=learning_rate, betas=(0.9, 0.95), fused=True)
