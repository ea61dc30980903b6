"""The rows of a stage, read, split and tokenised, in files: one process makes them, and all map them into memory.

They lie in `checkpoints/rows/` of the stage's folder until it is sealed. No process has more of them in memory than it
asks for, and a stage that goes on does not tokenise them again.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np

from rlhf.data.errors import DataError
from rlhf.data.report import Report
from rlhf.data.split import train_and_eval
from rlhf.stages.checkpoints import saying_what_cannot_be_written
from rlhf.stages.disk import replace_text, sync
from rlhf.stages.runtime import Runtime
from rlhf.stages.settings import AnyStage
from rlhf.stages.together import fill

T = TypeVar("T")
_LAYOUT = 1
"""Counted up when the same settings and data would give other files than before."""
_FOUND = "found.json"


@dataclass
class RowReader(Generic[AnyStage]):
    """What is to be said and counted of the rows of a stage, where one process reads them for all."""

    settings: AnyStage
    said: list[str] = field(default_factory=list)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each source what was kept of its rows, and what left out and why; the manifest has it."""

    def say(self, text: str) -> None:
        """One line for a person."""
        self.said.append(text)

    def count_report(self, source: str, report: Report) -> None:
        """What reading a source brought."""
        left_out = {reason: drop.count for reason, drop in report.dropped.items()}
        self.count(source, report.kept, report.rows, left_out)

    def count(self, source: str, kept: int, of: int, left_out: dict[str, int]) -> None:
        """Rows that were kept and left out, by reason, added to those of the source so far."""
        found = self.rows.setdefault(source, {"kept": 0, "of": 0, "left_out": {}})
        found["kept"] += kept
        found["of"] += of
        for reason, number in left_out.items():
            if number:
                found["left_out"][reason] = found["left_out"].get(reason, 0) + number

    def split(self, rows: list[T], eval_rows: list[T] | None, key: Callable[[T], str]) -> tuple[list[T], list[T]]:
        """Training and held-out rows, no prompt in both; `eval_rows` are those that the recipe names, if it does."""
        train, held_out, num_removed = train_and_eval(rows, eval_rows, key, self.settings.eval_share)
        if num_removed:
            self.count("data", -num_removed, 0, {"prompt is in eval_data": num_removed})
            self.say(f"left out {num_removed} of {len(rows)} rows of data whose prompts are in eval_data")
        if not train or not held_out:
            raise DataError(
                f"{self.settings.stage}.data: {len(train)} rows to train on and {len(held_out)} to evaluate on; "
                "at least one of each is needed, with different prompts"
            )
        return train, held_out


class RowFile(Sequence[T]):
    """Rows in a file, as JSON, each made anew by `of` when it is asked for."""

    def __init__(self, file: Path, of: Callable[[Any], T]) -> None:
        self._of = of
        self._rows = np.memmap(file, np.uint8, "r")
        self._ends = np.memmap(_ends_of(file), np.int64, "r")

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> list[T]: ...
    def __getitem__(self, place: int | slice) -> T | list[T]:
        if isinstance(place, slice):
            return [self[i] for i in range(len(self))[place]]
        number = range(len(self))[place]
        text = self._rows[self._ends[number] : self._ends[number + 1]].tobytes()
        return self._of(json.loads(text))

    @staticmethod
    def write(file: Path, rows: Iterable[Any]) -> None:
        """Write rows to a new file."""
        ends = [0]
        with file.open("wb") as out:
            for row in rows:
                out.write(json.dumps(row, default=_plain).encode())
                ends.append(out.tell())
        np.asarray(ends, np.int64).tofile(_ends_of(file))


def rows_of(
    run: Runtime[AnyStage], make: Callable[[RowReader[AnyStage]], Iterable[Iterable[T]]], of: Callable[[Any], T]
) -> tuple[RowFile[T], RowFile[T]]:
    """The rows of a stage to train on and those held out, of which `make` gives one after the other. One process does
    that, while the others wait; what its reader is told, all say.

    `of` makes a row of the JSON values that `vars` has of it; what JSON has no word for, a date say, becomes text.
    """
    key, folder = [_LAYOUT, run.identity.key, run.settings.max_dropped], run.folder / "checkpoints" / "rows"
    files = [folder / "train.rows", folder / "held_out.rows"]

    def is_whole(folder: Path) -> bool:
        try:
            return bool(json.loads((folder / _FOUND).read_text(encoding="utf-8"))["key"] == key)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def finish(folder: Path) -> None:
        for left in folder.iterdir():
            left.unlink()
        reader = RowReader(run.settings)
        for file, rows in zip(files, make(reader), strict=True):
            RowFile.write(file, rows)
        sync([*files, *map(_ends_of, files)])
        replace_text(folder / _FOUND, json.dumps({"key": key, "said": reader.said, "rows": reader.rows}))

    with saying_what_cannot_be_written(run.folder, "checkpoints/rows"):
        fill(folder, f"the rows of {run.settings.stage}", run.say, is_whole, finish)
    found = json.loads((folder / _FOUND).read_text(encoding="utf-8"))
    for text in found["said"]:
        run.say(text)
    run.rows = found["rows"]
    train, held_out = (RowFile(file, of) for file in files)
    return train, held_out


def _ends_of(file: Path) -> Path:
    """Where each row of a file ends, after a 0."""
    return file.with_suffix(".ends")


def _plain(value: Any) -> Any:
    """What JSON is given for what it does not know."""
    return vars(value) if is_dataclass(value) else str(value)
