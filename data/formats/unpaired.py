"""Single answers that were judged good or bad: thumbs up and down, TRL's unpaired preferences and stepwise labels.

No two answers to one prompt are compared, so a reward model cannot learn from them here: refused with the cure. And a
bad answer is no demonstration, whatever the format of its row.
"""

from typing import Any, NoReturn

from rlhf.data.formats import Format
from rlhf.data.formats.ranked_answers import ONE_A_ROW
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


def _is_judged(row: dict[str, Any]) -> bool:
    """Whether a row holds one answer that was judged good or bad, and no rank or score, by which answers compare."""
    judged = _verdict(row) is not None and any(name in row for name in _ANSWERS)
    return judged and not any(known.fits(row) for known in ONE_A_ROW)


def _refuse_label(row: dict[str, Any]) -> NoReturn:
    raise Unusable("one answer that was judged good or bad, with none to compare", _CURE)


def _refuse_steps(row: dict[str, Any]) -> NoReturn:
    raise Unusable("labels on the steps of one answer, with none to compare", _CURE)


# No column is required, so that every format that reads such rows comes first.
FORMATS = (
    Format("unpaired_labels", "preferences", (), _refuse_label, recognises=_is_judged),
    Format("stepwise_labels", "preferences", ("prompt", "completions", "labels"), _refuse_steps),
)
