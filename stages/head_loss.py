"""Cross entropy of chosen tokens straight from hidden states, without ever holding all logits."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf.stages.models import LOGITS_AT_ONCE, logit_rule

COMPILED_AT_ONCE = 2 * LOGITS_AT_ONCE
"""Numbers in the piece of the logits that is in memory where it is compiled: there are no copies of it beside."""


def head_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, compile: bool = False, with_hits: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(sum of the cross entropies, if asked for how many targets have the largest logit) of `targets` [N] under logits
    hidden [N,d] · weight [V,d]ᵀ.

    The gradients are made in the forward pass, piece by piece, while a piece's logits are there, so that only so many
    of them are in memory and none is made twice. `compile` compiles what becomes of a piece; in code that is compiled
    as a whole, it is so anyway.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    total, hits = _HeadLoss.apply(hidden, weight, targets, torch.is_grad_enabled(), compile, with_hits)
    return total, hits if with_hits else None


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, learns: bool, compile: bool, with_hits: bool
    ) -> tuple[Tensor, Tensor]:
        inside = torch.compiler.is_compiling()
        size = max((COMPILED_AT_ONCE if compile or inside else LOGITS_AT_ONCE) // len(weight), 1)
        read = _compiled() if compile and not inside else _read
        head = weight.to(hidden.dtype)  # [V,d]
        total = torch.zeros((), device=hidden.device)
        correct = torch.zeros((), device=hidden.device)
        grad_hidden: list[Tensor] = []
        grad_weight = torch.zeros_like(weight) if learns and weight.requires_grad else None
        for states, labels in zip(hidden.split(size), targets.split(size), strict=True):
            loss, hits, slopes = read(states @ head.T, labels, learns, with_hits)
            total = total + loss
            if hits is not None:
                correct = correct + hits
            if slopes is not None:
                grad_hidden.append(slopes @ head)
                if grad_weight is not None:  # not that of a head that is frozen
                    grad_weight += (slopes.T @ states).to(weight.dtype)
        if learns:
            ctx.save_for_backward(torch.cat(grad_hidden), grad_weight)
        ctx.mark_non_differentiable(correct)
        return total, correct

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            grad_hidden * grad.to(grad_hidden.dtype),
            None if grad_weight is None else grad_weight * grad,
            None, None, None, None,
        )  # fmt: skip


def _read(
    logits: Tensor, targets: Tensor, learns: bool, with_hits: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(sum of the losses, number of hits, slopes [n,V] of the sum if it `learns`) of logits [n,V] and `targets` [n]."""
    logprobs = logits.float().log_softmax(-1)
    labels = targets[:, None]
    chosen = logprobs.gather(-1, labels)
    hits = (logits.argmax(-1) == targets).float().sum() if with_hits else None
    slopes = None
    if learns:  # an evaluation needs none
        # Probabilities, less 1 at the target; written there alone, for each pass over all logits costs.
        slopes = logprobs.exp_().to(logits.dtype).scatter_(-1, labels, chosen.expm1().to(logits.dtype))
    return -chosen.sum(), hits, slopes


@cache  # the compiler takes a second to import
def _compiled() -> Callable[[Tensor, Tensor, bool, bool], tuple[Tensor, Tensor | None, Tensor | None]]:
    return torch.compile(_read)


@torch.no_grad()
def takes_logits_straight(model: PreTrainedModel) -> bool:
    """Whether logits are nothing but the last hidden state times the output embeddings: no scale, cap or bias."""
    if logit_rule(model) != (1.0, None) or getattr(model.get_output_embeddings(), "bias", None) is not None:
        return False
    was_training = model.training
    model.eval()
    ids = torch.arange(8, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
    hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    ours = hidden @ model.get_output_embeddings().weight.T
    theirs = model(input_ids=ids, use_cache=False).logits
    model.train(was_training)
    near = 2**-7 if torch.is_autocast_enabled(model.device.type) else 1e-3  # what 16 bits may round off
    return torch.allclose(ours.float(), theirs.float(), rtol=near, atol=near)
