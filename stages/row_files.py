"""The rows of a stage, read, split and tokenised, in files: the main process makes them, and all map them into memory.

They lie in `checkpoints/rows/` of the stage's folder until it is sealed. A process then has no more of them in memory
than it asks for, and a stage that goes on does not tokenise them again.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np

from rlhf.data.errors import DataError, RefusedError
from rlhf.data.report import Report
from rlhf.data.split import train_and_eval
from rlhf.stages.checkpoints import saying_what_cannot_be_written
from rlhf.stages.disk import file_digest, file_digests, swap_folder
from rlhf.stages.runtime import Runtime
from rlhf.stages.settings import AnyStage

T = TypeVar("T")
_LAYOUT = 3
"""Counted up when the same settings and data would give other files than before."""
_FOUND, _SIDES = "found.json", ("train.rows", "held_out.rows")
_AT_ONCE = 250
"""Rows that are written together."""
_ENCODER = json.JSONEncoder(ensure_ascii=False, default=vars)  # `vars` of our own dataclasses


@dataclass
class RowReader(Generic[AnyStage]):
    """What is to be said and counted of the rows of a stage, where one process reads them for all."""

    settings: AnyStage
    said: list[str] = field(default_factory=list)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each source what was kept of its rows, and what left out and why; the manifest has it."""
    noted: dict[str, int] = field(default_factory=dict)
    """What a stage wants to know of its rows when it begins, so that no process reads all of them for it."""

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
    def write(
        file: Path, rows: Iterable[Any], writing: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        """Write rows to a new file. All that is written, and nothing of what makes the rows, is inside `writing`."""
        texts, sizes = map(_as_json, rows), [0]
        while some := list(islice(texts, _AT_ONCE)):
            with writing(), file.open("ab") as out:
                out.writelines(some)
            sizes += map(len, some)
        with writing():
            _ends_of(file).write_bytes(np.cumsum(sizes, dtype=np.int64).tobytes())


def rows_of(
    run: Runtime[AnyStage],
    make: Callable[[RowReader[AnyStage]], Iterable[Iterable[T]]],
    of: Callable[[Any], T],
    made_from: Path | None = None,
) -> tuple[RowFile[T], RowFile[T], dict[str, int]]:
    """The rows of a stage to train on and those held out, of which `make` gives one after the other, and what its
    reader noted of them. The main process makes them, while the others wait; what its reader is told, all say.

    `of` makes a row of the JSON values that `vars` has of it. `made_from` is a file of the stage's own that the rows
    follow from, beside settings and data.
    """
    folder = run.folder / "checkpoints" / "rows"

    def find_or_make() -> dict[str, Any]:
        key = [_LAYOUT, run.identity.key, run.settings.max_dropped, made_from and file_digest(made_from)]
        return _found(folder, key) or _make(run, folder, key, make)

    found = run.from_main(find_or_make)
    missing = [f"rank {run.rank} does not see {file} as rank 0 wrote it" for file in _unlike(folder, found["sizes"])]
    if missing := run.gather_objects(missing):
        raise RefusedError(f"{run.settings.stage}: {missing[0]}; put the run folder on a disk that all machines see")
    for text in found["said"]:
        run.say(text)
    run.rows = found["rows"]
    train, held_out = (RowFile(folder / name, of) for name in _SIDES)
    return train, held_out, found["noted"]


def _found(folder: Path, key: list[Any]) -> dict[str, Any] | None:
    """What is said of the files in the folder, if they are there, whole, and of these settings and data."""
    try:
        found: dict[str, Any] = json.loads((folder / _FOUND).read_text(encoding="utf-8"))
        whole = found["key"] == key and found["digests"] == _digests(folder, found["sizes"])
        return found if whole else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _make(
    run: Runtime[AnyStage],
    folder: Path,
    key: list[Any],
    make: Callable[[RowReader[AnyStage]], Iterable[Iterable[Any]]],
) -> dict[str, Any]:
    """Have the rows made, and write their files aside; the folder is put in its place once it is whole."""
    aside, reader = folder.with_name(f".{folder.name}.writing"), RowReader(run.settings)
    writing = partial(saying_what_cannot_be_written, run.folder, "checkpoints/rows")
    with writing():
        shutil.rmtree(aside, ignore_errors=True)  # of an attempt that was killed
        aside.mkdir(parents=True)
    try:
        for name, rows in zip(_SIDES, make(reader), strict=True):
            RowFile.write(aside / name, rows, writing)
    except DataError:
        for text in reader.said:  # such as what was left out before nothing was left
            run.say(text)
        raise
    with writing():
        sizes = {path.name: path.stat().st_size for path in aside.iterdir()}
        of_files = {"sizes": sizes, "digests": _digests(aside, sizes)}
        found = {"key": key, **of_files, "said": reader.said, "rows": reader.rows, "noted": reader.noted}
        (aside / _FOUND).write_text(json.dumps(found), encoding="utf-8")
        swap_folder(aside, folder)
    return found


def _digests(folder: Path, names: Iterable[str]) -> list[str]:
    return file_digests([folder / name for name in names])


def _unlike(folder: Path, sizes: dict[str, int]) -> list[Path]:
    """Files that are not there, or have another size."""
    files = {folder / name: size for name, size in sizes.items()}
    return [file for file, size in files.items() if not file.is_file() or file.stat().st_size != size]


def _ends_of(file: Path) -> Path:
    """Where each row of a file ends, after a 0."""
    return file.with_suffix(".ends")


def _as_json(row: Any) -> bytes:
    return _ENCODER.encode(row).encode("utf-8", "surrogatepass")  # which `json.loads` reads
