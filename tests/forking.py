"""Processes that start in a moment: forked from one that has imported everything, which takes longer than a test."""

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn

import pytest

IMPORTED = [
    "pytest",
    *(f"rlhf.stages.{stage}.train" for stage in ("pretrain", "sft", "reward", "ppo")),
    *(f"rlhf.pipeline.{name}" for name in ("cli", "runner", "report")),
]


@cache
def context() -> ForkServerContext:
    """Of multiprocessing, with a server that is one for all tests of this process and ends with it."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONWARNINGS", "ignore")
        resource_tracker.ensure_running()  # it would tell of what killed processes leave
    with pytest.MonkeyPatch.context() as patch:  # what the libraries read when they are imported
        for name, value in {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}.items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    return found


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


def rlhf(*words: str, cwd: Path, typed: str = "", seconds: float = 300) -> Command:
    """`rlhf WORDS` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder) / name for name in ("stdin", "stdout", "stderr")]
        streams[0].write_text(typed)
        process = fork(_rlhf, words, cwd, streams)
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
        _, said, told = (path.read_text(encoding="utf-8") for path in streams)
    assert process.exitcode is not None
    return Command(process.exitcode, said, told)


def _rlhf(words: tuple[str, ...], cwd: Path, streams: list[Path]) -> NoReturn:
    os.chdir(cwd)
    for number, path in enumerate(streams):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
    sys.stdin = os.fdopen(0)
    os.execv = _be  # type: ignore[assignment]
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


def end_group(process: ForkServerProcess) -> None:
    """Nothing that a process with a session of its own started outlives it."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
