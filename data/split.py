"""Train and evaluation rows, split by prompt: what is evaluated on was trained on in no stage."""

import math
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import TypeVar

T = TypeVar("T")


def train_and_eval(
    rows: Iterable[T], eval_rows: Iterable[T] | None, key: Callable[[T], str], eval_share: float
) -> tuple[list[T], list[T], int]:
    """(train, eval, rows removed from train): no prompt, as `key` gives it, is on both sides.

    Without evaluation rows of its own a source is split; with them it loses the rows whose prompt they hold.
    """
    if eval_rows is None:
        return *split_by_prompt(rows, key, eval_share), 0
    evaluation = list(eval_rows)
    train, num_removed = without(rows, evaluation, key)
    return train, evaluation, num_removed


def split_by_prompt(rows: Iterable[T], key: Callable[[T], str], eval_share: float) -> tuple[list[T], list[T]]:
    """Split rows into (train, eval) by a hash of `key(row)`, keeping their order.

    The hash has no seed, so a prompt falls on the same side in every stage and every run. With two or more
    distinct prompts neither side is empty (unless eval_share is 0): the prompt nearest the border crosses it.
    With one distinct prompt the evaluation side is empty.
    """
    rows = list(rows)
    places = [place(key(row)) for row in rows]
    end = border(min(places, default=0), max(places, default=0), eval_share)
    train = [row for row, where in zip(rows, places, strict=True) if where >= end]
    evaluation = [row for row, where in zip(rows, places, strict=True) if where < end]
    return train, evaluation


def border(lowest: float, highest: float, eval_share: float) -> float:
    """The place below which texts are held out, given the lowest and the highest place of all: `eval_share`, or so
    much more or less that neither side is empty."""
    if eval_share == 0 or lowest == highest:
        return 0.0
    if lowest >= eval_share:
        return math.nextafter(lowest, 1)
    return min(eval_share, highest)


def without(train: Iterable[T], evaluation: Iterable[T], key: Callable[[T], str]) -> tuple[list[T], int]:
    """Train rows whose prompt is not in an explicit evaluation set, and how many rows that removed."""
    train = list(train)
    held_out = {key(row) for row in evaluation}
    kept = [row for row in train if key(row) not in held_out]
    return kept, len(train) - len(kept)


def place(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    raw = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(raw, "big") / 2**64
