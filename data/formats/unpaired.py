"""Single answers that were judged good or bad: thumbs up and down, TRL's unpaired preferences and stepwise labels.

The rows of one prompt are a ranking as if good were a score of 1 and bad one of 0. An answer with no other to compare
with cannot be used, which counts against `max_dropped`; prompts whose answers are all good, or all bad, are left out as
ties. A bad answer is no demonstration, whatever the format of its row.
"""

from collections.abc import Iterator
from typing import Any, NoReturn

from rlhf.data.examples import JUDGED_BAD, TOO_FEW, Demonstration, Ranking, judged
from rlhf.data.formats import AmbiguousError, Format, Numbered, Rating, by_mean, find, ranked_together
from rlhf.data.formats.ranked_answers import ONE_A_ROW
from rlhf.data.messages import Unusable
from rlhf.data.own import OWN, parse_demonstration

_VERDICTS = ("label", "kto_tag", "thumbs")
_ANSWERS = ("messages", "completion", "response", "conversations", "output", "answer")
_CURE = (
    "; rankings need two answers to the same prompt: pair a good and a bad one as prompt, chosen and rejected, "
    "or learn from the good ones as demonstrations"
)


def refuse_judged_bad(row: Any) -> None:
    """Raise Unusable for a row whose answer was judged bad, so that it is not imitated."""
    if isinstance(row, dict) and (found := _verdict(row)) is not None and not found[1]:
        name = found[0]
        raise Unusable(JUDGED_BAD, f": {name} is {row[name]!r}; rename the column if it means something else")


def _verdict(row: dict[str, Any]) -> tuple[str, bool] | None:
    """The column that says good or bad, and what it says."""
    said = ((name, judged(row.get(name))) for name in _VERDICTS)
    return next(((name, good) for name, good in said if good is not None), None)


def _is_judged(row: dict[str, Any]) -> bool:
    """Whether a row holds one answer that was judged good or bad, and no rank or score, by which answers compare."""
    has_verdict = _verdict(row) is not None and any(name in row for name in _ANSWERS)
    return has_verdict and not any(known.fits(row) for known in ONE_A_ROW)


def _read_all(rows: list[Numbered]) -> Iterator[tuple[tuple[int, ...], Ranking | Unusable]]:
    for numbers, found in ranked_together(rows, _rating, by_mean):
        if isinstance(found, Unusable) and found.reason == TOO_FEW:
            found = Unusable("one answer that was judged good or bad, with none to compare", _CURE)
        yield numbers, found


def _rating(row: dict[str, Any]) -> Rating:
    said = _verdict(row)
    assert said is not None
    answered = _demonstration(row)
    return Rating(answered.prompt, answered.response, float(said[1]), row.get("source"))


def _demonstration(row: dict[str, Any]) -> Demonstration:
    """Prompt and answer, as the row has them in whatever format of demonstrations it is."""
    try:
        known = find("demonstrations", row, OWN["demonstrations"])
    except AmbiguousError as error:
        raise Unusable("prompt and answer can be read in several ways", f": as {error}") from None
    found = parse_demonstration(row)[1] if known is None or known.read is None else known.read(row)
    if not isinstance(found, Demonstration):
        raise Unusable("one label for several answers")
    return found


def _refuse_steps(row: dict[str, Any]) -> NoReturn:
    raise Unusable("labels on the steps of one answer, with none to compare", _CURE)


# No column is required, so that every format that reads such rows comes first.
UNPAIRED = Format("unpaired_labels", "preferences", (), read_all=_read_all, recognises=_is_judged)
FORMATS = (
    UNPAIRED,
    Format("stepwise_labels", "preferences", ("prompt", "completions", "labels"), _refuse_steps),
)
