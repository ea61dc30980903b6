"""Two runs never work in one folder, and whoever is refused learns by whom."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep, time

import pytest
from forking import forked_helper
from pipeline_world import FakeStages

from rlhf.data.errors import SettingsError
from rlhf.pipeline import lock, runner
from rlhf.pipeline.lock import LOCK, SECONDS_TO_BELIEVE, held, holder_of, in_use
from rlhf.pipeline.recipe import load_recipe
from rlhf.stages.artifact import Artifact

RUN = Path("run")
DEAD = 2**22 + 1  # above the largest pid that Linux gives


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RUN.mkdir()


@pytest.fixture
def no_flock(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)


def write(host: str, pid: int, age: float = 0.0) -> None:
    """What a holder would leave, with its last sign of life so many seconds ago."""
    (RUN / LOCK).write_text(json.dumps({"host": host, "pid": pid, "since": "2020-01-01T00:00:00+00:00"}))
    os.utime(RUN / LOCK, (time() - age, time() - age))


def appears(condition: Callable[[], bool]) -> bool:
    until = monotonic() + 60
    while not condition() and monotonic() < until:
        sleep(0.02)
    return condition()


def test_the_refusal_names_who_holds_the_folder_and_for_how_long() -> None:
    who = rf"run: another rlhf run is working here \(pid {os.getpid()} on {socket.gethostname()}, for 0 min\); wait"
    with held(RUN, 0):
        told = json.loads((RUN / LOCK).read_text())
        assert (told["host"], told["pid"]) == (socket.gethostname(), os.getpid())
        assert in_use(RUN)
        with pytest.raises(SettingsError, match=who), held(RUN, 0):
            pass
        assert in_use(RUN), "a refused run took the lock away"
    assert not in_use(RUN)


def test_a_lock_that_is_given_back_leaves_nothing(run_dir: None) -> None:
    with pytest.raises(ZeroDivisionError), held(RUN, 0):
        raise ZeroDivisionError
    assert list(RUN.iterdir()) == []


def test_a_helper_that_was_forked_keeps_no_folder_for_a_run_that_is_gone() -> None:
    """A reward function may start one, which lives on where the run is killed."""
    with ExitStack() as living:
        with held(RUN, 0):
            living.enter_context(forked_helper())
        assert not in_use(RUN)


def test_the_lock_of_a_run_that_was_killed_is_taken_over_with_one_line() -> None:
    program = """
    from pathlib import Path
    from time import sleep
    from rlhf.pipeline.lock import held
    with held(Path("run"), 0):
        sleep(60)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)])
    assert appears(lambda: holder_of(RUN) is not None)  # the file is there before it says who
    with pytest.raises(SettingsError, match=f"pid {process.pid} on {socket.gethostname()}"), held(RUN, 0):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    said: list[str] = []
    with held(RUN, 0, said.append):
        assert json.loads((RUN / LOCK).read_text())["pid"] == os.getpid()
    assert said == [
        f"took over the lock of a run that is gone (pid {process.pid} on {socket.gethostname()}, for 0 min)"
    ]


def test_a_lock_of_another_machine_refuses_with_the_cure() -> None:
    write("elsewhere", 1)
    assert in_use(RUN)
    message = r"pid 1 on elsewhere, for \d+ min.* if that run is gone, delete run/lock\.json$"
    with pytest.raises(SettingsError, match=message), held(RUN, 0):
        pass
    (RUN / LOCK).unlink()
    with held(RUN, 0):
        pass


def test_a_lock_of_another_machine_that_gave_no_sign_for_long_is_taken_over() -> None:
    write("elsewhere", 1, age=SECONDS_TO_BELIEVE + 1)
    assert not in_use(RUN)
    said: list[str] = []
    with held(RUN, 0, said.append):
        pass
    assert "took over" in said[0]


def test_a_holder_gives_signs_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "SECONDS_BETWEEN_SIGNS", 0.01)
    with held(RUN, 0):
        os.utime(RUN / LOCK, (0, 0))
        assert appears(lambda: (RUN / LOCK).stat().st_mtime > 0)


@pytest.mark.usefixtures("no_flock")
def test_without_flock_the_file_decides() -> None:
    with held(RUN, 0):
        assert in_use(RUN)
        with pytest.raises(SettingsError, match=f"another rlhf run is working here .pid {os.getpid()} "), held(RUN, 0):
            pass
    assert not in_use(RUN)
    write(socket.gethostname(), DEAD)
    said: list[str] = []
    with held(RUN, 0, said.append):
        assert json.loads((RUN / LOCK).read_text())["pid"] == os.getpid()
    assert "took over" in said[0]


@pytest.mark.usefixtures("no_flock")
def test_without_flock_a_lock_that_is_just_being_written_refuses_and_an_old_empty_one_does_not() -> None:
    (RUN / LOCK).touch()
    with pytest.raises(SettingsError, match="another rlhf run is working here; wait for it"), held(RUN, 0):
        pass
    os.utime(RUN / LOCK, (0, 0))
    with held(RUN, 0):
        pass


def test_a_lock_that_another_took_over_is_left_to_it() -> None:
    with held(RUN, 0):
        write("elsewhere", 1)
    assert json.loads((RUN / LOCK).read_text())["host"] == "elsewhere"


def test_a_full_disk_does_not_keep_clean_from_making_room(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with held(RUN, 0):
        assert in_use(RUN)


def test_a_run_leaves_no_lock_and_none_in_a_manifest(world: Path, stages: FakeStages) -> None:
    stages.in_stage["sft"] = lambda folder: (folder / LOCK).write_text("somebody's") and None
    runner.run(load_recipe("recipe.yaml"), RUN, say=lambda _: None)
    assert not (RUN / LOCK).exists()
    folder = next(RUN.glob("sft-*"))
    assert set(Artifact(folder).manifest["files"]) == {"settings.yaml", "model/config.json"}
    assert (folder / LOCK).read_text() == "somebody's"
