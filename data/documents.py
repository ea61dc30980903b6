"""The documents of a corpus: read source by source, filtered, and split into those to train on and those held out.

They are read anew whenever they are asked for. A survey goes first, which says what there is; while it is made, memory
holds a byte per document, and for de-duplication its hashes. It can be saved, for other processes to read by it.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import Protocol

import numpy as np

from rlhf.data.deduplicate import Deduplicate, seen_before, text_digest
from rlhf.data.errors import DataError
from rlhf.data.report import Report
from rlhf.data.rows import iterate, refuse_losses
from rlhf.data.sources import Source, TextSource, named
from rlhf.data.split import border, place

PART = 1 << 26
"""Characters, about, of the parts in which a source is worked through."""
SURVEY = "survey.json"


class Wanted(Protocol):
    """Which documents to read; the settings of the pretrain stage are one."""

    @property
    def data(self) -> Sequence[TextSource]: ...
    @property
    def eval_data(self) -> Sequence[TextSource] | None: ...
    @property
    def eval_share(self) -> float: ...
    @property
    def max_dropped(self) -> float: ...
    @property
    def deduplicate(self) -> Deduplicate | None: ...
    @property
    def min_document_length(self) -> int: ...
    @property
    def max_document_length(self) -> int | None: ...


@dataclass(frozen=True)
class _Plain:
    """What pretrain wants where nothing more is set."""

    data: Sequence[TextSource]
    eval_share: float
    max_dropped: float
    eval_data: None = None
    deduplicate: None = None
    min_document_length: int = 1
    max_document_length: None = None


@dataclass
class Found:
    """What reading one source brought."""

    name: str
    path: str
    report: Report = field(default_factory=lambda: Report("text"))
    documents: int = 0
    characters: int = 0
    files: dict[str, list[int]] = field(default_factory=dict)
    """[documents, characters] taken from each file, in the order of reading."""
    left_out: dict[str, int] = field(default_factory=Counter)
    """Usable documents that are not wanted, by reason."""
    unusable: dict[str, int] = field(default_factory=dict)
    """Rows that are no documents, by reason."""
    parts: list[int] = field(default_factory=list)
    """The first document of each part, of those that were taken, from 0."""
    room: int = 0
    """Characters until the next part begins."""
    lowest: float = 1.0
    highest: float = 0.0
    """Places of its documents, from which follows where held-out ones end."""

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """(first document, one behind the last) of each part."""
        return list(pairwise([*self.parts, self.documents]))

    def take(self, text: str) -> None:
        """Count a document in."""
        if self.room <= 0:
            self.parts.append(self.documents)
            self.room = PART
        self.room -= len(text)
        self.documents += 1
        self.characters += len(text)
        if self.report.files:
            counts = self.files.setdefault(str(self.report.files[-1]), [0, 0])
            counts[0] += 1
            counts[1] += len(text)
        where = place(text)
        self.lowest, self.highest = min(self.lowest, where), max(self.highest, where)


def summary(documents: int, left_out: Mapping[str, int]) -> str:
    """One line: how many documents of a source were kept, and why the others were not."""
    reasons = "; ".join(f"{number} × {reason}" for reason, number in left_out.items())
    return f"kept {documents} of {documents + sum(left_out.values())} documents; {reasons}"


class Documents:
    """Training and held-out documents.

    With sources for evaluation, all their documents are held out, and equal ones are left out of training. Otherwise
    a source of a single document is cut near its end, and of the others `eval_share` of the documents are held out,
    chosen by a hash of their text. Where there is nothing but equal ones, each is cut as a single one is. Filters and
    de-duplication are for what is split or trained on, not for documents that are given for evaluation.
    """

    def __init__(self, wanted: Wanted, stage: str, setting: str = "data") -> None:
        self.wanted, self.where = wanted, f"{stage}.{setting}"
        self.sources = named("data", wanted.data)
        self.eval_sources = named("eval_data", wanted.eval_data or [])
        self.copies: dict[str, Source] = {}
        """What is read in the place of some sources."""
        self.found: list[Found] = []
        """What the survey found: the sources of `data`, then those of `eval_data`."""
        self._kept: list[bytearray | np.ndarray] = []

    def survey(self) -> list[Found]:
        """Read everything once, count, and refuse what cannot be trained on. Raises RefusedError."""
        if self.found:
            return self.found
        wanted, is_repeat = self.wanted, seen_before(self.wanted.deduplicate)
        held_out: set[bytes] = set()
        given = []
        for name, source in self.eval_sources.items():
            given.append(found := Found(name, source.path))
            for text in self._read(name, found.report):
                found.take(text)
                held_out.add(text_digest(text))
        read: list[Found] = []
        all_kept: list[bytearray | np.ndarray] = []
        for name, source in self.sources.items():
            read.append(found := Found(name, source.path))
            all_kept.append(kept := bytearray())
            for text in self._read(name, found.report):
                if len(text) < wanted.min_document_length:
                    reason = f"shorter than {wanted.min_document_length} characters"
                elif wanted.max_document_length is not None and len(text) > wanted.max_document_length:
                    reason = f"longer than {wanted.max_document_length} characters"
                elif held_out and text_digest(text) in held_out:
                    reason = "in eval_data"
                elif is_repeat(text):
                    reason = "came before" if wanted.deduplicate == "exact" else "much like one that came before"
                else:
                    reason = ""
                    found.take(text)
                if reason:
                    found.left_out[reason] += 1
                kept.append(not reason)
        self._refuse_nothing(read)
        self.found, self._kept = [*read, *given], all_kept
        for found in self.found:
            found.files = {str(file): found.files.get(str(file), [0, 0]) for file in found.report.files}
            found.unusable = {reason: drop.count for reason, drop in found.report.dropped.items()}
        return self.found

    def save(self, folder: Path) -> None:
        """Write the survey into `folder`, its survey.json last."""
        for number, kept in enumerate(self._kept):
            np.save(folder / f"kept-{number}.npy", np.frombuffer(kept, np.bool_))
        found = [{name: value for name, value in vars(part).items() if name != "report"} for part in self.found]
        writing = folder / f".{SURVEY}.writing"
        writing.write_text(json.dumps(found), encoding="utf-8")
        os.replace(writing, folder / SURVEY)

    def load(self, folder: Path) -> None:
        """Read by the survey that `save` wrote; reports of unusable rows are not in it."""
        self.found = [Found(**part) for part in json.loads((folder / SURVEY).read_text(encoding="utf-8"))]
        # Mapped: which bytes are in memory is for the system to say, and all processes share them.
        self._kept = [np.load(folder / f"kept-{number}.npy", mmap_mode="r") for number in range(len(self.sources))]

    def of(self, number: int) -> Iterator[tuple[bool, str]]:
        """(whether it is held out, text) of a source, counted as in `found`, in the order of its rows; of one
        that is cut both sides."""
        self.survey()
        found, end = self.found[number], self._border
        is_cut = found.documents == 1 or self._are_equal
        texts = self._read(found.name, Report("text"))
        if number >= len(self.sources):
            yield from ((True, text) for text in texts)
            return
        for text, kept in zip_longest(texts, self._kept[number]):
            if text is None or kept is None:
                raise DataError(f"{found.path}: it holds another number of documents than when it was read before")
            if not kept:
                continue
            if self.eval_sources:
                yield False, text
            elif is_cut:
                cut = max(int(len(text) * (1 - self.wanted.eval_share)), 1)
                yield False, text[:cut]
                yield True, text[cut:]
            else:
                yield place(text) < end, text

    def __iter__(self) -> Iterator[tuple[int, bool, str]]:
        """(number of the source, whether it is held out, text), in the order of sources and rows."""
        return ((number, *pair) for number in range(len(self.survey())) for pair in self.of(number))

    def training(self) -> Iterator[str]:
        """The documents to train on."""
        return (text for _, is_held_out, text in self if not is_held_out)

    def _read(self, name: str, report: Report) -> Iterator[str]:
        source = self.copies.get(name) or (self.sources | self.eval_sources)[name]
        yield from iterate(source, "text", report)
        refuse_losses(report, source, self.wanted.max_dropped)

    @property
    def _border(self) -> float:
        return _border_of(self.found[: len(self.sources)], self.wanted.eval_share)

    @property
    def _are_equal(self) -> bool:
        """Whether nothing could be held out of documents that are kept whole."""
        return not self._border and all(found.documents != 1 for found in self.found[: len(self.sources)])

    def _refuse_nothing(self, read: list[Found]) -> None:
        if not any(found.documents for found in read):
            lines = [f". {found.name}: {summary(found.documents, found.left_out)}" for found in read if found.left_out]
            raise DataError(
                f"{self.where}: no document is left to train on; use more text, or leave out less{''.join(lines)}"
            )


def plain_documents(source: Source, eval_share: float, max_dropped: float, stage: str, setting: str) -> Documents:
    """The documents of one source that `setting` names, read and held out as those of pretrain where nothing more is
    set."""
    text = TextSource(**source.model_dump())
    return Documents(_Plain([text], eval_share, max_dropped), stage, setting)


def _border_of(read: list[Found], eval_share: float) -> float:
    """Where held-out places end in sources of several documents: in all at the same place, so that a text which lies
    in two of them is on one side. 0 where those are all equal."""
    several = [found for found in read if found.documents > 1]
    lowest = min((found.lowest for found in several), default=0.0)
    return border(lowest, max((found.highest for found in several), default=0.0), eval_share)
