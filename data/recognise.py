"""What kind of rows a source holds, told from its first rows by the readers themselves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf.data.columns import COLUMNS_FOUND, first_of_alike, with_map
from rlhf.data.errors import DataError
from rlhf.data.examples import Prompt, Ranking
from rlhf.data.formats import AmbiguousError
from rlhf.data.formats.ranked_columns import like_answers
from rlhf.data.messages import prompt_key, prompt_text
from rlhf.data.report import DOCUMENT, PLAIN, Report
from rlhf.data.rows import numbered
from rlhf.data.sources import Source, read_rows

LOOKED_AT = 5000
"""Rows of a source that are read. So many make enough steps in batches of any usual size."""
MOSTLY = 0.5  # share of the rows that must be usable
MOST = 0.9  # share of the examples that are no longer than `Recognised.length`
KINDS = ("preferences", "demonstrations", "text", "prompts")
"""The kinds, those that ask for more first: rankings and demonstrations can be read as prompts, too."""


@dataclass(frozen=True)
class Recognised:
    """What the first rows of a source are."""

    kind: str | None
    """None where they are nothing that can be used, or can be used in several ways."""
    reasons: dict[str, str] = field(default_factory=dict)
    """By kind, why they are not of it."""
    almost: dict[str, str] = field(default_factory=dict)
    """Those of the kinds whose columns they seem to have: the first row that cannot be used, and why."""
    ambiguous: str = ""
    """What to say where their columns leave a choice."""
    map: dict[str, str] = field(default_factory=dict)
    """The source's `map`, by which they were read."""
    format: str = ""
    rows: int = 0
    """How many were read; there are no more unless it is LOOKED_AT."""
    bad: int = 0
    """How many of them cannot be used."""
    first_bad: str = ""
    """The first of these, and why."""
    examples: int = 0
    """How many texts, demonstrations, rankings or prompts they make."""
    warnings: list[str] = field(default_factory=list)
    """What else reading them told."""
    prompts: int = 0
    """Different prompts among them."""
    prompt_length: int = 0
    """Characters of the prompt that most are no longer than."""
    length: int = 0
    """The same of prompt and longest response together; of text the length of all of it."""

    @property
    def whole(self) -> bool:
        """Whether all rows were read."""
        return self.rows < LOOKED_AT


def recognise(path: str, names: Mapping[str, str] | None = None) -> Recognised:
    """The kind of a file, folder, hub id or module:function, which is the first of KINDS that most rows are usable as.

    `names` is a `map` for it; without `text` in that, its rows are no text. A source that cannot be read at all is of
    no kind; `reasons` say why.
    """
    reasons: dict[str, str] = {}
    almost: dict[str, str] = {}
    source = Source(path=path, streaming=True, map=dict(names or {}))
    for kind in KINDS if not names else [kind for kind in KINDS if (kind == "text") == ("text" in names)]:
        report = Report(kind)
        try:
            rows = numbered(source, kind, report, limit=LOOKED_AT)
            examples = [example for _, example in rows]
        except DataError as error:
            if isinstance(error.__cause__, AmbiguousError):
                return Recognised(None, ambiguous=str(error))
            reasons[kind] = str(error)
            continue
        if not report.kept or report.bad > MOSTLY * report.rows:
            reasons[kind] = _first_bad(report)
            if not _lacks_columns(report):
                almost[kind] = reasons[kind]
            continue
        warnings = report.warnings
        if report.judged and "preferences" in reasons:
            why = f"{report.judged}, but here {reasons['preferences']}"
            warnings = [why if warning == report.judged else warning for warning in warnings]
        if kind == "prompts" and (answers := like_answers(first_of_alike(examples[0].row))):
            of, why = _unread(answers, reasons)
            almost.setdefault(of, why)
            look = "look like answers" if len(answers) > 1 else "looks like an answer"
            warnings = [*warnings, f"only prompts are read of it, though {', '.join(answers)} {look}; as {of} {why}"]
        counts: dict[str, Any] = {
            "format": report.format, "rows": report.rows, "bad": report.bad, "map": source.map,
            "first_bad": _first_bad(report) if report.bad else "", "examples": len(examples), "warnings": warnings,
            "almost": almost,
        }  # fmt: skip
        if kind == "text":
            return Recognised(kind, reasons, **counts, length=sum(map(len, examples)))
        prompts = [example.messages if isinstance(example, Prompt) else example.prompt for example in examples]
        before = [len(prompt_text(prompt)) for prompt in prompts]
        whole = [length + _longest(example) for length, example in zip(before, examples, strict=True)]
        return Recognised(
            kind, reasons, **counts, prompts=len(set(map(prompt_key, prompts))), prompt_length=_most(before),
            length=_most(whole),
        )  # fmt: skip
    return Recognised(None, reasons, almost)


def columns_of(path: str) -> list[str]:
    """The columns of a source's first row; none where it has none, or cannot be read."""
    try:
        _, row = next(read_rows(Source(path=path, streaming=True)))
    except DataError:
        return []
    return list(map(str, row)) if isinstance(row, dict) else []


def _unread(answers: Sequence[str], reasons: Mapping[str, str]) -> tuple[str, str]:
    """The kind that prompts with columns of such names seem to be of, and why they are not."""
    if len(answers) > 1:
        return "preferences", reasons["preferences"]
    why = reasons["demonstrations"]
    return "demonstrations", f"{why}; {with_map('response', answers[0])}" if COLUMNS_FOUND in why else why


def _first_bad(report: Report) -> str:
    return "row {}: {}".format(*report.first_bad())


def _lacks_columns(report: Report) -> bool:
    """Whether most rows are of another kind, and not bad ones of this."""
    lacking = (
        drop.count
        for reason, drop in report.dropped.items()
        if reason in (PLAIN, DOCUMENT) or COLUMNS_FOUND in drop.detail
    )
    return sum(lacking) >= MOSTLY * report.rows


def _longest(example: Any) -> int:
    """Characters of the longest response."""
    if isinstance(example, Prompt):
        return 0
    return max(map(len, example.responses if isinstance(example, Ranking) else [example.response]))


def _most(lengths: Sequence[int]) -> int:
    return sorted(lengths)[int(MOST * (len(lengths) - 1))]
