"""What is told of a long wait where there is no terminal; with one, see test_welcome.py."""

import re
from threading import Condition, Event

import pytest

from rlhf.pipeline import progress
from rlhf.pipeline.progress import telling


class Told:
    """Progress lines, and a way to wait for one."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._came = Condition()

    def say(self, line: str) -> None:
        with self._came:
            self.lines.append(line)
            self._came.notify_all()

    def wait_for(self, beginning: str, times: int = 1) -> None:
        with self._came:
            assert self._came.wait_for(
                lambda: sum(line.startswith(beginning) for line in self.lines) >= times, timeout=60
            )


def test_without_a_terminal_lines_tell_now_and_then_where_it_is_as_long_as_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while nothing new is told; and none after the end."""
    monkeypatch.setattr(progress, "PATIENCE", 0.001)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.001)
    monkeypatch.setattr(progress, "SECONDS_TO_END", 60.0)
    told = Told()
    with telling("loading", told.say) as tell:
        told.wait_for("loading, ")
        tell("base: 0 of 512 answers")
        told.wait_for("base: 0 of 512 answers, ", times=3)
    number = len(told.lines)
    tell("over")
    assert len(told.lines) == number
    assert re.fullmatch(r"base: 0 of 512 answers, \d+\.\d s so far", told.lines[-1])


def test_what_is_over_before_its_time_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 60.0)
    told = Told()
    with telling("loading", told.say) as tell:
        tell("base: 0 of 512 answers")
    assert told.lines == []


@pytest.mark.parametrize(
    "error", [BrokenPipeError(), OSError(28, "No space left on device"), ValueError("I/O operation on closed file.")]
)
def test_lines_that_cannot_be_written_disturb_nothing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A thread that died of it would say so with a traceback."""
    monkeypatch.setattr(progress, "PATIENCE", 0.001)
    tried = Event()

    def say(line: str) -> None:
        tried.set()
        raise error

    with telling("loading", say):
        assert tried.wait(60)


def test_a_reader_that_stands_still_keeps_nothing_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.001)
    monkeypatch.setattr(progress, "SECONDS_TO_END", 0.001)
    begun, read_on, written = Event(), Event(), Event()

    def say(line: str) -> None:
        begun.set()
        read_on.wait(60)
        written.set()

    with telling("loading", say):
        assert begun.wait(60)
    assert not written.is_set()
    read_on.set()
