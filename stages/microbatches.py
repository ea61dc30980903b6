"""Microbatches of texts of about equal length, so that little of what the models read is padding; and packs, in which
nothing is."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

PASS_TOKENS = 128
"""What a forward and backward pass is taken to cost beside its tokens, in tokens: an estimate, of which only the cuts
depend."""


@dataclass(frozen=True)
class Piece:
    """Rows that are read together, and how many columns of prompt and response any of them needs."""

    rows: list[int]
    num_prompt: int
    num_response: int

    def of_text(self, tensor: Tensor, num_response: int) -> Tensor:
        """From [B,T]: prompts padded on the left, then responses padded on the right to `num_response`."""
        border = tensor.shape[1] - num_response
        return tensor[self.rows, border - self.num_prompt : border + self.num_response]

    def of_response(self, tensor: Tensor) -> Tensor:
        """From [B,R]."""
        return tensor[self.rows, : self.num_response]


def pieces(
    prompt_lengths: Sequence[int],
    response_lengths: Sequence[int],
    max_rows: int | None = None,
    rows: Sequence[int] | None = None,
    num_texts: Sequence[int] | None = None,
    max_tokens: int | None = None,
) -> list[Piece]:
    """Cut `rows` (all by default) into pieces of at most `max_rows` and `max_tokens`, longest rows first.

    Sorted by length and cut where it costs least, by dynamic programming: a piece costs its texts times their common
    width, and PASS_TOKENS. A row is one text, or `num_texts` of at most its length; one that has more than
    `max_tokens` by itself is a piece of its own. Which rows share a piece changes no sum over all of them.
    """
    rows = range(len(prompt_lengths)) if rows is None else rows
    order = sorted(rows, key=lambda row: -prompt_lengths[row] - response_lengths[row])
    limit, budget = max_rows or len(order), max_tokens or math.inf
    cost, first = [0.0] + [math.inf] * len(order), [0] * (len(order) + 1)
    for end in range(1, len(order) + 1):
        num_prompt = num_response = texts = 0
        for start in range(end - 1, max(end - limit, 0) - 1, -1):
            num_prompt = max(num_prompt, prompt_lengths[order[start]])
            num_response = max(num_response, response_lengths[order[start]])
            texts += num_texts[order[start]] if num_texts else 1
            tokens = texts * (num_prompt + num_response)
            if tokens > budget and start < end - 1:
                break
            total = cost[start] + PASS_TOKENS + tokens
            if total < cost[end]:
                cost[end], first[end] = total, start
    found, end = [], len(order)
    while end:
        taken = order[first[end] : end]
        widths = max(prompt_lengths[row] for row in taken), max(response_lengths[row] for row in taken)
        found.append(Piece(taken, *widths))
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
