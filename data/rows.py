"""Rows become text, demonstrations, rankings and prompts; unusable ones are counted, never lost unseen."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rlhf.data import formats
from rlhf.data.errors import DataError
from rlhf.data.examples import Demonstration, Prompt, Ranking, ranked
from rlhf.data.messages import (
    Messages,
    Unusable,
    as_conversation,
    as_messages,
    as_prompt,
    as_response,
    as_text,
    as_transcript,
    awaiting_answer,
    prompt_key,
    prompt_text,
)
from rlhf.data.sources import Row, Source, Unreadable, describe, locate, read_rows

__all__ = [
    "Demonstration",
    "Dropped",
    "Loaded",
    "Messages",
    "Prompt",
    "Ranking",
    "Report",
    "load",
    "prompt_key",
    "prompt_text",
    "read_demonstrations",
    "read_prompts",
    "read_rankings",
    "read_text",
]

T = TypeVar("T")

NEEDS = {
    "text": "a column of text (named by the source's `column`)",
    "demonstrations": "prompt and response (or completion), or messages that end with an assistant turn",
    "preferences": "prompt, chosen and rejected, or prompt, responses and ranks (1 is best)",
    "prompts": "prompt, or messages that end with a user turn",
}
# What a source's `map` can name.
COLUMNS = (
    "text",
    "prompt",
    "messages",
    "response",
    "completion",
    "chosen",
    "rejected",
    "responses",
    "completions",
    "ranks",
)
# Columns under which rows of each kind are read without further ado; a format must need more to come before them.
OWN: dict[str, tuple[tuple[str, ...], ...]] = {
    "text": (),
    "demonstrations": (("messages",), ("prompt", "response"), ("prompt", "completion")),
    "preferences": (
        ("prompt", "responses", "ranks"),
        ("prompt", "completions", "ranks"),
        ("prompt", "chosen", "rejected"),
        ("chosen", "rejected"),
    ),
    "prompts": (("messages",), ("prompt",), ("chosen", "rejected")),
}
FIRST_FEW = 5  # row numbers kept for each reason
# Left out without counting as bad data: such a row carries nothing that is not read elsewhere.
BLANK, DUPLICATE, TIED = HARMLESS = "blank text", "duplicate prompt", "all answers tied"


@dataclass
class Dropped:
    """How many rows one reason cost, and the numbers of the first few."""

    count: int = 0
    rows: list[int] = field(default_factory=list)
    detail: str = ""
    """What the first of them adds to the reason."""


@dataclass
class Report:
    """What reading a source found; `rows` = `kept` + all dropped."""

    kind: str
    format: str = ""
    rows: int = 0
    kept: int = 0
    dropped: dict[str, Dropped] = field(default_factory=dict)
    dropped_ties: int = 0
    """Equal pairs in rankings that were dropped because all their answers are tied."""
    parts: dict[str, Dropped] = field(default_factory=dict)
    """What was left out of rows that were kept, such as one of many rankings in a tree of answers."""
    warnings: list[str] = field(default_factory=list)

    @property
    def bad(self) -> int:
        """Dropped rows that count against `max_dropped`."""
        return sum(drop.count for reason, drop in self.dropped.items() if reason not in HARMLESS)

    def first_bad(self) -> tuple[int, str]:
        """The first unusable row and what is wrong with it; a harmless one only if there is no other."""
        passed = HARMLESS if self.bad else ()
        drops = {reason: drop for reason, drop in self.dropped.items() if reason not in passed}
        reason, drop = min(drops.items(), key=lambda item: item[1].rows[0])
        return drop.rows[0], reason + drop.detail

    def summary(self) -> str:
        """One line: kept n of m, with reasons and first row numbers."""
        parts = [f"kept {self.kept} of {self.rows} rows"]
        for reason, drop in self.dropped.items():
            more = ", …" if drop.count > len(drop.rows) else ""
            rows = ", ".join(map(str, drop.rows))
            parts.append(f"{drop.count} × {reason} (row{'s' if drop.count > 1 else ''} {rows}{more})")
        return "; ".join(parts)

    def drop(self, number: int, unusable: Unusable) -> None:
        """Count one row out."""
        self._count(self.dropped, number, unusable)

    def drop_part(self, number: int, unusable: Unusable) -> None:
        """Count out one example of a row that may be kept for others."""
        self._count(self.parts, number, unusable)

    def _count(self, where: dict[str, Dropped], number: int, unusable: Unusable) -> None:
        drop = where.setdefault(unusable.reason, Dropped(detail=unusable.detail))
        drop.count += 1
        if drop.count <= FIRST_FEW:
            drop.rows.append(number)
        self.dropped_ties += unusable.ties


@dataclass
class Loaded(Generic[T]):
    """Usable rows, and the report of how they came about."""

    rows: list[T]
    report: Report


def read_text(source: Source, max_dropped: float = 0.0) -> Loaded[str]:
    """Documents. A .txt or .md file is one; blank ones are left out."""
    return _enough(load(source, "text"), source, max_dropped)


def read_demonstrations(source: Source, max_dropped: float = 0.0) -> Loaded[Demonstration]:
    """Prompts with a response. Raises DataError if more than the share `max_dropped` of rows is unusable."""
    return _enough(load(source, "demonstrations"), source, max_dropped)


def read_rankings(source: Source, max_dropped: float = 0.0, keep_ties: bool = False) -> Loaded[Ranking]:
    """Prompts with ranked responses; a chosen/rejected pair has ranks 1 and 2.

    Rankings whose answers are all tied are counted and left out, which is no fault of the data, unless
    `keep_ties`, for a loss that learns from ties.
    """
    return _enough(load(source, "preferences", keep_ties), source, max_dropped)


def read_prompts(source: Source, max_dropped: float = 0.0) -> Loaded[Prompt]:
    """Prompts, each once, with what stands beside them; of demonstrations and rankings the prompt is the prompt."""
    return _enough(load(source, "prompts"), source, max_dropped)


def load(source: Source, kind: str, keep_ties: bool = False) -> Loaded[Any]:
    """Rows of one kind (text, demonstrations, preferences, prompts), however many rows are unusable.

    Raises DataError for a source that cannot be read at all.
    """
    if kind not in PARSERS:
        raise DataError(f"no kind of rows called {kind!r}; choose from {', '.join(PARSERS)}")
    report = Report(kind)
    rows = list(iterate(source, kind, report, keep_ties))
    return Loaded(rows, report)


def iterate(source: Source, kind: str, report: Report, keep_ties: bool = False) -> Iterator[Any]:
    """The usable rows of a source one by one, while `report` is filled in; it is complete at the end.

    A format that spreads an example over several rows is held in memory until all have been read.
    """
    shapes: dict[str, None] = {}  # in the order met
    columns: dict[str, None] = {}
    waiting: dict[formats.Format, list[formats.Numbered]] = {}
    seen: set[str] = set()

    def usable(number: int, example: Any) -> bool:
        if isinstance(example, Unusable):
            report.drop_part(number, example)
            return False
        if kind == "prompts":
            _refuse_repeat(example.messages, seen)
        elif kind == "preferences" and not keep_ties:
            _refuse_tie(example)
        return True

    for number, raw in read_rows(source):
        report.rows += 1
        columns |= dict.fromkeys(raw) if isinstance(raw, dict) else {}
        try:
            if isinstance(raw, Unreadable):
                raise Unusable(raw.reason, raw.detail)
            row = _mapped(raw, source)
            known = _format_of(row, source, kind)
            if known is not None and known.read_all is not None:
                waiting.setdefault(known, []).append((number, row))
                continue
            shape, found = (known.name, _read(known, row, kind)) if known else PARSERS[kind](row, source)
            examples = found if isinstance(found, list) else [found]
            kept = [example for example in examples if usable(number, example)]
            if not kept:
                raise next((e for e in examples if isinstance(e, Unusable)), Unusable("nothing to use in it"))
        except Unusable as unusable:
            report.drop(number, unusable)
        else:
            shapes[shape] = None
            report.kept += 1
            yield from kept
    for known, rows in waiting.items():
        shapes[known.name] = None
        yield from _read_together(known, rows, report, usable)
    _check_map(source, columns)
    report.format = "; ".join(shapes)
    if len(shapes) > 1:
        report.warnings.append(f"rows of {len(shapes)} shapes in one source: {report.format}")


def _format_of(row: Row, source: Source, kind: str) -> formats.Format | None:
    """The foreign format of a row; None for text, and for rows with our own column names."""
    if source.map or not isinstance(row, dict) or kind == "text":
        return None
    try:
        known = formats.find(kind, row, OWN[kind], source.format)
        if known is None and kind == "prompts" and not any(_has(row, shape) for shape in OWN[kind]):
            found = (formats.find(other, row, OWN[other]) for other in ("preferences", "demonstrations"))
            known = next((f for f in found if f is not None and f.read is not None), None)
    except formats.AmbiguousError as error:
        names = " or ".join(error.names)
        raise DataError(
            f"{source.path}: its columns ({', '.join(map(str, row))}) can be read in several ways; "
            f"say which in the source: format: {names}"
        ) from error
    return known


def _read(known: formats.Format, row: dict[str, Any], kind: str) -> Any:
    """The examples of one row; of another kind's, their prompt."""
    assert known.read is not None
    found = known.read(row)
    if kind != "prompts" or known.kind == "prompts":
        return found
    examples = found if isinstance(found, list) else [found]
    return [e if isinstance(e, Unusable) else Prompt(e.prompt, row) for e in examples]


def _read_together(
    known: formats.Format,
    rows: list[formats.Numbered],
    report: Report,
    usable: Callable[[int, Any], bool],
) -> Iterator[Any]:
    """The examples of rows that say something only together; a row that none of them counts under is dropped."""
    assert known.read_all is not None
    kept, lost = set(), {}
    for number, example in known.read_all(rows):
        try:
            if isinstance(example, Unusable):
                raise example
            usable(number, example)
        except Unusable as unusable:
            lost.setdefault(number, unusable)
        else:
            kept.add(number)
            yield example
    for number, unusable in lost.items():
        if number in kept:
            report.drop_part(number, unusable)
        else:
            report.drop(number, unusable)
    report.kept += len(rows) - len(lost.keys() - kept)


def _has(row: dict[str, Any], shape: tuple[str, ...]) -> bool:
    return all(column in row for column in shape)


def _refuse_repeat(prompt: Messages, seen: set[str]) -> None:
    key = prompt_key(prompt)
    if key in seen:
        raise Unusable(DUPLICATE)
    seen.add(key)


def _refuse_tie(ranking: Ranking) -> None:
    if len(set(ranking.ranks)) == 1:
        raise Unusable(TIED, ties=math.comb(len(ranking.ranks), 2))


def _check_map(source: Source, columns: dict[str, None]) -> None:
    """Refuse a map with a name that is not ours, or with a column that is in none of the rows."""
    for name, column in source.map.items():
        if name not in COLUMNS:
            raise DataError(f"{source.path}: map: no column of ours is called {name!r}; there are {', '.join(COLUMNS)}")
        if column not in columns:
            raise DataError(f"{source.path}: map: no column {column!r} to read as {name}{_found(columns)}")


def _mapped(row: Row, source: Source) -> Row:
    """The row with the columns that the source's `map` names under our names too."""
    if not source.map or not isinstance(row, dict):
        return row
    for name, column in source.map.items():
        if column not in row:
            raise Unusable(f"no column {column!r} to read as {name}", _found(row))
    return row | {name: row[column] for name, column in source.map.items()}


def _enough(loaded: Loaded[T], source: Source, max_dropped: float) -> Loaded[T]:
    """Refuse a source that lost too many rows, naming the first one and the cure."""
    report = loaded.report
    if loaded.rows and report.bad / report.rows <= max_dropped:
        return loaded
    row, why = report.first_bad()
    found = f"{locate(source, row)}: {why}; {report.kind} need {NEEDS[report.kind]}, so named or through map"
    if not loaded.rows:
        raise DataError(f"{found}. Nothing usable is left: {report.summary()}")
    share = math.ceil(100 * report.bad / report.rows) / 100
    raise DataError(f"{found}. {report.summary()}. Repair them, or set max_dropped={share:g} to go on without them")


# -- one row: each returns (the shape it has, what it means) or raises Unusable ----------------------------


def _parse_text(row: Row, source: Source) -> tuple[str, str]:
    if isinstance(row, str):
        return "text", as_text(row, "the row", empty=BLANK)
    column = source.column
    columns = _columns(row)
    if column not in columns:
        raise Unusable(f"no column {column!r}", _found(columns))
    return column, as_text(columns[column], column, empty=BLANK)


def _parse_prompt(row: Row, source: Source) -> tuple[str, Prompt]:
    if isinstance(row, str):
        return "text", Prompt(as_prompt(row), {"prompt": row})
    columns = _columns(row)
    if _prefers_messages(columns):
        messages = as_messages(columns["messages"], "messages")
        if len(messages) > 1 and messages[-1]["role"] == "assistant":  # a demonstration: its prompt
            messages = messages[:-1]
        return "messages", Prompt(awaiting_answer(messages), columns)
    if "prompt" in columns:
        return "prompt", Prompt(as_prompt(columns["prompt"]), columns)
    if "chosen" in columns:
        return "chosen, rejected", Prompt(_answered(columns["chosen"], "chosen")[0], columns)
    raise Unusable("no prompt", _found(columns))


def _parse_demonstration(row: Row, source: Source) -> tuple[str, Demonstration]:
    columns = _columns(row)
    if _prefers_messages(columns):
        return "messages", Demonstration(*as_conversation(columns["messages"], "messages"))
    if "prompt" in columns:
        name = _first_of(columns, "response", "completion")
        prompt = as_prompt(columns["prompt"])
        return f"prompt, {name}", Demonstration(prompt, _response(columns, name, prompt))
    raise Unusable("no prompt", _found(columns))


def _parse_ranking(row: Row, source: Source) -> tuple[str, Ranking]:
    columns = _columns(row)
    ranks = [1.0, 2.0]
    if "ranks" in columns and "prompt" in columns:
        name = _first_of(columns, "responses", "completions")
        shape = f"prompt, {name}, ranks"
        prompt = as_prompt(columns["prompt"])
        responses, ranks = _ranked(columns.get(name), columns["ranks"], name, prompt)
    elif "prompt" in columns:
        shape = "prompt, chosen, rejected"
        prompt = as_prompt(columns["prompt"])
        responses = [_response(columns, name, prompt) for name in ("chosen", "rejected")]
    elif "chosen" in columns and "rejected" in columns:
        shape = "chosen, rejected"
        prompt, chosen = _answered(columns["chosen"], "chosen")
        other, rejected = _answered(columns["rejected"], "rejected")
        if prompt_key(prompt) != prompt_key(other):
            raise Unusable("chosen and rejected answer different prompts")
        responses = [chosen, rejected]
    else:
        raise Unusable("no prompt", _found(columns))
    return shape, ranked(prompt, responses, ranks, source=columns.get("source", ""))


PARSERS: dict[str, Callable[[Row, Source], tuple[str, Any]]] = {
    "text": _parse_text,
    "demonstrations": _parse_demonstration,
    "preferences": _parse_ranking,
    "prompts": _parse_prompt,
}


def _prefers_messages(columns: dict[str, Any]) -> bool:
    """Whether the messages tell more than the prompt beside them (ultrachat_200k: its first user turn)."""
    if "prompt" not in columns:
        return "messages" in columns
    answers = (columns.get("response"), columns.get("completion"))
    return columns.get("messages") is not None and answers == (None, None)


def _answered(value: Any, name: str) -> tuple[Messages, str]:
    """(prompt, response) of an answer that brings its prompt along, as messages or as a transcript."""
    return as_transcript(value, name) if isinstance(value, str) else as_conversation(value, name)


def _ranked(values: Any, ranks: Any, name: str, prompt: Messages) -> tuple[list[str], list[float]]:
    for value, column in ((values, name), (ranks, "ranks")):
        if not isinstance(value, list):
            raise Unusable(f"{column} is {describe(value)}, not a list")
    if len(values) != len(ranks):
        raise Unusable(f"{name} and ranks differ in length", f": {len(values)} and {len(ranks)}")
    return [as_response(value, name, prompt) for value in values], ranks


def _columns(row: Row) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise Unusable("plain text where a row with columns is needed")
    return row


def _first_of(columns: dict[str, Any], name: str, other: str) -> str:
    """The name that is there; ours if neither is, so that an error asks for it."""
    return other if other in columns and name not in columns else name


def _response(columns: dict[str, Any], name: str, prompt: Messages) -> str:
    if name not in columns:
        raise Unusable("empty response", f": no column {name!r}{_found(columns)}")
    return as_response(columns[name], name, prompt)


def _found(columns: Iterable[str]) -> str:
    return f" (columns found: {', '.join(map(str, columns)) or 'none'})"
