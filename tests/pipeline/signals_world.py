"""`rlhf` in processes of their own that stay in a phase of the run until a test lets them go on."""

import ctypes
import importlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from forking import become, end_group, fork

from rlhf.pipeline import launch, report
from rlhf.stages import signals, stopping

SECONDS = 120.0
"""How long something is waited for: with a wide margin, since other tests are at work too."""
FOR_EVER = 600.0
"""Seconds that nobody waits for."""

RECIPE = """
pretrain:
  data: slow:documents
  vocab_size: 300
  hidden_size: 16
  num_layers: 1
  num_heads: 2
  intermediate_size: 32
  context_length: 64
  dropout: 0.1
  num_steps: 6
  global_batch_size: 4
  eval_every: 3
  save_every: 2
  log_every: 1
  sample_prompts: [The brave]
  sample_length: 4
  report_to: []
"""

PHASES = {
    "preflight": ("rlhf.pipeline.runner", "refuse_bad_input"),
    "data": ("rlhf.stages.pretrain.train", "prepare"),
    "step": ("rlhf.stages.pretrain.train", "optimise"),
    "evaluation": ("rlhf.stages.pretrain.train", "validation_loss"),
    "generation": ("rlhf.stages.engines.choice", "make_engine"),
    "save": ("rlhf.stages.runtime", "swap_in"),
    "seal": ("rlhf.stages.runtime", "seal"),
    "report": ("rlhf.pipeline.report", "render"),
}
"""What each phase calls."""


DOCUMENTS = """
from rlhf.recipes import demo_world

def documents():
    return [{"text": text} for text in demo_world.documents(num=60)]
"""
"""The module of the text, for `data: slow:documents`."""


class Run:
    """One that has been started."""

    def __init__(self, pid: int, home: Path) -> None:
        self.pid, self.home = pid, home
        self.sent = monotonic()
        """When it got its last signal."""

    def send(self, number: int) -> None:
        """Send it a signal, and wait until it has arrived."""
        self.sent = monotonic()
        os.kill(self.pid, number)
        wait_for(lambda: not self._is_pending())

    def go_on(self) -> None:
        """Let it leave the phase in which it is."""
        (self.home / "go_on").touch()

    def _is_pending(self) -> bool:
        about: list[str] = []
        with suppress(OSError):  # it is gone
            about = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return any(int(line.split()[1], 16) for line in about if line.startswith(("SigPnd", "ShdPnd")))

    @property
    def said(self) -> str:
        return (self.home / "said").read_text()


class Server:
    """Starts runs in the folder `home`, one at a time."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def start(
        self, *words: str, phase: str = "", number: int = 1, stuck: bool = False, echo: float = signals.SECONDS_OF_ECHO,
        share: float = stopping.SHARE_TO_FINISH,
    ) -> Run:  # fmt: skip
        """`rlhf WORDS`; the `number`-th time that it is in `phase`, it stays there until it may `go_on`.

        It is `stuck` where no handler is called: in a library that does not come back. `echo` and `share` stand for
        SECONDS_OF_ECHO and SHARE_TO_FINISH.
        """
        for name in ("begun", "go_on", "late"):
            (self.home / name).unlink(missing_ok=True)
        order = {"phase": phase, "number": number, "stuck": stuck, "echo": echo, "share": share}
        self._process = fork(_become, self.home, words, order)
        assert self._process.pid is not None
        run = Run(self._process.pid, self.home)
        if phase:
            self.has_begun(run)
        return run

    def has_begun(self, run: Run) -> None:
        """Wait until it is in its phase."""
        wait_for(lambda: (self.home / "begun").exists() or self._process.exitcode is not None)
        assert (self.home / "begun").exists(), run.said

    def wait(self) -> int:
        """Exit code of the run (that of a signal is negative)."""
        self._process.join(SECONDS)
        end_group(self._process)
        self._process.join()
        assert self._process.exitcode is not None
        return self._process.exitcode


def wait_for(condition: Callable[[], bool]) -> None:
    until = monotonic() + SECONDS
    while not condition():
        assert monotonic() < until
        sleep(0.01)


def _slow(order: dict[str, Any], function: Callable[..., Any]) -> Callable[..., Any]:
    calls = 0

    def slow(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == order["number"]:
            Path("begun").touch()
            if order["stuck"]:
                mutex = ctypes.create_string_buffer(64)
                for _ in range(2):  # the second time it waits for itself
                    ctypes.CDLL(None).pthread_mutex_lock(mutex)
            until = monotonic() + FOR_EVER
            while not Path("go_on").exists() and monotonic() < until:
                sleep(0.01)
        return function(*arguments, **named)

    return slow


def _telling(on_alarm: Callable[..., None]) -> Callable[..., None]:
    """It says in a file that what was under way took too long."""

    def told(*arguments: Any) -> None:
        Path("late").touch()
        on_alarm(*arguments)

    return told


def _become(home: Path, words: tuple[str, ...], order: dict[str, Any]) -> None:
    os.chdir(home)
    os.setsid()
    said = os.open("said", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(said, descriptor)
    launch.stays_in_process = lambda *_: True
    signals.SECONDS_OF_ECHO = stopping.SECONDS_OF_ECHO = order["echo"]
    stopping.SHARE_TO_FINISH = order["share"]
    stopping.Stopping._on_alarm = _telling(stopping.Stopping._on_alarm)
    if order["phase"] != "report":  # drawing takes longer than all the rest
        report.render = lambda run_dir: (run_dir / "report.html").touch()
    if order["phase"]:
        module, name = PHASES[order["phase"]]
        owner = importlib.import_module(module)
        setattr(owner, name, _slow(order, getattr(owner, name)))
    become(words)
