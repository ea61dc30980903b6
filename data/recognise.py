"""What kind of rows a source holds, told from its first rows by the readers themselves."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf.data.errors import DataError
from rlhf.data.examples import Prompt, Ranking
from rlhf.data.formats import AmbiguousError
from rlhf.data.messages import prompt_key, prompt_text
from rlhf.data.report import Report
from rlhf.data.rows import numbered
from rlhf.data.sources import Source

LOOKED_AT = 1000
"""Rows of a source that are read."""
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
    ambiguous: str = ""
    """What to say where their columns leave a choice."""
    format: str = ""
    rows: int = 0
    """How many were read; there are no more unless it is LOOKED_AT."""
    bad: int = 0
    """How many of them cannot be used."""
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


def recognise(path: str) -> Recognised:
    """The kind of a file, folder, hub id or module:function, which is the first of KINDS that most rows are usable as.

    A source that cannot be read at all is of no kind; `reasons` say why.
    """
    reasons: dict[str, str] = {}
    for kind in KINDS:
        report = Report(kind)
        try:
            rows = numbered(Source(path=path, streaming=True), kind, report, limit=LOOKED_AT)
            examples = [example for _, example in rows]
        except DataError as error:
            if isinstance(error.__cause__, AmbiguousError):
                return Recognised(None, ambiguous=str(error))
            reasons[kind] = str(error)
            continue
        if not report.kept or report.bad > MOSTLY * report.rows:
            reasons[kind] = "row {}: {}".format(*report.first_bad())
            continue
        counts: dict[str, Any] = {"format": report.format, "rows": report.rows, "bad": report.bad}
        if kind == "text":
            return Recognised(kind, reasons, **counts, length=sum(map(len, examples)))
        prompts = [example.messages if isinstance(example, Prompt) else example.prompt for example in examples]
        before = [len(prompt_text(prompt)) for prompt in prompts]
        whole = [length + _longest(example) for length, example in zip(before, examples, strict=True)]
        return Recognised(
            kind, reasons, **counts, prompts=len(set(map(prompt_key, prompts))), prompt_length=_most(before),
            length=_most(whole),
        )  # fmt: skip
    return Recognised(None, reasons)


def _longest(example: Any) -> int:
    """Characters of the longest response."""
    if isinstance(example, Prompt):
        return 0
    return max(map(len, example.responses if isinstance(example, Ranking) else [example.response]))


def _most(lengths: Sequence[int]) -> int:
    return sorted(lengths)[int(MOST * (len(lengths) - 1))]
