"""Launcher and ranks of a stage that start in a moment: forked, where the program would start Python and import again.

All else is as it is: `accelerate launch` parses its words and watches over its ranks, each has a session, signals and
streams of its own, and its environment is seen in /proc. In tests/pipeline/test_odd_homes.py stages are started in
Python's own way.
"""

import ctypes
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from contextlib import suppress
from inspect import signature
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

from rlhf.pipeline.processes import MARK

SHOWN = (MARK, "RANK")
"""What others look for in /proc: the block has no room for more than a process began with."""


_start: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_ENDS = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")


def start_by_forking() -> None:
    """From now on this process starts modules of Python so."""
    subprocess.Popen = subprocess_handler.Popen = _Forked  # type: ignore[misc]


def ranks(home: Path) -> dict[str, int]:
    """Processes of stages that were started in `home`, by rank; the launcher has none."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            values = (path / "environ").read_bytes().decode(errors="replace").split("\0")
            here = (path / "cwd").readlink() == home
        except OSError:
            continue
        if here and any(value.startswith(f"{MARK}=") for value in values):
            rank = next((value for value in values if value.startswith("RANK=")), "")
            found[rank] = int(path.name)
    return found


class _Forked(subprocess.Popen):  # type: ignore[type-arg]
    """All of subprocess.Popen but how `python -m WORDS` starts."""

    def _execute_child(self, *arguments: Any) -> None:
        how = signature(_start).bind(self, *arguments).arguments
        words = [word for word in how["args"] if word != "-u"]
        if words[:2] != [sys.executable, "-m"]:
            return _start(self, *arguments)
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            try:
                for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGQUIT):
                    signal.signal(number, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                if how["start_new_session"]:
                    os.setsid()
                for number, name in enumerate(("p2cread", "c2pwrite", "errwrite")):
                    if how[name] not in (-1, number):
                        os.dup2(how[name], number)
                _become(words[2:], os.environ if how["env"] is None else how["env"])
            finally:
                os._exit(1)
        self._child_created = True
        self._close_pipe_fds(*(how[name] for name in _ENDS))  # type: ignore[attr-defined]
        return None


def _become(words: list[str], environment: Mapping[str, str]) -> NoReturn:
    """Be `python -m WORDS` to the end, which it tells by its code."""
    kept = (0, 1, 2, resource_tracker.getfd())
    for number in map(int, os.listdir("/dev/fd")):  # the lock of the run folder above all
        if number not in kept:
            with suppress(OSError):
                os.close(number)
    environment = dict(environment)
    os.environ.clear()
    os.environ.update(environment)
    _show(environment)
    sys.argv = words
    sys.path.insert(0, os.getcwd())
    if not hasattr(sys.modules.get(words[0]), "__path__"):
        sys.modules.pop(words[0], None)  # it is the main module
    code: Any = 1
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _show(environment: Mapping[str, str]) -> None:
    """Have /proc/PID/environ say what is in the environment now, and not what was when Python started."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start and env_end of proc(5)
    shown = b"\0".join(f"{name}={environment[name]}".encode() for name in SHOWN if name in environment)
    assert len(shown) < end - start
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)
