"""Single answers that were judged good or bad: thumbs up and down, TRL's unpaired preferences and stepwise labels.

No two answers to one prompt are compared, so a reward model cannot learn from them here: refused with the cure. And a
bad answer is no demonstration, whatever the format of its row.
"""

from collections.abc import Iterator
from typing import Any

from rlhf.data.formats import Format, Numbered
from rlhf.data.messages import Unusable

_VERDICTS = ("label", "kto_tag", "thumbs")
_WORDS = {"true": True, "up": True, "false": False, "down": False}
_ANSWERS = ("messages", "completion", "response", "conversations", "output", "answer")
_CURE = (
    "; rankings need two answers to the same prompt: pair a good and a bad one as prompt, chosen and rejected, "
    "or learn from the good ones as demonstrations"
)


def refuse_judged_bad(row: Any) -> None:
    """Raise Unusable for a row whose answer was judged bad, so that it is not imitated."""
    if isinstance(row, dict) and (found := _verdict(row)) is not None and not found[1]:
        name = found[0]
        raise Unusable(
            "a response that was judged bad", f": {name} is {row[name]!r}; rename the column if it means something else"
        )


def _verdict(row: dict[str, Any]) -> tuple[str, bool] | None:
    """The column that says good or bad, and what it says. Numbers are left alone: they may be of any classes."""
    for name in _VERDICTS:
        value = row.get(name)
        if value is None:
            continue
        if isinstance(value, str):
            value = _WORDS.get(value.strip().lower())
        if isinstance(value, bool):
            return name, value
    return None


def _is_one_answer(row: dict[str, Any]) -> bool:
    return _verdict(row) is not None and any(name in row for name in _ANSWERS)


def _refuse(reason: str, rows: list[Numbered]) -> Iterator[tuple[int, Any]]:
    for number, _ in rows:
        yield number, Unusable(reason, _CURE)


def _refuse_labels(rows: list[Numbered]) -> Iterator[tuple[int, Any]]:
    return _refuse("one answer that was judged good or bad, with none to compare", rows)


def _refuse_steps(rows: list[Numbered]) -> Iterator[tuple[int, Any]]:
    return _refuse("labels on the steps of one answer, with none to compare", rows)


# `read_all` although rows are refused one by one: where prompts are wanted these rows have good ones, and only
# formats with `read` are asked for them. No column is required, so that every format that reads such rows comes first.
FORMATS = (
    Format("unpaired_labels", "preferences", (), read_all=_refuse_labels, recognises=_is_one_answer),
    Format("stepwise_labels", "preferences", ("prompt", "completions", "labels"), read_all=_refuse_steps),
)
