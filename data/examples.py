"""What rows become: prompts, demonstrations and rankings."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from rlhf.data.messages import Messages, Unusable, with_system, with_tools

# Reasons to leave something out that are no fault of the data.
UNJUDGED, DELETED, JUDGED_BAD = "nobody judged it", "a deleted message", "a response that was judged bad"

TOO_FEW = "fewer than two answers"
_GOOD = {"true": True, "up": True, "false": False, "down": False}
_DECIMAL_COMMA = re.compile(r"(?a)\s*([+-]?\d+),(\d{1,2}|\d{4,})\s*")  # three digits may be thousands


@dataclass(frozen=True)
class Prompt:
    """A prompt, and the whole row that it was read from (after the source's `map`)."""

    messages: Messages
    row: dict[str, Any]


@dataclass(frozen=True)
class Demonstration:
    """A prompt with a good response."""

    prompt: Messages
    response: str


@dataclass(frozen=True)
class Ranking:
    """A prompt with K responses and their ranks: 1 is best, equal ranks are ties."""

    prompt: Messages
    responses: list[str]
    ranks: list[float]
    strengths: list[float] | None = None
    """How good each response was said to be, higher is better, where the data has such numbers (scores, ratings, a
    strength of preference): the difference of two is how much the one was preferred. In the order of `ranks`."""
    source: str = ""
    """Where the row says that it comes from, if it does; the report card tells accuracies apart by it."""
    rater: str = ""
    """Whose ranking it is, where annotators are read apart and the row names them."""


def in_full(example: Any, row: dict[str, Any]) -> Any:
    """An example with its prompt as `asked` gives it; a text as it is. Raises Unusable."""
    if isinstance(example, Prompt):
        messages = asked(example.messages, row)
        return example if messages is example.messages else replace(example, messages=messages)
    if isinstance(example, (Demonstration, Ranking)):
        prompt = asked(example.prompt, row)
        return example if prompt is example.prompt else replace(example, prompt=prompt)
    return example


def asked(prompt: Messages, row: dict[str, Any]) -> Messages:
    """A prompt with the system message and the tools that other columns of its row hold, in whatever format."""
    return with_tools(with_system(prompt, row), row.get("tools"))


def ranked(
    prompt: Messages,
    responses: list[str],
    ranks: Sequence[Any],
    strengths: Sequence[Any] | None = None,
    source: Any = "",
) -> Ranking:
    """A ranking that says something. Raises Unusable where it does not, or contradicts itself."""
    if len(responses) != len(ranks):
        raise Unusable("answers and ranks differ in number", f": {len(responses)} and {len(ranks)}")
    if len(responses) < 2:
        raise Unusable(TOO_FEW)
    numbers = [number(rank, "rank") for rank in ranks]
    _check_texts(responses, numbers)
    strong = None if strengths is None else [number(strength, "strength") for strength in strengths]
    return Ranking(prompt, responses, numbers, strong, source if isinstance(source, str) else "")


def by_score(prompt: Messages, responses: list[str], scores: Sequence[Any], source: Any = "") -> Ranking:
    """A ranking by numbers of which higher is better; equal numbers are ties. Raises Unusable as `ranked`."""
    numbers = [number(score, "score") for score in scores]
    rank_of: dict[float, float] = {}
    for place, score in enumerate(sorted(numbers, reverse=True), start=1):
        rank_of.setdefault(score, float(place))
    return ranked(prompt, responses, [rank_of[score] for score in numbers], numbers, source)


def by_votes(prompt: Messages, responses: list[str], votes: Sequence[int | None], source: Any = "") -> Ranking:
    """A pair by majority: a vote is 0 or 1, the better answer, or None for a tie. Without a majority it is a tie."""
    counts = Counter(votes)
    first, second, tie = counts[0], counts[1], counts[None]
    ranks = [1, 2] if first > max(second, tie) else [2, 1] if second > max(first, tie) else [1, 1]
    return ranked(prompt, responses, ranks, source=source)


def judged(value: Any) -> bool | None:
    """Whether a label says good or bad; None where it says neither. Numbers do not: they may be of any classes."""
    if isinstance(value, str):
        return _GOOD.get(value.strip().lower())
    return value if isinstance(value, bool) else None


def number(value: Any, name: str) -> float:
    """A finite number, also one written as text, with a decimal point or comma. Raises Unusable."""
    reason = f"a {name} is not a finite number"
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise Unusable(reason, f": {value!r}")
    try:
        found = float(_decimal_point(value) if isinstance(value, str) else value)
    except OverflowError:
        raise Unusable(reason, ": it has hundreds of digits") from None
    except ValueError:
        raise Unusable(reason, f": {value!r}") from None
    if not math.isfinite(found):
        raise Unusable(reason, f": {value!r}")
    return found


def mean(numbers: Iterable[float], name: str) -> float:
    """The mean of finite numbers. Raises Unusable where their sum is none."""
    try:
        return fmean(numbers)
    except OverflowError:
        raise Unusable(f"a {name} is not a finite number", ": a mean of several is too large") from None


def _decimal_point(text: str) -> str:
    found = _DECIMAL_COMMA.fullmatch(text)
    return text if found is None else ".".join(found.groups())


def _check_texts(responses: list[str], ranks: list[float]) -> None:
    """Refuse what contradicts itself (one text at two ranks) and what has nothing to compare."""
    rank_of: dict[str, float] = {}
    for response, rank in zip(responses, ranks, strict=True):
        if rank_of.setdefault(response.strip(), rank) != rank:
            raise Unusable("identical answers", f" at different ranks: {response.strip()[:40]!r}")
    if len(rank_of) == 1:
        raise Unusable("identical answers", f": {responses[0].strip()[:40]!r}")
