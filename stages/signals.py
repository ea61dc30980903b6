"""Which signals end a run, with which exit code, and which of them belong together. No torch."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import NoReturn

from rlhf.data.errors import Stopped

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""SIGUSR1 is what people have SLURM send before a job's time is over."""
SECONDS_OF_ECHO = 1.0
"""SLURM sends a signal to every process of a job, and each passes it on: what comes so soon after the first is one
signal with it."""
SECONDS_TO_REPORT = 5.0
"""What the processes around a stage wait for it beyond `stop_within`, before they kill it."""
SECONDS_TO_REPEAT = 0.01
"""How long after Python discarded a Stopped it is raised again."""

_last = -SECONDS_OF_ECHO
_earlier_hook = sys.unraisablehook


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
        raise_stopped(exit_code(number))


def raise_stopped(code: int) -> NoReturn:
    """Raise Stopped in a handler of signals. Where it came upon a `__del__` or a callback, whose errors Python prints
    and discards, nothing is printed, and it is raised again soon after."""
    global _earlier_hook
    if sys.unraisablehook is not _on_discarded:
        _earlier_hook, sys.unraisablehook = sys.unraisablehook, _on_discarded
    raise Stopped(code)


def _on_discarded(discarded: "sys.UnraisableHookArgs") -> None:
    error = discarded.exc_value
    if not isinstance(error, Stopped) or threading.current_thread() is not threading.main_thread():
        _earlier_hook(discarded)
        return
    code = error.code

    def again(_number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code is not _on_discarded.__code__:
            frame = frame.f_back
        if frame is None:  # else it would be discarded here, too
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            raise Stopped(code)

    before = signal.signal(signal.SIGALRM, again)
    signal.setitimer(signal.ITIMER_REAL, SECONDS_TO_REPEAT, SECONDS_TO_REPEAT)


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
        if sys.unraisablehook is _on_discarded:
            sys.unraisablehook = _earlier_hook


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
