"""The loss of pretraining: cross entropy of each next token, without ever holding all logits."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from rlhf.stages.head_loss import head_loss, takes_logits_straight
from rlhf.stages.packing import no_mask, read, reads_without_mask


class NextTokenLoss(nn.Module):
    """A decoder and its loss: what is compiled, wrapped by Accelerate and called."""

    def __init__(self, model: PreTrainedModel, compile: bool = False) -> None:
        super().__init__()
        self.model = model
        self._straight = takes_logits_straight(model)
        # Before torch 2.14 transformers makes a mask whenever it is compiled, and kernels that take masks are slow.
        self._masked = not reads_without_mask(model)
        self._fast = self.losses
        if compile:  # into one graph of kernels: those of a small model are too short to be launched one by one
            self._fast = torch.compile(self.losses, dynamic=False, mode="reduce-overhead")

    def forward(self, blocks: Tensor, **inputs: Any) -> Tensor:
        """Sum over all positions of the cross entropy of each next token, from ids [B,T+1]; see `losses`."""
        total: Tensor = self._fast(blocks, **inputs)
        return total

    def losses(
        self, blocks: Tensor, position_ids: Tensor | None = None, attention_mask: Tensor | None = None
    ) -> Tensor:
        """The same, never compiled: for evaluations, whose batches have shapes of their own.

        Position ids [B,T] and mask [B,1,T,T] (True where attended to) where they are not simply causal.
        """
        ids, targets = blocks[:, :-1], blocks[:, 1:]
        if attention_mask is None and not self._masked:
            attention_mask = no_mask(ids)
        inputs = {"position_ids": position_ids, "attention_mask": attention_mask}
        if not self._straight:
            logits = self.model(input_ids=ids, use_cache=False, **inputs).logits.float()
            return cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        hidden = read(self.model, ids, **inputs)
        return head_loss(hidden.flatten(0, 1), self.model.get_output_embeddings().weight, targets.flatten())[0]
