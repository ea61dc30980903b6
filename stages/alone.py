"""The lock of a stage's folder, which who trains there holds, by hand and in a run alike. No torch."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlhf.data.errors import RefusedError


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Inside, have a stage's folder to this process, and those that it trains with; at most until it ends, however it
    does. Raises RefusedError where another process trains there."""
    descriptor = _locked(folder)
    try:
        yield
    finally:
        if descriptor is not None:
            with suppress(OSError):  # closing it is not enough where a forked helper has it open, too
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _locked(folder: Path) -> int | None:
    """A descriptor with the lock, which the system drops with the process; None where there is none to be had."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # a folder that is not there, or may not be listed
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise RefusedError(
                f"{folder}: another process is training in it; wait until it is done, or use another folder"
            ) from None
        return None  # a file system without locks
    return descriptor
