"""Checkpoints on disk, of all four stages: how one is written whole, which one is gone on from, and what is said when
one cannot be written. No torch.

`checkpoints/step-XXXXXXXX/` is written aside, in `.writing`. state.json comes last and lists all other files with
their sizes and hashes. Then all is synced and renamed, and only after that an older one is removed; two stay.
"""

import errno
import json
import re
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf.data.errors import CURES, RefusedError, ToldHowToGoOn
from rlhf.stages.artifact import remove_temporaries, temporaries
from rlhf.stages.disk import file_digests, swap_folder, sync

_STATE = "state.json"
_CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG, errno.EIO)
_OF_A_LIMIT = (errno.EDQUOT, errno.EFBIG)
"""Those for which free space does not matter."""
_TELLS = re.compile(r"no space left|quota exceeded|os error (28|122|13|1|30|27|5)\)|PytorchStreamWriter|unexpected pos")
"""What safetensors, tokenizers and torch make of such an error: they keep its text at best."""


@dataclass(frozen=True)
class Checkpoint:
    """One that was written to its end."""

    folder: Path
    step: int
    """Steps that are done."""
    processes: int
    """How many there were; each has random streams of its own."""
    device: str
    """On which they ran: cpu, cuda, …"""
    state: dict[str, Any]
    """JSON values that belong to the training state."""
    size: int
    """Bytes of all its files."""


class Incomplete(Exception):
    """A checkpoint cannot be gone on from; the text says why."""


class CannotWrite(ToldHowToGoOn):
    """A file of a stage cannot be written: what, why, and how to go on."""


def clear(folder: Path) -> Path:
    """An empty folder for the files of the next checkpoint of the stage in `folder`."""
    writing = folder / "checkpoints" / ".writing"
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)
    return writing


def swap_in(folder: Path, step: int, processes: int, device: str, state: dict[str, Any]) -> None:
    """Complete the checkpoint in `.writing`, give it its name, and remove what is not needed any more."""
    writing = folder / "checkpoints" / ".writing"
    paths = sorted(path for path in writing.rglob("*") if path.is_file())
    files = {
        path.relative_to(writing).as_posix(): {"size": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, file_digests(paths), strict=True)
    }
    content = {"step": step, "processes": processes, "device": device, "state": state, "files": files}
    (writing / _STATE).write_text(json.dumps(content), encoding="utf-8")
    rows = [path for name in ("metrics.jsonl", "samples.jsonl") if (path := folder / name).is_file()]
    sync(rows)
    final = writing.with_name(f"step-{step:08d}")
    swap_folder(writing, final)  # if it is there, it is damaged and was passed over
    before = [path for path in _checkpoints(folder) if path.name < final.name]
    spare = next((path for path in before if _is_complete(path)), None)  # should the new one be damaged
    for old in _checkpoints(folder):  # those of later steps are of a stretch that was lost
        if old not in (final, spare):
            shutil.rmtree(old)


def newest_checkpoint(
    folder: Path, hashes: bool = False, passed_over: Callable[[str], None] = lambda text: None
) -> Checkpoint | None:
    """The newest complete checkpoint of the stage in `folder`; `passed_over` hears of each newer one, and why.

    Sizes are always compared, contents with `hashes`.
    """
    if (folder / "checkpoints" / ".writing").exists():
        passed_over("passed over a checkpoint that was not written to its end")
    for path in _checkpoints(folder):
        try:
            return read_checkpoint(path, hashes)
        except Incomplete as reason:
            passed_over(f"passed over the checkpoint {path.name}: {reason}")
    return None


def read_checkpoint(folder: Path, hashes: bool) -> Checkpoint:
    """What state.json says, once it is found to be true; else Incomplete is raised."""
    try:
        content = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        files = {name: (int(about["size"]), str(about["sha256"])) for name, about in content["files"].items()}
        size = sum(size for size, _ in files.values())
        found = Checkpoint(
            folder, int(content["step"]), int(content["processes"]), content["device"], dict(content["state"]), size
        )
    except FileNotFoundError:
        raise Incomplete(f"it has no {_STATE}") from None
    except OSError as error:
        raise Incomplete(f"its {_STATE} cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError):
        raise Incomplete(f"its {_STATE} is damaged") from None
    for name, (size, _) in files.items():
        path = folder / name
        if not path.is_file():
            raise Incomplete(f"{name} is missing")
        if path.stat().st_size != size:
            raise Incomplete(f"{name} has {path.stat().st_size} bytes, not {size}")
    if hashes:
        try:
            digests = file_digests([folder / name for name in files])
        except OSError as error:
            raise Incomplete(f"{error.filename} cannot be read: {error.strerror}") from None
        for (name, (_, expected)), digest in zip(files.items(), digests, strict=True):
            if digest != expected:
                raise Incomplete(f"{name} has another hash than when it was written")
    return found


def _checkpoints(folder: Path) -> list[Path]:
    """Complete or not, newest first."""
    return sorted((folder / "checkpoints").glob("step-*"), reverse=True)


def _is_complete(checkpoint: Path) -> bool:
    try:
        read_checkpoint(checkpoint, hashes=False)
    except Incomplete:
        return False
    return True


@contextmanager
def saying_what_cannot_be_written(folder: Path, what: str | None = None, keep: bool = False) -> Iterator[None]:
    """Make of a full disk or a lost permission an error that a person can act on, and remove what was half written.

    `what` is being written for the stage in `folder`; by default it is told from what was half written, which is to
    `keep` while other processes may be writing it.
    Raises CannotWrite; the checkpoints that were complete before stay as they are.
    """
    try:
        yield
    except (CannotWrite, RefusedError):  # the latter is about what was read
        raise
    except Exception as error:
        found = _why(error)
        if found is None:
            raise
        cause, number = found
        left = temporaries(folder)
        taken = sum(path.stat().st_size for top in left for path in [top, *top.rglob("*")] if path.is_file())
        free = shutil.disk_usage(folder).free
        if not keep:
            remove_temporaries(folder)
        if what is None:
            names = [top.relative_to(folder).as_posix().replace("/.", "/") for top in left]
            what = ", ".join(name.removeprefix(".").removesuffix(".writing") for name in names) or "a file"
        earlier = newest_checkpoint(folder)
        needed = f"more than {_mib(taken)}"
        if earlier is not None and earlier.size > taken and "checkpoint" in what:
            needed = f"about {_mib(earlier.size)}"
        on = "it starts over" if earlier is None else f"it goes on from step {earlier.step}"
        if number is None and free > taken and _limit() is not None:  # torch says no more than that it could not
            number = errno.EFBIG
        sizes = f"{needed} needed" if number in _OF_A_LIMIT else f"{_mib(free)} free, {needed} needed"
        if number == errno.EFBIG and (limit := _limit()) is not None:
            sizes = f"{_mib(limit)} allowed in a file"
        cure = CURES[number] if number in _OF_A_LIMIT else "free some space, or allow writing there again,"
        raise CannotWrite(
            f"{what} could not be written to {folder}: {cause} ({sizes}); {cure} and run again: {on}"
        ) from error


def _why(error: BaseException | None) -> tuple[str, int | None] | None:
    """Why a file cannot be written, if that is what the error, or one that it came of, is about; in words, and as the
    system's number where that is told."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _CANNOT_WRITE:
            return error.strerror or type(error).__name__, error.errno
        text = str(error)
        if tells := _TELLS.search(text):
            words = {"no space left": errno.ENOSPC, "quota exceeded": errno.EDQUOT}
            number = words.get(tells[0]) or (int(tells[1]) if tells[1] else None)
            return text.strip().splitlines()[0], number
        error = error.__cause__ or error.__context__
    return None


def _limit() -> int | None:
    """Bytes that a file of this process may have; None where the system sets no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if limit == resource.RLIM_INFINITY else limit


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
