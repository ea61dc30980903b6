"""How the report reads a file of a run: what has the shape that is drawn, and of all else what is wrong with it.

A report is what people open when something went wrong, so a file that cannot be read costs its own part of the page.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic_core import from_json

from rlhf.pipeline.damage import in_words

Content = TypeVar("Content")
Part = Literal["stages", "curves", "card", "evaluation", "answers", "sweep", "made"]
"""Of the page, each of which says what it does without."""


@dataclass(frozen=True)
class Fault:
    """A file of the run that is not as it should be."""

    part: Part
    """What does without it."""
    file: str
    """Relative to the run folder."""
    what: str
    """What was found, and what becomes of it, in words that follow on the file's name."""
    cure: str
    is_usual: bool = False
    """Whether it is as a kill leaves it: said, but not warned of."""

    def __str__(self) -> str:
        return f"{self.file}{self.what}; {self.cure}"


class Reader:
    """Reads the files of a folder. What is wrong with one is added to `faults`; names there begin with `prefix`."""

    def __init__(self, folder: Path, faults: list[Fault], cure: str, prefix: str = "") -> None:
        self.folder, self.faults, self.cure, self.prefix = folder, faults, cure, prefix
        self.sealed: Mapping[str, int | None] = {}
        """The files that must be there, with their bytes where these are known."""
        self.finished = True
        """Else somebody writes into the folder, or was killed at it."""

    def whole(
        self, part: Part, name: str, shape: Callable[[Any], Content], cure: str = "", must: bool = False,
        instead: str = ", and is left out", parse: Callable[[bytes], Any] = from_json,
    ) -> Content | None:  # fmt: skip
        """A file as `shape` takes it, which raises ValueError; None if it is not there, or cannot be taken, and then
        `instead` says what the page does. Without `must` it may be missing."""
        text = self._bytes(part, name, cure, must, instead)
        if text is None:
            return None
        try:
            found = shape(parse(text))
        except ValueError as error:
            what = in_words(error) if text.strip() else ": is empty"
            self.add(part, name, f"{what}{instead}", cure)
            return None
        self._compare(part, name, text)
        return found

    def lines(self, part: Part, name: str, shape: Callable[[Any], Content]) -> list[Content]:
        """The lines of a file that `shape` takes; none if it is not there."""
        text = self._bytes(part, name)
        if text is None:
            return []
        found: list[Content] = []
        wrong: list[str] = []
        lines = text.split(b"\n")  # and not at U+2028, which texts may hold
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                found.append(shape(from_json(line)))
            except ValueError as error:
                if number == len(lines) and not self.finished:
                    self.add(part, name, ": its last line was cut short, as by a kill, and is left out", is_usual=True)
                else:
                    wrong.append(in_words(error, number))
        if wrong:
            more = f", as are others, {len(wrong)} of {len(wrong) + len(found)} lines, which are left out"
            self.add(part, name, wrong[0] + (more if len(wrong) > 1 else ", and is left out"))
        else:
            self._compare(part, name, text)
        return found

    def add(self, part: Part, name: str, what: str, cure: str = "", is_usual: bool = False) -> None:
        """Keep a fault."""
        self.faults.append(Fault(part, f"{self.prefix}{name}", what, cure or self.cure, is_usual))

    def _bytes(
        self, part: Part, name: str, cure: str = "", must: bool = False, instead: str = ", and is left out"
    ) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            if must or name in self.sealed:
                self.add(part, name, f": is missing{instead.removeprefix(', and is left out')}", cure)
        except OSError as error:
            cure = "change its mode" if isinstance(error, PermissionError) else cure
            self.add(part, name, f": cannot be read ({error.strerror or error}){instead}", cure)
        return None

    def _compare(self, part: Part, name: str, text: bytes) -> None:
        """A file that was emptied, or cut where a line ends, can be read all the same."""
        size = self.sealed.get(name)
        if size is not None and len(text) != size:
            self.add(
                part, name, f": was changed since it was sealed ({len(text)} bytes, not {size}), and is shown as it is"
            )
