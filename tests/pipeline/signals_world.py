"""`rlhf` in processes of their own that take as long as one likes in a phase of the run."""

import ctypes
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from forking import become, end_group, fork

from rlhf.pipeline import launch, report

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
    """One that has been started; `slow` in a phase when `has_begun`."""

    def __init__(self, pid: int, home: Path) -> None:
        self.pid, self.home = pid, home

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    @property
    def said(self) -> str:
        return (self.home / "said").read_text()


class Server:
    """Starts runs in the folder `home`, one at a time."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def start(self, *words: str, phase: str = "", seconds: float = 60, number: int = 1, stuck: bool = False) -> Run:
        """`rlhf WORDS`; the `number`-th time that it is in `phase`, it takes some `seconds` there before it goes on.

        It is `stuck` where no handler is called: in a library that does not come back.
        """
        (self.home / "begun").unlink(missing_ok=True)
        order = {"phase": phase, "seconds": seconds, "number": number, "stuck": stuck}
        self._process = fork(_become, self.home, words, order)
        assert self._process.pid is not None
        run = Run(self._process.pid, self.home)
        if phase:
            until = monotonic() + 60
            while not (self.home / "begun").exists():
                assert monotonic() < until, run.said
                sleep(0.01)
        return run

    def wait(self) -> tuple[int, float]:
        """Exit code of the run (that of a signal is negative), and for how long it was waited for."""
        began = monotonic()
        self._process.join()
        end_group(self._process)
        assert self._process.exitcode is not None
        return self._process.exitcode, monotonic() - began


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
            until = monotonic() + order["seconds"]
            while monotonic() < until:
                sleep(0.01)
        return function(*arguments, **named)

    return slow


def _become(home: Path, words: tuple[str, ...], order: dict[str, Any]) -> None:
    os.chdir(home)
    os.setsid()
    said = os.open("said", os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(said, descriptor)
    launch.stays_in_process = lambda *_: True
    if order["phase"] != "report":  # drawing takes longer than all the rest
        report.render = lambda run_dir: (run_dir / "report.html").touch()
    if order["phase"]:
        module, name = PHASES[order["phase"]]
        owner = importlib.import_module(module)
        setattr(owner, name, _slow(order, getattr(owner, name)))
    become(words)
