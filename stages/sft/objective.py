"""The loss of SFT: cross entropy of the response tokens, from rows that are read in passes."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from rlhf.data.collate import pack, pad_right
from rlhf.data.tokens import Encoded
from rlhf.stages.head_loss import head_loss, takes_logits_straight
from rlhf.stages.microbatches import packs, pieces
from rlhf.stages.packing import (
    MULTIPLE,
    Pack,
    packs_here,
    read,
    read_pack,
    reads_packs,
    sent,
)


@dataclass(frozen=True)
class Passage:
    """Rows that are read together, M response tokens among them: padded on the right, or packed."""

    ids: Tensor  # [B,T]; [1,N] when packed
    places: Tensor  # [M]: where, in the ids one after the other, the states are that judge the response tokens
    targets: Tensor  # [M]: those tokens
    packed: Pack | None
    num_tokens: int
    """Without padding."""

    def to(self, device: torch.device) -> "Passage":
        packed = None if self.packed is None else self.packed.to(device)
        places, targets = sent(device, self.places, self.targets)
        ids = sent(device, self.ids)[0] if packed is None else packed.ids
        return Passage(ids, places, targets, packed, self.num_tokens)


def num_targets(row: Encoded) -> int:
    """Tokens of the response; the first token of a text is never judged."""
    return len(row.input_ids) - max(row.prompt_length, 1)


class Reading:
    """How a model reads the rows of a step: packed where it can, else padded and those of like length together.

    `straight` is whether its loss can be made straight from its hidden states.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        longest: int,
        pad_token_id: int,
        device: torch.device,
        precision: str,
        autocast: AbstractContextManager[Any],
        packing: bool | None = None,
        compile: bool = False,
    ) -> None:
        self.pad_token_id, self.device = pad_token_id, device
        self.longest = -(-longest // MULTIPLE) * MULTIPLE
        self.compiled = compile and device.type == "cuda"
        self.straight = takes_logits_straight(model)
        self.packed = self.straight and packs_here(packing, device, precision) and reads_packs(model, autocast)

    def cut(self, rows: Sequence[Encoded], max_rows: int | None, max_tokens: int) -> list[list[int]]:
        """Numbers of the rows that are read together: those of like length, or as many as a pack takes."""
        lengths = [len(row.input_ids) for row in rows]
        if self.packed:
            return packs(lengths, max_tokens, max_rows)
        return [
            piece.rows
            for piece in pieces([0] * len(rows), lengths, max_rows, max_tokens=max_tokens, device=self.device.type)
        ]

    def passage(self, rows: Sequence[Encoded]) -> Passage:
        """The rows of one pass, on the CPU."""
        texts = [row.input_ids for row in rows]
        multiple = MULTIPLE if self.device.type == "cuda" and (self.packed or self.compiled) else 1
        if self.packed:
            packed = Pack(*pack(texts, self.pad_token_id, multiple), self.longest)
            ids, starts = packed.ids, [0, *accumulate(map(len, texts))]
        else:
            packed, ids = None, pad_right(texts, self.pad_token_id, multiple)[0]
            starts = list(range(0, ids.numel(), ids.shape[1]))
        firsts = [max(row.prompt_length, 1) for row in rows]
        borders = [(start, first, len(text)) for start, first, text in zip(starts, firsts, texts, strict=False)]
        # The state before a token judges it, hence the shift by one.
        places = list(chain.from_iterable(range(at + first - 1, at + end - 1) for at, first, end in borders))
        targets = list(chain.from_iterable(text[first:] for first, text in zip(firsts, texts, strict=True)))
        return Passage(ids, torch.tensor(places), torch.tensor(targets), packed, sum(map(len, texts)))

    def losses(self, model: PreTrainedModel, passage: Passage) -> tuple[Tensor, Tensor]:
        """(sum of the cross entropies of the response tokens, how many of them have the largest logit)."""
        # Padding on the right is seen by no token of a causal model: no mask is needed.
        if not self.straight:
            logits = model(input_ids=passage.ids, use_cache=False).logits.flatten(0, 1)[passage.places].float()  # [M,V]
            hits = (logits.argmax(-1) == passage.targets).float().sum()
            return cross_entropy(logits, passage.targets, reduction="sum"), hits
        hidden = read(model, passage.ids) if passage.packed is None else read_pack(model, passage.packed)
        hidden = hidden.flatten(0, 1).index_select(0, passage.places)  # [M,d]
        loss, hits = head_loss(
            hidden, model.get_output_embeddings().weight, passage.targets, self.compiled and torch.is_grad_enabled(),
            with_hits=True,
        )  # fmt: skip
        assert hits is not None
        return loss, hits
