"""Microbatches of texts of about equal length, so that little of what the models read is padding; and packs, in which
nothing is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from rlhf.stages.packing import PackedRows, episodes_as_pack, sent

PASS_TOKENS = 128
"""What a forward and backward pass is taken to cost on a CPU beside its tokens, in tokens: an estimate, of which only
the cuts depend."""
PASS_TOKENS_ON_GPU = 2000
"""The same on a GPU, which is through with its tokens before the next kernel is started: an estimate too."""


@dataclass(frozen=True)
class Piece:
    """Rows that are read together, and how many columns of prompt and response any of them needs."""

    rows: list[int]
    num_prompt: int
    num_response: int
    _sent: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)
    as_pack: PackedRows | None = field(default=None, compare=False, repr=False)
    """Its texts without padding, once that was made."""

    def on(self, device: torch.device) -> Tensor:
        """Its rows [n] there; they are sent once."""
        if device not in self._sent:
            (self._sent[device],) = sent(device, torch.tensor(self.rows))
        return self._sent[device]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, some: slice) -> "Piece":
        """Some of its rows."""
        return replace(self, rows=self.rows[some], _sent={}, as_pack=None)

    def of_text(self, tensor: Tensor, num_response: int) -> Tensor:
        """From [B,T]: prompts padded on the left, then responses padded on the right to `num_response`."""
        border = tensor.shape[1] - num_response
        return tensor[self.on(tensor.device), border - self.num_prompt : border + self.num_response]

    def packed(self, input_ids: Tensor, attention_mask: Tensor, num_response: int) -> "Piece":
        """With its texts, of these [B,T], as a pack for all models that read them."""
        text = self.of_text(input_ids, num_response), self.of_text(attention_mask, num_response)
        return replace(self, as_pack=episodes_as_pack(*text, self.num_response))

    def of_response(self, tensor: Tensor) -> Tensor:
        """From [B,R]."""
        return tensor[self.on(tensor.device), : self.num_response]


def pieces(
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    max_rows: int | None = None,
    rows: Sequence[int] | None = None,
    num_texts: Sequence[int] | None = None,
    max_tokens: int | None = None,
    device: str = "cpu",
    packed: bool = False,
) -> list[Piece]:
    """Cut `rows` (all by default) into pieces of at most `max_rows` and `max_tokens`, longest rows first.

    Sorted by length and cut where it costs least, by dynamic programming: a piece costs its texts times their common
    width, and what a pass costs on this type of `device`. A row is one text, or `num_texts` of at most its length; one
    that has more than `max_tokens` by itself is a piece of its own. `packed`, a piece is read without its padding,
    which neither costs nor counts. Which rows share a piece changes no sum over all of them.
    """
    rows = range(len(prompt_lengths)) if rows is None else rows
    order = sorted(rows, key=lambda row: -prompt_lengths[row] - response_lengths[row])
    limit, budget = max_rows or len(order), max_tokens or math.inf
    of_pass = PASS_TOKENS if device == "cpu" else PASS_TOKENS_ON_GPU
    prompts, responses = (np.array([of[row] for row in order], float) for of in (prompt_lengths, response_lengths))
    texts = np.array([num_texts[row] for row in order] if num_texts else [1] * len(order), float)
    texts_before, tokens_before = (np.cumsum([0, *x]) for x in (texts, texts * (prompts + responses)))
    cost, first = np.zeros(len(order) + 1), [0] * (len(order) + 1)
    for end in range(1, len(order) + 1):
        start = max(end - limit, 0)  # of all pieces from here on that end there
        if packed:
            tokens = tokens_before[end] - tokens_before[start:end]
        else:  # of the rows before `end`, prompts and responses are as wide as the widest from there on
            for widths in (prompts, responses):
                np.maximum(widths[start:end], widths[end - 1], out=widths[start:end])
            tokens = (texts_before[end] - texts_before[start:end]) * (prompts[start:end] + responses[start:end])
        total = cost[start:end] + tokens
        total[:-1][tokens[:-1] > budget] = math.inf  # one row alone may be beyond it
        best = end - 1 - int(total[::-1].argmin())  # the smallest piece of those that cost the same
        cost[end], first[end] = total[best - start] + of_pass, best
    found, end = [], len(order)
    while end:
        taken = order[first[end] : end]
        found.append(
            Piece(taken, max(prompt_lengths[row] for row in taken), max(response_lengths[row] for row in taken))
        )
        end = first[end]
    return found[::-1]


def packs(
    lengths: Sequence[int], max_tokens: int, max_rows: int | None = None, rows: Sequence[int] | None = None
) -> list[list[int]]:
    """Deal `rows` (all by default) out to as few packs of at most `max_tokens` and `max_rows` as hold them.

    The packs have about equally many tokens. A row that has more than `max_tokens` by itself is alone.
    """
    order = sorted(range(len(lengths)) if rows is None else rows, key=lambda row: -lengths[row])
    limit = max_rows or len(order)
    num = max(
        math.ceil(sum(min(lengths[row], max_tokens) for row in order) / max_tokens),
        math.ceil(len(order) / max(limit, 1)),
    )
    while True:
        found: list[list[int]] = [[] for _ in range(num)]
        sizes = [0] * num
        for row in order:  # the longest first, each to the smallest pack
            place = min((size, place) for place, size in enumerate(sizes) if len(found[place]) < limit)[1]
            found[place].append(row)
            sizes[place] += lengths[row]
        if all(size <= max_tokens or len(pack) == 1 for size, pack in zip(sizes, found, strict=True)):
            return [pack for pack in found if pack]
        num += 1
