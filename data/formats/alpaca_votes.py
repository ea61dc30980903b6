"""AlpacaEval's and AlpacaFarm's annotations: an instruction, two outputs, and which is preferred (1 or 2).

1.5, and 0 in older files, is a tie; a number in between is a judge's certainty. An annotator's verdict is a row of its
own: rows about the same two outputs, in either order, are one ranking, by majority (of certainties: by their mean).
"""

from collections.abc import Iterator
from typing import Any

from rlhf.data.examples import UNJUDGED, Prompt, Ranking, by_score, by_votes, number
from rlhf.data.formats import Format, Numbered, by_key
from rlhf.data.messages import SYSTEM, Messages, Unusable, as_question, as_response

_OUTPUTS = ("output_1", "output_2")
_VOTES: dict[float, int | None] = {1: 0, 2: 1, 1.5: None}


def instructed(row: dict[str, Any]) -> Messages:
    """The instruction and, in the line after it, what it is to be applied to."""
    return as_question({"instruction": row["instruction"], "input": row.get("input")})


def _read_all(rows: list[Numbered]) -> Iterator[tuple[int | tuple[int, ...], Any]]:
    for group in by_key(rows, _pair):
        numbers: list[int] = []
        preferences: list[float] = []
        first = group[0][1]
        for number_, row in group:
            try:
                preference = _preference(row["preference"])
            except Unusable as unusable:
                yield number_, unusable
                continue
            numbers.append(number_)
            preferences.append(preference if row["output_1"] == first["output_1"] else 3 - preference)
        if numbers:
            try:
                yield tuple(numbers), _ranking(first, preferences)
            except Unusable as unusable:
                yield tuple(numbers), unusable


def _pair(row: dict[str, Any]) -> tuple[str, ...]:
    asked = (repr(row.get(name)) for name in ("instruction", "input", "tools", *SYSTEM))
    return *asked, *sorted(repr(row[name]) for name in _OUTPUTS)


def _preference(value: Any) -> float:
    """From 1 (the first output) to 2 (the second)."""
    if value is None or value == "" or value != value:  # NaN: the judge's answer could not be read
        raise Unusable(UNJUDGED, ": preference is empty")
    preference = number(value, "preference") or 1.5
    if not 1 <= preference <= 2:
        raise Unusable("preference is not between 1 and 2", f": {value!r}")
    return preference


def _ranking(row: dict[str, Any], preferences: list[float]) -> Ranking:
    prompt = instructed(row)
    outputs = [as_response(row[name], name, prompt) for name in _OUTPUTS]
    source = row.get("dataset")
    if all(preference in _VOTES for preference in preferences):
        return by_votes(prompt, outputs, [_VOTES[preference] for preference in preferences], source)
    mean = sum(preferences) / len(preferences)
    return by_score(prompt, outputs, [2 - mean, mean - 1], source)


_COLUMNS = ("instruction", *_OUTPUTS, "preference")

FORMATS = (
    Format("alpaca_votes", "preferences", _COLUMNS, read_all=_read_all),
    Format("alpaca_votes", "prompts", _COLUMNS, lambda row: Prompt(instructed(row), row)),
)
