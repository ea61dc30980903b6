"""The lock of a stage's folder, which who trains there holds, by hand and in a run alike. No torch."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

from rlhf.data.errors import RefusedError

_ours: set[int] = set()
"""Descriptors that hold a lock. A forked child lets go of them: it may outlive the process whose lock it is."""


@contextmanager
def unforked(descriptor: int) -> Iterator[int]:
    """Inside, the lock that a descriptor holds is this process's alone; then it is closed."""
    _ours.add(descriptor)
    try:
        yield descriptor
    finally:
        _close(descriptor)


def _close(descriptor: int) -> None:
    if descriptor in _ours:  # in a child it has been closed, and may be another file by now
        _ours.remove(descriptor)
        os.close(descriptor)


def _close_all() -> None:
    for descriptor in list(_ours):
        _close(descriptor)


os.register_at_fork(after_in_child=_close_all)


@contextmanager
def alone_in(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Inside, have a stage's folder to this process, and those that it trains with; at most until it ends, however it
    does. Raises RefusedError where another process trains there, and still does after `patience` seconds."""
    if (descriptor := _locked(folder, patience)) is None:
        yield
        return
    with unforked(descriptor):
        yield


def _locked(folder: Path, patience: float) -> int | None:
    """A descriptor with the lock, which the system drops with the process; None where there is none to be had."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # a folder that is not there, or may not be listed
        return None
    until = monotonic() + patience
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        except BlockingIOError:
            if monotonic() < until:
                sleep(0.05)
                continue
            os.close(descriptor)
            raise RefusedError(
                f"{folder}: another process is training in it; wait until it is done, or use another folder"
            ) from None
        except OSError:  # a file system without locks
            os.close(descriptor)
            return None
