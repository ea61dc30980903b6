"""The lock of a run folder: one run at a time, and lock.json that says which one.

The lock proper is a flock on the folder. The system drops it when its last holder dies, however it dies, and a holder
hands it on to the watcher of a stage, so that an orphaned stage holds it until it is gone. filelock can do neither: it
opens its file itself and keeps the descriptor from children. lock.json names the holder; where the file system has no
flock, or keeps it to one machine while several share the folder, the file decides.
"""

import fcntl
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep, time

from rlhf.data.errors import SettingsError
from rlhf.stages.alone import unforked
from rlhf.stages.signals import is_alive

LOCK = "lock.json"
"""In the run folder while a run works there."""
SECONDS_BETWEEN_SIGNS = 20.0
"""How often a holder gives a sign of life: it touches lock.json."""
SECONDS_TO_BELIEVE = 120.0
"""A lock of another machine without a sign for so long is of a run that is gone. Clocks of machines that share a file
system differ by less."""


@dataclass(frozen=True)
class Holder:
    """Who works in a run folder."""

    host: str
    pid: int
    since: datetime

    def __str__(self) -> str:
        minutes = int((datetime.now(UTC) - self.since).total_seconds() // 60)
        return f"pid {self.pid} on {self.host}, for {minutes} min"


@contextmanager
def held(run_dir: Path, patience: float, say: Callable[[str], None] = print) -> Iterator[int]:
    """Have the run folder to ourselves, as two runs must never write into one stage. Yields the lock.

    Waits `patience` seconds: the stage of a run that was killed may still be saving. What a run that is gone left is
    taken over, with a message. Raises SettingsError that says who holds it, and what would work.
    """
    path = run_dir / LOCK
    until = monotonic() + patience
    with unforked(os.open(run_dir, os.O_RDONLY)) as descriptor:
        flock = _flock(descriptor)
        if (holder := _in_the_way(run_dir, flock)) and patience > 0:
            say(f"another run is working here ({run_dir}){_named(holder)}; waiting up to {patience:g} s")
        while holder:
            if monotonic() > until:
                raise SettingsError(_refusal(run_dir, holder))
            sleep(0.2)
            flock = flock or _flock(descriptor)
            holder = _in_the_way(run_dir, flock)
        if left := _read(path):
            say(f"took over the lock of a run that is gone ({left})")
        if flock or left or not _gave_a_sign(path):  # an empty one may be of a run that is just writing it
            with suppress(OSError):
                path.unlink()
        with _told(path, must=flock is None):
            yield descriptor


def in_use(run_dir: Path) -> bool:
    """Whether a run is working in this folder now."""
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        return bool(_in_the_way(run_dir, _flock(descriptor)))
    finally:
        os.close(descriptor)


def holder_of(run_dir: Path) -> Holder | None:
    """The run, on whichever machine, that lock.json names and that gave a sign of life."""
    return _read(run_dir / LOCK) if _gave_a_sign(run_dir / LOCK) else None


def _flock(descriptor: int) -> bool | None:
    """True if we have it now, False if another has it, None on a file system without (some network mounts)."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _in_the_way(run_dir: Path, flock: bool | None) -> "Holder | str | None":
    """Who keeps us from working here; a text if it is not known who."""
    holder = _read(run_dir / LOCK)
    if flock is False:
        return holder or "unknown"
    if holder is None:
        return None
    if holder.host == socket.gethostname():  # a flock of this machine would still be held
        return holder if flock is None and is_alive(holder.pid) and _gave_a_sign(run_dir / LOCK) else None
    return holder if _gave_a_sign(run_dir / LOCK) else None


def _read(path: Path) -> Holder | None:
    """Whom lock.json names; None if there is none, or a kill left it empty."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        since = datetime.fromisoformat(content["since"]).astimezone(UTC)
        return Holder(str(content["host"]), int(content["pid"]), since)
    except (OSError, ValueError, LookupError, TypeError, RecursionError, OverflowError):
        return None


def _gave_a_sign(path: Path) -> bool:
    try:
        return time() - path.stat().st_mtime < SECONDS_TO_BELIEVE
    except OSError:
        return False


@contextmanager
def _told(path: Path, must: bool) -> Iterator[None]:
    """Say in lock.json that we work here, and go on saying it. Unless it `must` be, a full disk does not matter: the
    flock is the lock then, and `rlhf clean` is what makes room."""
    us = Holder(socket.gethostname(), os.getpid(), datetime.now(UTC).replace(microsecond=0))
    try:
        with path.open("x", encoding="utf-8") as file:  # of two that come at once one fails
            file.write(json.dumps(asdict(us) | {"since": us.since.isoformat()}))
    except FileExistsError:
        raise SettingsError(_refusal(path.parent, _read(path) or "unknown")) from None
    except OSError as error:
        if must:
            raise SettingsError(f"{path}: cannot be written: {error.strerror}; choose another --run-dir") from None
    done = Event()

    def give_signs() -> None:
        while not done.wait(SECONDS_BETWEEN_SIGNS):
            if _read(path) == us:
                with suppress(OSError):
                    os.utime(path)

    signs = Thread(target=give_signs, daemon=True)
    signs.start()
    try:
        yield
    finally:
        done.set()
        signs.join()
        if _read(path) == us:  # a process that was stopped for long may have lost it to another
            path.unlink(missing_ok=True)


def _named(holder: Holder | str) -> str:
    return f": {holder}" if isinstance(holder, Holder) else ""


def _refusal(run_dir: Path, holder: Holder | str) -> str:
    what = f"{run_dir}: another rlhf run is working here"
    if isinstance(holder, str):
        return f"{what}; wait for it, stop it, or choose another --run-dir"
    elsewhere = holder.host != socket.gethostname()
    cure = f"; if that run is gone, delete {run_dir / LOCK}" if elsewhere else ""
    return f"{what} ({holder}); wait for it, stop it, or choose another --run-dir{cure}"
