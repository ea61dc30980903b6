"""Train and evaluation rows, split by prompt: what is evaluated on was trained on in no stage."""

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
    keys = [key(row) for row in rows]
    places = {text: _place(text) for text in set(keys)}
    chosen = {text for text, place in places.items() if place < eval_share}
    if eval_share > 0 and len(places) > 1:
        if not chosen:
            chosen = {min(places, key=places.__getitem__)}
        elif len(chosen) == len(places):
            chosen.remove(max(places, key=places.__getitem__))
    elif len(places) <= 1:
        chosen = set()
    train = [row for row, text in zip(rows, keys, strict=True) if text not in chosen]
    evaluation = [row for row, text in zip(rows, keys, strict=True) if text in chosen]
    return train, evaluation


def without(train: Iterable[T], evaluation: Iterable[T], key: Callable[[T], str]) -> tuple[list[T], int]:
    """Train rows whose prompt is not in an explicit evaluation set, and how many rows that removed."""
    train = list(train)
    held_out = {key(row) for row in evaluation}
    kept = [row for row in train if key(row) not in held_out]
    return kept, len(train) - len(kept)


def _place(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    raw = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(raw, "big") / 2**64
