"""Folders that several processes fill once: what is said to a person who waits for another."""

import errno
import fcntl
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from threading import Event, current_thread

import pytest
from processes_world import held_until

from rlhf.data.errors import RefusedError
from rlhf.stages import together


@pytest.mark.parametrize("how", [fcntl.LOCK_EX, fcntl.LOCK_SH])
def test_who_waits_for_long_says_for_what_once_and_who_does_not_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: int
) -> None:
    monkeypatch.setattr(together, "PATIENCE", 0.0)
    folder, told, said = tmp_path / "abc", Event(), []

    def say(text: str) -> None:
        said.append(text)
        told.set()

    def fill() -> None:
        together.fill(folder, "the tokens of a.txt", say, lambda folder: (folder / "done").exists(), finish)

    def finish(folder: Path) -> None:
        (folder / "done").touch()

    with held_until(told, tmp_path / ".abc.lock", how):  # it makes the folder whole alone, or is at a piece of it
        fill()
    assert said == [f"waiting for another process, which makes the tokens of a.txt ({folder})"]
    assert (folder / "done").exists()
    fill()
    assert len(said) == 1


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK])
def test_a_file_system_without_locks_is_named_with_its_folder_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    said = (
        f"{tmp_path}: its file system has no locks ({os.strerror(number)}), and processes that share this folder need "
        "them; mount it with locks (Lustre: -o flock), or use a run folder on another disk"
    )
    with pytest.raises(RefusedError, match=re.escape(said)):
        together.fill(tmp_path / "abc", "tokens", print, lambda _: True, lambda _: None)
    with pytest.raises(RefusedError, match=re.escape(said)), together.claimed(tmp_path / "part"):
        pass


def test_another_fault_of_a_lock_is_told_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="Input/output error"), together.claimed(tmp_path / "part"):
        pass


def test_nobody_reading_what_is_said_does_not_end_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "PATIENCE", 0.0)
    told, threads = Event(), []

    def say(text: str) -> None:
        threads.append(current_thread())
        told.set()
        raise BrokenPipeError

    with held_until(told, tmp_path / ".abc.lock", fcntl.LOCK_EX):
        together.fill(tmp_path / "abc", "tokens", say, lambda _: True, lambda _: None)
    [thread] = threads
    thread.join()  # an error in it would be a warning


HOLDS = """
import os, signal, sys
from pathlib import Path
from rlhf.stages import together
with together.claimed(Path(sys.argv[1])):
    if not os.fork():
        print(os.getpid(), flush=True)
    signal.pause()
"""


def test_a_forked_child_that_outlives_a_killed_process_does_not_keep_its_lock(tmp_path: Path) -> None:
    """As the idle workers of a pool do, which somebody's rows function has."""
    with subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path / "part")], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        owner.kill()
        owner.wait()
        try:
            with together.claimed(tmp_path / "part") as ours:
                assert ours
        finally:
            os.kill(child, signal.SIGKILL)
