"""What a stage does when it is asked to end: within `stop_within` seconds it is gone, and can go on later.

- Before there is a training state (data, models, sampled answers) it leaves at once.
- In training it is asked at the end of each step (`code`), saves and leaves.
- When a step, an evaluation or the sampling takes too long for that, it leaves where it is; the last checkpoint stands.
- A second signal ends it at once.
- When another of its processes has died, or all stand still (`watchdog`), it says which one and ends with code 1.

Python calls a handler between two of its own instructions. A library that does not come back, such as a reduction
whose other process is gone, is ended from a thread, which hears of signals through a pipe.
"""

import faulthandler
import json
import math
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from time import monotonic, sleep
from types import FrameType
from typing import Any, NoReturn, Protocol

from rlhf.stages.artifact import Artifact
from rlhf.stages.checkpoints import newest_checkpoint
from rlhf.stages.signals import SECONDS_OF_ECHO, SIGNALS, exit_code, forget, is_alive, is_echo, raise_stopped
from rlhf.stages.watchdog import Watchdog

SHARE_TO_FINISH = 0.8
"""Of `stop_within`: so long what is under way may take. The rest is for a save that has begun, and for leaving."""
SECONDS_TO_UNWIND = 1.0
"""How long after a second signal, or the loss of another process, until the thread ends the process."""
SECONDS_TO_BE_GONE = 5.0
"""How long after a connection broke the process at its other end may still be seen: it is gone a little later."""
LOST = "one of its processes ended and left no message; out of memory, or killed?"
_OF_OTHERS = re.compile(r"by peer|remote process|NCCL|gloo", re.IGNORECASE)
"""What torch says when it cannot reach another process."""
_END = b"\0"
_CURE = "; run again to go on"


class Tell(Protocol):
    """Writes status.json."""

    def __call__(self, state: str, step: int, message: str, code: int | None = None) -> None: ...


class Stopping:
    """The signals of one stage in this process. `others` are the ids of its other processes on this machine, which
    `watchdog` knows by rank; without others there is none."""

    def __init__(
        self,
        folder: Path,
        stop_within: float,
        say: Callable[[str], None],
        tell: Tell,
        others: Sequence[int] = (),
        watchdog: Watchdog | None = None,
    ) -> None:
        self.folder, self.stop_within, self._say, self._tell, self.others = folder, stop_within, say, tell, others
        self.watchdog = watchdog
        self.code = 0
        """Exit code that goes with the signal that came."""
        self.training = False
        """Whether there is a training state, which is worth some time."""
        self.watched = False
        """Whether one of several processes that hangs is told before that too."""
        self._saves = 0
        self._since: float | None = None
        self._before: dict[int, Any] = {}
        self._pipe, self._wakeup = -1, -1

    def start(self) -> None:
        """Handle signals from now on."""
        global _current
        close()
        _current = self
        forget()
        if self.watchdog is not None:
            self.watchdog.start()
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        heard, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        self._wakeup = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        Thread(target=self._watch, args=(heard,), daemon=True).start()

    def close(self) -> None:
        """Handle signals as they were handled before."""
        if not self._before:
            return
        before, self._before = self._before, {}
        for number, handler in before.items():
            if number == signal.SIGALRM:
                signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.write(self._pipe, _END)
        os.close(self._pipe)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """What is written here may come to its end; until `stop_within` is over."""
        self._saves += 1
        try:
            yield
        finally:
            self._saves -= 1

    def leave(self) -> NoReturn:
        """End here and now; what was saved last stands."""
        self.close()
        code, message = self.tell_left()
        if message:
            with suppress(RuntimeError):  # the handler may have interrupted somebody's print
                self._say(f"{message}{_CURE if code != 1 else ''}")
        raise_stopped(code)

    def tell_left(self) -> tuple[int, str]:
        """Say in status.json how it ended, unless another process did; the exit code, and the same in words. There are
        none where another one failed: this one is only sent after it, and what is shown is that one's error."""
        if self.another_failed():
            return 1, ""
        if self.a_process_is_gone() and not self.is_told():
            dead = self.watchdog.dead() if self.watchdog is not None else None
            message = LOST
            if self.watchdog is not None and dead is not None:
                message += f" It was {dead.name}, last seen {dead.seen_ago} {dead}; left is {self.watchdog.name}"
            self._tell("failed", 0, message)
            return 1, message
        found = None
        with suppress(OSError):  # the thread may look while a checkpoint is swapped in
            found = newest_checkpoint(self.folder)
        step = found.step if found else 0
        where = f"it goes on from step {step}" if found else "no checkpoint yet"
        message = f"stopped without saving anew; {where}" if self.training else f"stopped before training; {where}"
        if not self.is_told():
            self._tell("stopped", step, message, self.code)
        return self.code, message

    def is_told(self) -> bool:
        """Whether a process of this attempt has said already how it ended."""
        state = self._told()
        return state in ("stopped", "failed", "refused") or (state is not None and Artifact(self.folder).sealed)

    def another_failed(self) -> bool:
        """Whether another process of this attempt, on whatever machine, has said that it failed."""
        return self._told() in ("failed", "refused")

    def _told(self) -> str | None:
        """The state in status.json."""
        try:
            return str(json.loads((self.folder / "status.json").read_text(encoding="utf-8"))["state"])
        except (OSError, ValueError, LookupError):
            return None

    def a_process_is_gone(self) -> bool:
        """Whether another process of the stage has ended, which none does before the others."""
        return any(not is_alive(pid) for pid in self.others)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if is_echo():
            return
        again, self.code = self.code > 0, self.code or exit_code(number)
        if again or not self.training or self.a_process_is_gone() or self.another_failed():
            self.leave()
        due = (self._since or monotonic()) + SHARE_TO_FINISH * self.stop_within
        self._before[signal.SIGALRM] = signal.signal(signal.SIGALRM, self._on_alarm)
        signal.setitimer(signal.ITIMER_REAL, max(due - monotonic(), 0.001), 0.1)
        with suppress(RuntimeError):
            self._say("signal received; saving after this step (again to end at once)")

    def _on_alarm(self, _number: int, _frame: FrameType | None) -> None:
        if not self._saves:
            self.leave()

    def _watch(self, heard: int) -> None:
        """The last resort: end the process when the time is over and the main thread has not come to it."""
        due = math.inf
        interval = math.inf if self.watchdog is None else self.watchdog.interval
        while True:
            left, before = min(max(due - monotonic(), 0.0), interval), monotonic()
            if not select.select([heard], [], [], None if left == math.inf else left)[0]:
                if monotonic() >= due:
                    self._end()
                if self.watchdog is not None:
                    self.watchdog.stood(max(monotonic() - before - left, 0.0))
                if self.watchdog is not None and (standstill := self.watchdog.look(self.training or self.watched)):
                    self._end_standstill(standstill)
                continue
            byte = os.read(heard, 1)
            if byte in (_END, b""):
                os.close(heard)
                return
            # Not ours: other signals, and those of another owner of the handlers.
            if byte[0] not in SIGNALS or signal.getsignal(byte[0]) != self._on_signal:
                continue
            if self._since is None:
                self._since = monotonic()
                is_broken = self.a_process_is_gone() or self.another_failed()
                due = self._since + (SECONDS_TO_UNWIND if is_broken else self.stop_within)
                self._number = byte[0]
            elif monotonic() - self._since > SECONDS_OF_ECHO:
                due = min(due, monotonic() + SECONDS_TO_UNWIND)

    def _end(self) -> NoReturn:
        self.code = self.code or exit_code(self._number)
        try:
            code, message = self.tell_left()
            if message:
                os.write(2, f"{message}{_CURE if code != 1 else ''}\n".encode())
        except OSError:  # a full disk must not keep it alive
            code = self.code
        os._exit(code)

    def _end_standstill(self, message: str) -> NoReturn:
        """The same where the stage stands still; where in the code this process is goes to stderr."""
        with suppress(OSError):
            if not self.is_told():
                self._tell("failed", 0, message)
            os.write(2, f"{message}\n".encode())
            faulthandler.dump_traceback(2)
        assert self.watchdog is not None
        # One that is stopped hears no other signal, and the launcher would wait for it.
        for pid in set(self.watchdog.silent_here()) & set(self.others):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        os._exit(1)


_current: Stopping | None = None


def close() -> None:
    """Give the signals back that a stage in this process still handles, as one does that failed."""
    if _current is not None:
        _current.close()


def is_for_want_of_another(error: Exception) -> bool:
    """Whether an error of this process came of another one of the stage being gone."""
    if _current is None or not _current.others or not _OF_OTHERS.search(str(error)):
        return False
    until = monotonic() + SECONDS_TO_BE_GONE
    while not _current.a_process_is_gone():
        if monotonic() > until:
            return False
        sleep(0.05)
    return True


def tell_loss() -> int:
    """Say in status.json that another process is gone, unless it said itself how it ended; the exit code."""
    if _current is not None and not _current.is_told():
        _current.tell_left()
    return 1


def end_process(code: Any) -> NoReturn:
    """End without what libraries do at exit, which may wait for a process that is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _forget_in_child() -> None:
    """A forked helper (a loader of rows, a pool) is not the stage: it ends of a signal as any process does."""
    global _current
    if _current is not None and _current._before:
        signal.set_wakeup_fd(-1)
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        _current = None


os.register_at_fork(after_in_child=_forget_in_child)
