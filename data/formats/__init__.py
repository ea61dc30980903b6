"""How other people's data sets say what they hold. Each module here is one format; a new file is found by itself.

A format names the columns that its rows must have, and reads such a row. Where a row has the columns of several, the
format that needs more of them is meant, and after that the one that reads a row by itself, not several together; where
that does not decide, the row is refused until the source says `format: name`. The toolkit's own column names
(`rlhf.data.rows`) come before formats that ask for no more than they.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar

from rlhf.data.columns import columns_found, with_map
from rlhf.data.examples import TOO_FEW, Demonstration, Prompt, Ranking, asked, by_score, mean
from rlhf.data.messages import (
    Messages,
    Unusable,
    no_system_message,
    prompt_key,
    prompt_text,
    system_column,
    with_tools,
)

Example = Ranking | Demonstration | Prompt | Messages
MOST_ANSWERS = 1000
"""Answers to one prompt that rows of one answer each may hold; of more, something else tells the prompts apart."""
Numbered = tuple[int, dict[str, Any]]
"""A row with its number in the source, from 1."""


@dataclass(frozen=True)
class Format:
    """One format of one kind of rows (demonstrations, preferences, prompts)."""

    name: str
    """What `rlhf data check` shows, and what a source's `format` can name."""
    kind: str
    columns: tuple[str, ...]
    """What a row must have; their values may still be missing."""
    read: Callable[[dict[str, Any]], Any] | None = None
    """One row → an example, or a list of examples and of `Unusable` for its parts. Raises Unusable."""
    read_all: Callable[[list[Numbered]], Iterable[tuple[int | tuple[int, ...], Any]]] | None = None
    """Instead of `read`, where an example is spread over several rows: all rows of the format → (number of the row
    that it counts under, or of several; example or Unusable), each row number at least once."""
    recognises: Callable[[dict[str, Any]], bool] | None = None
    """What a row must be like beyond its columns."""
    apart: Callable[[dict[str, Any]], list[Any]] | None = None
    """Where `read` makes one ranking of what several annotators said: a ranking or `Unusable` for each of them."""

    def fits(self, row: dict[str, Any]) -> bool:
        """Whether a row is of this format."""
        return all(name in row for name in self.columns) and (self.recognises is None or self.recognises(row))


class AmbiguousError(Exception):
    """A row that several formats would read, each in its own way."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = sorted(names)
        super().__init__(", ".join(self.names))


@cache
def formats() -> tuple[Format, ...]:
    """All there are: the FORMATS of each module here."""
    modules = [importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__)]
    return tuple(known for module in modules for known in module.FORMATS)


def find(kind: str, row: dict[str, Any], own: Iterable[tuple[str, ...]], name: str | None = None) -> Format | None:
    """The format of a row, or None where the toolkit's own column names (`own`, by shape) say as much.

    Raises AmbiguousError where several formats fit and none of them comes first.
    """
    if name is not None:
        known = next((f for f in formats() if (f.kind, f.name) == (kind, name)), None)
        if known is None or not known.fits(row):
            raise Unusable(f"the row is not of the format {name}", columns_found(row))
        return known
    fitting = [f for f in _with_columns(kind, tuple(row)) if f.recognises is None or f.recognises(row)]
    if not fitting:
        return None
    best = [f for f in fitting if not any(set(f.columns) < set(other.columns) for other in fitting)]
    shapes = [set(shape) for shape in own if all(column in row for column in shape)]
    if shapes:
        best = [f for f in best if any(set(f.columns) > shape for shape in shapes)]
    best = [f for f in best if f.read is not None] or best
    if len(best) > 1:
        raise AmbiguousError(f.name for f in best)
    return best[0] if best else None


@lru_cache(maxsize=1024)  # rows of one source mostly have the same columns
def _with_columns(kind: str, columns: tuple[str, ...]) -> list[Format]:
    """The formats whose columns a row has."""
    return [f for f in formats() if f.kind == kind and all(name in columns for name in f.columns)]


def by_key(rows: list[Numbered], key: Callable[[dict[str, Any]], Any]) -> Iterator[list[Numbered]]:
    """Rows that belong together, in the order in which their first came."""
    groups: dict[Any, list[Numbered]] = {}
    for number, row in rows:
        groups.setdefault(key(row), []).append((number, row))
    yield from groups.values()


class _Answer(Protocol):
    """What one row says of one answer."""

    @property
    def prompt(self) -> Messages: ...


A = TypeVar("A", bound=_Answer)


class Rating(NamedTuple):
    """One answer with its score, the higher the better."""

    prompt: Messages
    response: str
    score: float
    source: Any = ""


def by_mean(ratings: list[tuple[int, Rating]]) -> Ranking:
    """By the scores, of an answer that was rated twice by their mean."""
    answers: dict[str, tuple[str, list[float]]] = {}
    for _, rating in ratings:
        answers.setdefault(rating.response.strip(), (rating.response, []))[1].append(rating.score)
    responses = [response for response, _ in answers.values()]
    means = [mean(scores, "score") for _, scores in answers.values()]
    source = common([rating.source for _, rating in ratings])
    return by_score(ratings[0][1].prompt, responses, means, source)


def common(sources: Sequence[Any]) -> Any:
    """The source that all answers to a prompt name; none where each has its own, such as the model it is from."""
    return sources[0] if all(source == sources[0] for source in sources) else ""


def ranked_together(
    rows: list[Numbered], read: Callable[[dict[str, Any]], A], rank: Callable[[list[tuple[int, A]]], Ranking]
) -> Iterator[tuple[tuple[int, ...], Ranking | Unusable]]:
    """Rankings of rows that each hold one answer: `rank` makes one of all that are of the same prompt.

    System message and tools of a row belong to the prompt (`asked`): answers with others are of another prompt.
    """
    groups: dict[str, list[tuple[int, A]]] = {}
    for number, row in rows:
        try:
            answer = read(row)
            key = prompt_key(asked(answer.prompt, row))
        except Unusable as unusable:
            yield (number,), unusable
        else:
            groups.setdefault(key, []).append((number, answer))
    lonely = _why_alone(groups, dict(rows)) if any(len(group) == 1 for group in groups.values()) else {}
    for group in groups.values():
        numbers = tuple(number for number, _ in group)
        try:
            if len(group) == 1:
                raise lonely[numbers[0]]
            ranking = rank(group)
            if len(ranking.responses) > MOST_ANSWERS:
                raise Unusable(
                    f"more than {MOST_ANSWERS} answers to one prompt",
                    f": {len(ranking.responses)} to {prompt_text(ranking.prompt)[:40]!r}; "
                    f"does another column tell the prompts apart? {with_map('prompt')}",
                )
            yield numbers, ranking
        except Unusable as unusable:
            yield numbers, unusable


def _why_alone(groups: dict[str, list[tuple[int, A]]], row_of: dict[int, dict[str, Any]]) -> dict[int, Unusable]:
    """By its row, why the only answer to a prompt is of no use.

    Where others have the prompt under other system messages, these may be none: names of the models that answered.
    """
    lonely: dict[int, str] = {}
    first: dict[str, list[int]] = {}  # rows of each group, by the prompt without the column of a system message
    for group in groups.values():
        number, answer = group[0]
        key = prompt_key(with_tools(answer.prompt, row_of[number].get("tools")))
        first.setdefault(key, []).append(number)
        if len(group) == 1:
            lonely[number] = key
    why: dict[int, Unusable] = {}
    for number, key in lonely.items():
        other = next((row for row in first[key] if row != number), None)
        column = None if other is None else system_column(row_of[number]) or system_column(row_of[other])
        if column is None:
            why[number] = Unusable(TOO_FEW, ": no other usable row has its prompt")
        else:
            found = f": row {other} has its prompt under another one; if {column!r} names the model that answered, "
            why[number] = Unusable("fewer than two answers under one system message", found + no_system_message(column))
    return why
