"""What a stage does about signals, in one process. Whole runs get theirs in tests/pipeline/test_signals.py."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from rlhf.data.errors import SettingsError, Stopped
from rlhf.pipeline.recipe import load_recipe
from rlhf.stages import signals, stopping
from rlhf.stages.sft.config import SFTSettings
from rlhf.stages.stopping import LOST, Stopping

TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1


class Stage:
    """A folder, and what was said and told."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.said: list[str] = []
        self.tell("running", 0, "")

    def tell(self, state: str, step: int, message: str, code: int | None = None) -> None:
        content = {"state": state, "step": step, "message": message, "code": code}
        (self.folder / "status.json").write_text(json.dumps(content))

    @property
    def told(self) -> tuple[str, str]:
        content = json.loads((self.folder / "status.json").read_text())
        return content["state"], content["message"]

    def stopping(self, stop_within: float = 30, training: bool = True, others: list[int] | None = None) -> Stopping:
        found = Stopping(self.folder, stop_within, self.said.append, self.tell, others or [])
        found.training = training
        found.start()
        return found


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    yield Stage(tmp_path)
    stopping.close()


@pytest.fixture
def dead() -> Iterator[int]:
    """Id of a process that has ended and that nobody has waited for."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    while signals.is_alive(process.pid):
        sleep(0.01)
    yield process.pid
    process.wait()


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    sleep(0.01)  # lets the handler be called


@pytest.mark.parametrize(("number", "code"), [(TERM, 143), (INT, 130), (USR1, 143)])
def test_before_there_is_a_training_state_the_stage_leaves_at_once(stage: Stage, number: int, code: int) -> None:
    stage.stopping(training=False)
    with pytest.raises(Stopped) as stopped:
        send(number)
    assert stopped.value.code == code
    assert stage.told == ("stopped", "stopped before training; no checkpoint yet")


@pytest.mark.parametrize(("number", "code"), [(TERM, 143), (INT, 130), (USR1, 143)])
def test_in_training_the_signal_is_kept_for_the_end_of_the_step(stage: Stage, number: int, code: int) -> None:
    found = stage.stopping()
    assert found.code == 0
    send(number)
    assert found.code == code
    assert stage.told == ("running", "")
    assert stage.said == ["signal received; saving after this step (again to end at once)"]


def test_signals_that_come_together_are_one_and_a_later_one_ends_the_stage(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(signals, "monotonic", lambda: now[0])
    found = stage.stopping()
    for number in (TERM, INT, TERM):
        send(number)
        now[0] += 0.3
    assert found.code == 143  # of the first
    now[0] += 0.2
    with pytest.raises(Stopped):
        send(TERM)
    assert stage.told == ("stopped", "stopped without saving anew; no checkpoint yet")


class Dying:
    """Something that calls a function while Python drops it, and discards what is raised there."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.function = function

    def __del__(self) -> None:
        self.function()


def drop(*functions: Callable[[], object]) -> None:
    """Drop what calls the functions, one after the other; then do something that takes long."""
    for function in functions:
        Dying(function)
    sleep(10)


def interrupt() -> None:
    signal.raise_signal(INT)


def test_a_signal_that_comes_while_something_is_dropped_stops_the_stage_too(stage: Stage) -> None:
    stage.stopping(training=False)
    with signals.handled(), pytest.raises(Stopped) as stopped:
        drop(interrupt)
    assert stopped.value.code == 130
    assert stage.told == ("stopped", "stopped before training; no checkpoint yet")
    assert stage.said == ["stopped before training; no checkpoint yet; run again to go on"]  # once


def test_a_process_with_nothing_to_save_stops_of_a_signal_however_often_it_is_discarded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hook, handler = sys.__unraisablehook__, signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr(sys, "unraisablehook", hook)
    with signals.handled(signals.exit_on_signal), pytest.raises(Stopped) as stopped:
        drop(interrupt, lambda: sleep(10))  # the second is dropped when it is raised again
    assert stopped.value.code == 130
    assert (sys.unraisablehook, signal.getsignal(signal.SIGALRM)) == (hook, handler)
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_it_is_not_raised_where_python_still_looks_at_what_it_discards(monkeypatch: pytest.MonkeyPatch) -> None:
    set_timer = signal.setitimer

    def slowly(which: int, seconds: float, interval: float = 0.0) -> None:
        set_timer(which, interval, interval)
        if seconds > 0:  # which have gone by before this is left
            signal.raise_signal(signal.SIGALRM)

    monkeypatch.setattr(signal, "setitimer", slowly)
    with signals.handled(signals.exit_on_signal), pytest.raises(Stopped):
        drop(interrupt)


def test_other_errors_of_what_is_dropped_are_told_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda discarded: told.append(discarded.exc_type))

    with signals.handled(signals.exit_on_signal):
        with pytest.raises(Stopped):
            interrupt()
        Dying(lambda: 1 / 0)
    assert told == [ZeroDivisionError]


def test_a_step_may_take_four_fifths_of_the_time(stage: Stage) -> None:
    stage.stopping(stop_within=0.5)
    began, left = monotonic(), []

    def wait() -> None:
        send(TERM)
        left.append(signal.getitimer(signal.ITIMER_REAL)[0])
        sleep(10)

    with pytest.raises(Stopped):
        wait()
    assert monotonic() - began >= 0.4
    assert all(seconds <= 0.4 for seconds in left)  # none where it was over before it could be looked at
    assert stage.told[0] == "stopped"


def test_a_save_is_not_interrupted_and_what_comes_after_it_is(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    alarm, late, saved = Stopping._on_alarm, threading.Event(), threading.Event()

    def on_alarm(*arguments: Any) -> None:
        late.set()
        alarm(*arguments)

    monkeypatch.setattr(Stopping, "_on_alarm", on_alarm)
    monkeypatch.setattr(stopping, "SHARE_TO_FINISH", 0.001)
    found = stage.stopping(stop_within=60)

    def save_and_go_on() -> None:
        with found.saving():
            send(TERM)
            while not late.is_set():
                sleep(0.01)
            saved.set()
        sleep(10)

    with pytest.raises(Stopped):
        save_and_go_on()
    assert saved.is_set()


def test_a_process_that_is_gone_is_told_of_as_a_failure(stage: Stage, dead: int) -> None:
    stage.stopping(others=[os.getppid(), dead])
    with pytest.raises(Stopped) as stopped:  # the launcher ends those that are left with SIGTERM
        send(TERM)
    assert stopped.value.code == 1
    assert stage.told == ("failed", LOST)


def test_what_another_process_said_of_the_end_stands(stage: Stage, dead: int) -> None:
    stage.stopping(others=[dead])
    stage.tell("stopped", 4, "by rank 1")
    with pytest.raises(Stopped) as stopped:
        send(TERM)
    assert stopped.value.code == 143
    assert stage.told == ("stopped", "by rank 1")


@pytest.mark.parametrize("state", ["failed", "refused"])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("is_here", [False, True])
def test_of_another_process_that_failed_it_says_nothing_and_ends_at_once(
    stage: Stage, dead: int, state: str, training: bool, is_here: bool
) -> None:
    """The launcher ends it for that one, on this machine or another, whose error is what is shown."""
    stage.stopping(others=[dead] if is_here else [], training=training)
    stage.tell(state, 0, "row 3")
    with pytest.raises(Stopped) as stopped:
        send(TERM)
    assert stopped.value.code == 1
    assert stage.told == (state, "row 3")
    assert stage.said == []


def test_an_error_of_the_network_is_one_of_the_process_that_is_gone(
    stage: Stage, dead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stopping, "SECONDS_TO_BE_GONE", 0.1)
    error = RuntimeError("Connection closed by peer [127.0.0.1]:4711")
    stage.stopping(others=[dead])
    assert stopping.is_for_want_of_another(error)
    assert not stopping.is_for_want_of_another(ValueError("row 3"))
    assert stopping.tell_loss() == 1
    assert stage.told == ("failed", LOST)
    stage.stopping(others=[os.getppid()])
    assert not stopping.is_for_want_of_another(error)


def test_a_stage_that_ended_leaves_handlers_timer_pipe_and_threads_as_they_were(stage: Stage) -> None:
    others = threading.enumerate()
    numbers = (*signals.SIGNALS, signal.SIGALRM)
    before = [signal.getsignal(number) for number in numbers]
    found = stage.stopping()
    [watcher] = set(threading.enumerate()) - set(others)
    send(TERM)
    found.close()
    found.close()
    assert [signal.getsignal(number) for number in numbers] == before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.set_wakeup_fd(-1) == -1
    watcher.join(60)
    assert not watcher.is_alive()  # it would end this process


def forked(function: Callable[[], object]) -> int:
    """A process that has called the function, and then waits."""
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        function()
        os.write(tell, b"1")
        sleep(20)
        os._exit(0)
    os.read(ready, 1)
    os.close(ready)
    os.close(tell)
    return child


def test_a_forked_helper_ends_of_a_signal_and_the_stage_does_not_hear_of_it(stage: Stage) -> None:
    found = stage.stopping()
    child = forked(lambda: None)
    os.kill(child, TERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -TERM
    sleep(0.1)
    assert (found.code, found._since) == (0, None)


def test_a_signal_that_a_forked_helper_handles_itself_is_not_heard_by_the_stage(stage: Stage) -> None:
    found = stage.stopping()
    child = forked(lambda: signal.signal(TERM, lambda *_: os._exit(7)))
    os.kill(child, TERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    sleep(0.1)
    assert (found.code, found._since) == (0, None)


def test_the_time_is_set_once_for_all_stages_and_changes_no_key(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("stop_within: 12\nsft: {data: d.jsonl, model: m}\nreward: {data: r.jsonl, stop_within: 5}\n")
    loaded = load_recipe(str(recipe))
    assert (loaded.sft.stop_within, loaded.reward.stop_within) == (12, 5)  # type: ignore[union-attr]
    assert "stop_within" not in SFTSettings(data="d.jsonl").result_settings()
    with pytest.raises(SettingsError, match="stop_within"):
        load_recipe(str(recipe), ["stop_within=0"])


def test_a_stage_that_asks_for_it_is_watched_before_it_trains(tmp_path: Path) -> None:
    looked = threading.Event()

    class Dog:
        interval = 0.01

        def start(self) -> None:
            pass

        def stood(self, seconds: float) -> None:
            pass

        def look(self, training: bool) -> None:
            if training:
                looked.set()

    dog: Any = Dog()
    ours = Stopping(tmp_path, 30, print, lambda *_: None, [], dog)
    ours.start()
    try:
        ours.watched = True
        assert looked.wait(10)
    finally:
        ours.close()
