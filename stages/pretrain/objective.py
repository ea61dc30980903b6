"""The loss of pretraining: cross entropy of each next token, without ever holding all logits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlhf.stages.head_loss import takes_logits_straight

LOGITS_AT_ONCE, COMPILED_AT_ONCE = 2**27, 2**28
"""Numbers in the piece of the logits that is in memory; compiled, there are no copies of it beside."""


# Before torch 2.14 transformers makes a mask whenever a model is compiled, and kernels that take masks are slow. For a
# kind of attention that it does not know it makes none, and then torch's own is causal.
_CAUSAL = "rlhf_causal"
AttentionInterface.register(_CAUSAL, ALL_ATTENTION_FUNCTIONS["sdpa"])


class NextTokenLoss(nn.Module):
    """A decoder and its loss: what is compiled, wrapped by Accelerate and called."""

    def __init__(self, model: PreTrainedModel, compile: bool = False) -> None:
        super().__init__()
        self.model = model
        self._straight = takes_logits_straight(model)
        config = model.config.get_text_config()
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        self._causal = kinds == {"full_attention"} and getattr(config, "sliding_window", None) is None
        self._fast = self.losses
        if compile:  # into one graph of kernels: those of a small model are too short to be launched one by one
            self._fast = torch.compile(self.losses, dynamic=False, mode="reduce-overhead")

    def forward(self, blocks: Tensor, **inputs: Any) -> Tensor:
        """Sum over all positions of the cross entropy of each next token, from ids [B,T+1]; see `losses`."""
        with self._without_mask(needed=bool(inputs) or not self._causal):
            total: Tensor = self._fast(blocks, **inputs)
        return total

    def losses(
        self, blocks: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """The same, never compiled: for evaluations, whose batches have shapes of their own.

        Position ids [B,T] and mask [B,1,T,T] (True where attended to) where they are not simply causal.
        """
        ids, targets = blocks[:, :-1], blocks[:, 1:]
        inputs = {"position_ids": position_ids, "attention_mask": attention_mask, "use_cache": False}
        if not self._straight:
            logits = self.model(input_ids=ids, **inputs).logits.float()
            return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        embedded = self.model.get_input_embeddings()(ids)
        if torch.is_autocast_enabled(ids.device.type):  # else the residual stream would be in float32 all the way
            embedded = embedded.to(torch.get_autocast_dtype(ids.device.type))
        hidden = self.model.base_model(inputs_embeds=embedded, **inputs).last_hidden_state
        return head_loss(hidden.flatten(0, 1), self.model.get_output_embeddings().weight, targets.flatten())

    @contextmanager
    def _without_mask(self, needed: bool) -> Iterator[None]:
        config = self.model.config.get_text_config()
        before = config._attn_implementation
        if before == "sdpa" and not needed:
            config._attn_implementation = _CAUSAL
        yield
        config._attn_implementation = before


def head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum of the cross entropies of `targets` [N] under logits hidden [N,d] · weight [V,d]ᵀ.

    The gradients are made in the forward pass, piece by piece, while a piece's logits are there, so that only so many
    of them are in memory and none is made twice.
    """
    if torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
    total: Tensor = _HeadLoss.apply(hidden, weight, targets, torch.is_grad_enabled())
    return total


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, learns: bool) -> Tensor:
        at_once = COMPILED_AT_ONCE if torch.compiler.is_compiling() else LOGITS_AT_ONCE
        size = max(at_once // len(weight), 1)
        head = weight.to(hidden.dtype)  # [V,d]
        total = torch.zeros((), device=hidden.device)
        grad_hidden: list[Tensor] = []
        grad_weight = torch.zeros_like(weight) if learns else weight
        for states, labels in zip(hidden.split(size), targets[:, None].split(size), strict=True):
            logprobs = (states @ head.T).float().log_softmax(-1)  # [n,V]
            total = total - logprobs.gather(-1, labels).sum()
            if learns:  # an evaluation needs none of it
                one_hot = labels == torch.arange(len(head), device=labels.device)
                slopes = (logprobs.exp() - one_hot.float()).to(hidden.dtype)  # of the loss by the logits
                grad_hidden.append(slopes @ head)
                grad_weight += (slopes.T @ states).to(weight.dtype)
        if grad_hidden:
            ctx.save_for_backward(torch.cat(grad_hidden), grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad.to(grad_hidden.dtype), grad_weight * grad, None, None
