"""Folders that are filled once, by all processes that see them: those of a stage, and of others that want the same.

What is to be done falls into pieces, each a file that is there when it is done. A process takes the pieces that nobody
else is at; what a killed one leaves is done by another, now or when the stage goes on. Locks are held by the system, so
that they are gone with the process that held them; they are waited for as long as it takes, and after PATIENCE a line
says so.
"""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer

from rlhf.data.errors import RefusedError
from rlhf.stages.alone import unforked

PATIENCE = 2.0
"""Seconds of silence."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)
"""What a file system says that has none."""

Pieces = Callable[[Path], None]
"""Does the pieces of a folder that are not done and that nobody is at (`claimed`)."""


def fill(
    folder: Path,
    what: str,
    say: Callable[[str], None],
    is_whole: Callable[[Path], bool],
    finish: Callable[[Path], None],
    pieces: Pieces | None = None,
) -> None:
    """Return when `folder` is whole. All that come here do `pieces` beside each other; then one, alone, does what is
    left of them and `finish`. Who waits for another says of `what`, which is what the folder is to hold."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder.with_name(f".{folder.name}.lock")

    def tell() -> None:
        with suppress(OSError, ValueError):  # nobody reads on, the stream is closed
            say(f"waiting for another process, which makes {what} ({folder})")

    with _locked(lock, fcntl.LOCK_SH, tell):
        if not is_whole(folder) and pieces is not None:
            pieces(folder)
    with _locked(lock, fcntl.LOCK_EX, tell):  # waits for those that are still at a piece
        if not is_whole(folder):
            if pieces is not None:
                pieces(folder)
            finish(folder)


@contextmanager
def claimed(file: Path) -> Iterator[bool]:
    """Whether `file` is for this process to make: it is not there, and nobody else is making it."""
    lock = file.with_name(f"{file.name}.lock")
    with unforked(_opened(lock)) as descriptor:
        try:
            _flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, lock)
        except BlockingIOError:
            yield False
        else:
            yield not file.exists()


@contextmanager
def _locked(path: Path, how: int, tell: Callable[[], None]) -> Iterator[None]:
    """Hold a lock; `tell` is called, once and from another thread, where it is waited for that long."""
    with unforked(_opened(path)) as descriptor:
        try:
            _flock(descriptor, how | fcntl.LOCK_NB, path)
        except BlockingIOError:
            timer = Timer(PATIENCE, tell)
            timer.daemon = True
            timer.start()
            try:
                _flock(descriptor, how, path)
            finally:
                timer.cancel()
        yield


def _opened(lock: Path) -> int:
    return os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)  # NFS wants to read for a shared lock, to write for the other


def _flock(descriptor: int, how: int, lock: Path) -> None:
    """Lock a file. Without locks several processes would write the same, hence RefusedError where there are none."""
    try:
        fcntl.flock(descriptor, how)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        raise RefusedError(
            f"{lock.parent}: its file system has no locks ({error.strerror}), and processes that share this "
            "folder need them; mount it with locks (Lustre: -o flock), or use a run folder on another disk"
        ) from None
