"""Processes that start in a moment: forked from one that has imported everything, which takes longer than a test."""

import contextlib
import gc
import logging
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn

import pytest

IMPORTED = [
    "pytest",
    *(f"rlhf.stages.{stage}.train" for stage in ("pretrain", "sft", "reward", "ppo")),
    *(f"rlhf.pipeline.{name}" for name in ("cli", "runner", "report")),
    "accelerate.commands.config",
    "torch.distributed.run",
    "launching",
    "warmed",
]


@contextlib.contextmanager
def forked_helper() -> Iterator[None]:
    """Inside, a child of this process lives that was forked from it and does nothing."""
    ours, theirs = socket.socketpair()
    if (child := os.fork()) == 0:
        ours.close()
        theirs.sendall(b"here")
        theirs.recv(1)  # until the parent closes its end
        os._exit(0)
    theirs.close()
    ours.recv(4)
    try:
        yield
    finally:
        ours.close()
        os.waitpid(child, 0)


@cache
def context() -> ForkServerContext:
    """Of multiprocessing, with a server that is one for all tests of this process and ends with it.

    The server is forked from this process (tests/conftest.py sees to it before the first test), which has most of
    the imports behind it.
    """
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONWARNINGS", "ignore")
        resource_tracker.ensure_running()  # it would tell of what killed processes leave
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(util, "spawnv_passfds", _serve)
        forkserver.ensure_running()
    return found


def _serve(_: str, words: Sequence[str], kept: Sequence[int]) -> int:
    """What comes of `python -c CODE`, in a process that begins with what this one has imported."""
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # threads of this process that wait for tests to run are not missed there
        if number := os.fork():
            return number
    gc.freeze()
    pipes = {os.fstat(number).st_ino for number in kept}
    for number in map(int, os.listdir("/dev/fd")):  # the other end of the pipe that tells of this process's end
        with contextlib.suppress(OSError):
            if number not in kept and os.fstat(number).st_ino in pipes:
                os.close(number)
    sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__  # type: ignore[assignment]
    _say_what_python_says()
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    try:
        import huggingface_hub.constants
        import torch

        huggingface_hub.constants.HF_HUB_OFFLINE = True  # it was read when they were imported
        torch.set_num_threads(1)
        exec(words[-1], {"__name__": "__main__"})
    except Exception:
        traceback.print_exc()
    finally:  # not what comes after the tests of this process
        os._exit(0)


def _say_what_python_says() -> None:
    """Logs and warnings go to stderr, where pytest keeps them to itself and makes errors of warnings."""
    logging.root.handlers.clear()
    for logger in logging.root.manager.loggerDict.values():
        for handler in getattr(logger, "handlers", ()):
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    warnings.filterwarnings("ignore", category=UserWarning, module="torch.optim.lr_scheduler")  # as torch wants it

    def show(
        message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: str | None = None
    ) -> None:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno, line))

    warnings.showwarning = show


def fork(function: Callable[..., Any], *arguments: Any) -> ForkServerProcess:
    """A process that calls the function of a module and ends."""
    process = context().Process(target=_call, args=(function, arguments))
    process.start()
    return process


def _call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    gc.freeze()  # as tests/conftest.py does
    function(*arguments)


@dataclass(frozen=True)
class Command:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


@dataclass
class Begun:
    """A command that runs."""

    process: ForkServerProcess
    folder: Path
    """Of its streams, in files."""

    def end(self, seconds: float) -> Command:
        """Wait for it so long, and then kill it."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        assert self.process.exitcode is not None
        said, told = ((self.folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr"))
        shutil.rmtree(self.folder)
        return Command(self.process.exitcode, said, told)


def rlhf(*words: str, cwd: Path, typed: str = "", seconds: float = 300, charts: bool = True) -> Command:
    """`rlhf WORDS` in a process of its own, and the processes of its stages, to the end."""
    return begin(*words, cwd=cwd, typed=typed, charts=charts).end(seconds)


def begin(*words: str, cwd: Path, typed: str = "", charts: bool = True) -> Begun:
    """The same, while this process goes on. Without `charts` its report has none: they take longer than its stages."""
    folder = Path(tempfile.mkdtemp())
    streams = [folder / name for name in ("stdin", "stdout", "stderr")]
    streams[0].write_text(typed)
    return Begun(fork(_rlhf, words, cwd, streams, charts), folder)


def _rlhf(words: tuple[str, ...], cwd: Path, streams: list[Path], charts: bool) -> NoReturn:
    os.chdir(cwd)
    for number, path in enumerate(streams):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    sys.stdin = os.fdopen(0)
    from launching import start_by_forking

    if not charts:
        sys.modules["rlhf.pipeline.report.charts"].draw_lines = lambda *_: ""  # type: ignore[attr-defined]
    os.execv = _be  # type: ignore[assignment]
    start_by_forking()
    become(words)


def _be(_: str, words: list[str]) -> NoReturn:
    """What comes of `python -c CODE WORDS`, without importing all again as `rlhf eval` and `rlhf chat` do."""
    assert words[1] == "-c"
    sys.argv = ["-c", *words[3:]]
    sys.modules.pop(words[3], None)  # it is the main module
    exec(words[2], {"__name__": "__main__"})
    raise SystemExit


def become(words: tuple[str, ...]) -> NoReturn:
    """Be `rlhf WORDS` to the end."""
    from rlhf.pipeline.cli import main

    code: Any = 1
    try:
        main(words)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def free_port() -> int:
    """One to listen on at 127.0.0.1 a little later.

    Linux gives those from 32768 on to whoever asks for any, who may come meanwhile.
    """
    chance = random.SystemRandom()
    while True:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", chance.randrange(20_000, 32_000)))
            port: int = listener.getsockname()[1]
            return port


def end_group(process: ForkServerProcess) -> None:
    """Nothing that a process with a session of its own started outlives it."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
