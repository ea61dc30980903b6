"""Rows become text, demonstrations, rankings and prompts; unusable ones are counted, never lost unseen."""

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, Generic, TypeVar

from rlhf.data import formats
from rlhf.data.columns import columns_found, did_you_mean, names
from rlhf.data.errors import DataError, TooManyUnusable
from rlhf.data.examples import Demonstration, Prompt, Ranking, in_full
from rlhf.data.files import DOCUMENTS, suffixes
from rlhf.data.formats import ranked_answers, two_answers
from rlhf.data.formats.unpaired import UNPAIRED, refuse_judged_bad
from rlhf.data.mapping import check_map, with_our_names
from rlhf.data.messages import Messages, Unusable, prompt_key, prompt_text
from rlhf.data.own import NEEDS, OWN, PARSERS, cure
from rlhf.data.report import DOCUMENT, DUPLICATE, TIED, Dropped, Report
from rlhf.data.sources import Row, Source, Unreadable, locate, read_rows

__all__ = [
    "Demonstration",
    "Dropped",
    "Loaded",
    "Messages",
    "Prompt",
    "Ranking",
    "Report",
    "iterate",
    "load",
    "numbered",
    "prompt_key",
    "prompt_text",
    "read_demonstrations",
    "read_prompts",
    "read_rankings",
    "read_text",
    "refuse_losses",
]

T = TypeVar("T")

_BAD_ONES_TOO = "all are learned from, bad ones too; as preferences those to one prompt are a ranking"
_OF_RANKINGS = frozenset(name for shape in OWN["preferences"] for name in shape) - {"prompt"}
_MAPPED = (*ranked_answers.FORMATS, *two_answers.FORMATS)  # formats of which a map can name the columns
_WITH_PROMPTS = ("demonstrations", "preferences")  # kinds whose formats are read for their prompts, too


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
    report = Report(kind)
    rows = list(iterate(source, kind, report, keep_ties))
    return Loaded(rows, report)


def iterate(source: Source, kind: str, report: Report, keep_ties: bool = False, apart: bool = False) -> Iterator[Any]:
    """The usable rows of a source one by one, while `report` is filled in; it is complete at the end.

    A format that spreads an example over several rows is held in memory until all have been read. With `apart`, a
    row's annotators each have a ranking of their own, where the format tells them apart, and not one for all.
    """
    return (example for _, example in numbered(source, kind, report, keep_ties, apart=apart))


def numbered(
    source: Source, kind: str, report: Report, keep_ties: bool = False, limit: int | None = None, apart: bool = False
) -> Iterator[tuple[int, Any]]:
    """What `iterate` gives, each with the number of the row that it counts under; of the first `limit` rows alone."""
    if kind not in PARSERS:
        raise DataError(f"no kind of rows called {kind!r}; choose from {', '.join(PARSERS)}")
    _check_format(source, kind)
    shapes: dict[str, None] = {}  # in the order met
    columns: dict[str, None] = {}
    waiting: dict[formats.Format, list[formats.Numbered]] = {}
    seen: set[str] = set()
    judged: formats.Format | None = None
    met: set[tuple[str, ...]] = set()  # columns of rows
    opposed = Dropped()

    def refuse(example: Any) -> None:
        if isinstance(example, Unusable):
            raise example
        if kind == "prompts":
            _refuse_repeat(example.messages, seen)
        elif kind == "preferences" and not keep_ties:
            _refuse_tie(example)

    for number, raw in islice(read_rows(source, report.files), limit):
        report.rows += 1
        if source.map and isinstance(raw, dict):
            columns |= dict.fromkeys(raw)
        try:
            if isinstance(raw, Unreadable):
                raise Unusable(raw.reason, raw.detail)
            row = with_our_names(raw, source, kind)
            if kind == "demonstrations":
                refuse_judged_bad(row)
                if isinstance(row, dict) and tuple(row) not in met:
                    met.add(tuple(row))
                    judged = judged or _judged(row)
            known = _format_of(row, source, kind)
            if known is None:
                if kind == "preferences":
                    _refuse_unranked(row)
                shape, found = PARSERS[kind](row, source)
            else:
                assert isinstance(row, dict)
                shapes[known.name] = None  # also where no row of it can be used
                if known.read_all is not None:
                    waiting.setdefault(known, []).append((number, row))
                    continue
                assert known.read is not None
                shape, found = known.name, (known.apart if apart and known.apart else known.read)(row)
            examples = [_wanted(e, row, kind) for e in (found if isinstance(found, list) else [found])]
            kept, lost = _sorted_out(examples, refuse)
            if not kept:
                first = lost[0] if lost else Unusable("nothing to use in it")
                raise Unusable(first.reason, first.detail, sum(part.ties for part in lost))
            for part in lost:
                report.drop_part(number, part)
        except Unusable as unusable:
            report.drop(number, unusable if kind == "text" else _of_document(unusable, report))
        else:
            shapes[shape] = None
            report.kept += 1
            for example in kept:
                if _is_opposed(example):
                    opposed.add(number)
                yield number, example
    for known, rows in waiting.items():
        for number, example in _read_together(known, rows, report, refuse, kind):
            if _is_opposed(example):
                opposed.add(number)
            yield number, example
    check_map(source, columns)
    report.format = "; ".join(shapes)
    if judged is not None and report.kept:
        report.judged = f"each row has one answer and how good it is ({judged.name}): {_BAD_ONES_TOO}"
        report.warnings.append(report.judged)
    if opposed.count:
        one = opposed.count == 1
        report.warnings.append(
            f"{opposed.count} ranking{'s' * (not one)} {opposed.where} {'has' if one else 'have'} a lower score or "
            "strength for an answer of better rank; ranks decide, and 1 is the best: do both mean the same?"
        )
    if len(shapes) > 1:
        report.warnings.append(f"rows of {len(shapes)} shapes in one source: {report.format}")


def _format_of(row: Row, source: Source, kind: str) -> formats.Format | None:
    """The foreign format of a row; None for text, and for rows with our own column names."""
    if not isinstance(row, dict) or kind == "text":
        return None
    if source.map:
        if any(_has(row, shape) for shape in OWN[kind]):
            return None
        return next((f for f in _MAPPED if f.kind == kind and f.fits(row)), None)
    try:
        if kind == "prompts" and source.format is not None:
            kinds = [f.kind for f in formats.formats() if f.name == source.format]
            kind = kind if kind in kinds else kinds[0]
        known = formats.find(kind, row, OWN[kind], source.format)
        if known is None and kind == "prompts" and not any(_has(row, shape) for shape in OWN[kind]):
            found = (formats.find(other, row, OWN[other]) for other in _WITH_PROMPTS)
            known = next((f for f in found if f is not None), None)
    except formats.AmbiguousError as error:
        raise DataError(
            f"{source.path}: its columns ({names(row)}) can be read in several ways; "
            f"say which in the source: format: {' or '.join(error.names)} (`rlhf data`: --format NAME)"
        ) from error
    return known


def _refuse_unranked(row: Row) -> None:
    """Refuse a row with answers of which no column says how good they are, and nothing of what our rankings have."""
    if isinstance(row, dict) and _OF_RANKINGS.isdisjoint(row):
        two_answers.refuse_unjudged(row)
        if ranked_answers.is_unranked(row):
            raise Unusable("an answer without its rank or score", columns_found(row))


def _judged(row: dict[str, Any]) -> formats.Format | None:
    """The format in which a row holds one answer of a ranking, a bad one perhaps."""
    with suppress(formats.AmbiguousError):
        known = formats.find("preferences", row, OWN["preferences"])
        if known is not None and known.read_all is not None and known not in (two_answers.RANKINGS, UNPAIRED):
            return known
    return None


def _wanted(example: Any, row: Row, kind: str) -> Any:
    """An example as the kind that is wanted (of another kind's, its prompt), with all that its row asks."""
    if kind == "prompts" and isinstance(example, (Demonstration, Ranking)):
        assert isinstance(row, dict)
        example = Prompt(example.prompt, row)
    return in_full(example, row) if isinstance(row, dict) else example


def _sorted_out(examples: list[Any], refuse: Callable[[Any], None]) -> tuple[list[Any], list[Unusable]]:
    """The examples of a row that can be used, and what is wrong with the others."""
    kept, lost = [], []
    for example in examples:
        try:
            refuse(example)
        except Unusable as unusable:
            lost.append(unusable)
        else:
            kept.append(example)
    return kept, lost


def _read_together(
    known: formats.Format,
    rows: list[formats.Numbered],
    report: Report,
    refuse: Callable[[Any], None],
    kind: str,
) -> Iterator[tuple[int, Any]]:
    """The examples of rows that say something only together; a row that none of them counts under is dropped."""
    assert known.read_all is not None
    row_of = dict(rows)
    kept: set[int] = set()
    lost: dict[int, Unusable] = {}
    for under, example in known.read_all(rows):
        first, *others = under if isinstance(under, tuple) else (under,)
        try:
            example = _wanted(example, row_of[first], kind)
            refuse(example)
        except Unusable as unusable:
            lost.setdefault(first, unusable)
            for number in others:  # without its ties, which count once
                lost.setdefault(number, Unusable(unusable.reason, unusable.detail))
        else:
            kept.update((first, *others))
            yield first, example
    if not kept:
        lost = {number: Unusable("nothing to use in it") for number in row_of} | lost
    for number, why in lost.items():
        if number in kept:
            report.drop_part(number, why)
        else:
            report.drop(number, why)
    report.kept += len(rows) - len(lost.keys() - kept)


def _is_opposed(example: Any) -> bool:
    """Whether the strengths of a ranking have another order than its ranks."""
    if not isinstance(example, Ranking) or example.strengths is None:
        return False
    best_first = sorted(zip(example.ranks, example.strengths, strict=True), key=lambda answer: answer[0])
    least = math.inf  # of the answers of better rank
    for _, equal in groupby(best_first, key=lambda answer: answer[0]):
        strengths = [strength for _, strength in equal]
        if max(strengths) > least:
            return True
        least = min(least, *strengths)
    return False


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


def _check_format(source: Source, kind: str) -> None:
    """Refuse the name of a format that there is none of."""
    kinds = (kind,) if kind != "prompts" else ("prompts", *_WITH_PROMPTS)
    there = sorted({known.name for known in formats.formats() if known.kind in kinds})
    if source.format is not None and source.map:
        raise DataError(f"{source.path}: format and map: a map says all that a format would; leave one of them out")
    if source.format is not None and source.format not in there:
        known = did_you_mean(source.format, there) or f"; there are {', '.join(there) or 'none'}"
        raise DataError(f"{source.path}: format: no format of {kind} is called {source.format!r}{known}")


def _of_document(unusable: Unusable, report: Report) -> Unusable:
    """Why a row cannot be used; where it is all of a text file, that it is this."""
    if not report.files or suffixes(report.files[-1])[0] not in DOCUMENTS:
        return unusable
    rows = f"; {report.kind} are rows of a CSV or JSON Lines file with {NEEDS[report.kind]}"
    return Unusable(DOCUMENT, rows)


def _enough(loaded: Loaded[T], source: Source, max_dropped: float) -> Loaded[T]:
    refuse_losses(loaded.report, source, max_dropped)
    return loaded


def refuse_losses(report: Report, source: Source, max_dropped: float) -> None:
    """Refuse a source that lost too many rows, naming the first one and the cure."""
    if report.kept and report.bad / report.rows <= max_dropped:
        return
    row, why = report.first_bad()
    found = f"{locate(source, row)}: {why}{cure(source, report.kind, why)}"
    if not report.kept:
        counts = f"kept 0 of {report.rows} rows" if len(report.dropped) == 1 else report.summary()
        raise DataError(f"{found}. Nothing usable is left: {counts}")
    share = math.ceil(100 * report.bad / report.rows) / 100
    raise TooManyUnusable(f"{found}. {report.summary()}", share)
