"""Which signals end a run, with which exit code, and which of them belong together. No torch."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from types import FrameType

from rlhf.data.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""SIGUSR1 is what people have SLURM send before a job's time is over."""
SECONDS_OF_ECHO = 1.0
"""SLURM sends a signal to every process of a job, and each passes it on: what comes so soon after the first is one
signal with it."""
SECONDS_TO_REPORT = 5.0
"""What the processes around a stage wait for it beyond `stop_within`, before they kill it."""

_last = -SECONDS_OF_ECHO


def exit_code(number: int) -> int:
    """128 + the signal's number, and for SIGUSR1 that of SIGTERM, which it stands for."""
    return 128 + (signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)


def is_echo() -> bool:
    """Whether the signal that just came to this process is one with an earlier one; asked once for each."""
    global _last
    if monotonic() - _last < SECONDS_OF_ECHO:
        return True
    _last = monotonic()
    return False


def forget() -> None:
    """Take the next signal for a first one."""
    global _last
    _last = -SECONDS_OF_ECHO


def exit_on_signal(number: int, _frame: FrameType | None) -> None:
    """A handler for a process that has nothing to save."""
    if not is_echo():
        raise Stopped(exit_code(number))


@contextmanager
def handled(handler: Callable[[int, FrameType | None], None] | None = None) -> Iterator[None]:
    """Have the signals handled by `handler`; afterwards as before, whatever was set meanwhile."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        if handler is not None:
            forget()
            for number in before:
                signal.signal(number, handler)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def is_alive(pid: int) -> bool:
    """Whether a process of this machine has not ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        pass
    if Path("/proc/self/stat").exists():
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:  # another user's
        return True
    except OSError:
        return False
    return True
