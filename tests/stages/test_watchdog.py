"""Processes of a stage that write down where they are; who is named when one dies or hangs."""

import ast
import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import rlhf.stages
from rlhf.data.errors import Stopped
from rlhf.stages import stopping, watchdog
from rlhf.stages.processes import Processes
from rlhf.stages.stopping import LOST, Stopping, Tell
from rlhf.stages.watchdog import Place, Watchdog

HOST = socket.gethostname()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds since these processes began, which only the test moves on."""
    now = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watchdog.time, "time", lambda: 1000.0 + now[0])
    return now


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    yield
    watchdog._current = None


def some(folder: Path, number: int) -> list[Watchdog]:
    """Processes that train and have written down where they are."""
    found = [Watchdog(folder, rank, number, 100) for rank in range(number)]
    for each in found:
        each.start()
        assert each.look(training=True) is None
    return found


def test_a_process_writes_down_where_it_is(tmp_path: Path, clock: list[float]) -> None:
    ours, other = some(tmp_path, 2)
    clock[0] = 7.0
    other.move("the update", step=12)
    with other.collective("sum"):
        assert str(other._place) == "in the collective sum, no. 1, in the update after step 12"
    other.look(training=True)
    found = json.loads((tmp_path / "checkpoints" / "ranks" / "1.json").read_text())
    assert found == asdict(Place(1, HOST, os.getpid(), 1007.0, "the update", 12, "sum", False, 1, 1007.0))
    assert [str(place) for place in ours.places()] == [
        "in loading after step 0", "in the update after step 12, last collective sum, no. 1",
    ]  # fmt: skip


def test_a_stage_in_which_nobody_moves_stands_still_and_the_one_that_waits_for_nobody_is_named(
    tmp_path: Path, clock: list[float]
) -> None:
    ours, other = some(tmp_path, 2)
    clock[0] = 10.0
    ours.move("scoring", step=4)
    with ours.collective("max"), other.collective("max"):
        clock[0] = 20.0
        other.move("the update", step=4)
        for each in (ours, other):
            each.look(training=True)
        clock[0] = 119.9
        assert ours.look(training=True) is None
        clock[0] = 150.0
        assert other.look(training=True) is not None  # it ends itself where it still can
        said = ours.look(training=True)
    assert said == (
        f"it stands still: rank 1 (pid {os.getpid()} on {HOST}) has not moved for 2 min; it is in the update after "
        "step 4, last collective max (rank 0 is in the collective max, no. 1, in scoring after step 4); if it was at "
        "work, raise stop_hung_after, which is 100 seconds"
    )


def test_the_one_that_waits_for_nobody_tells_first_since_it_can_say_where_it_hangs(
    tmp_path: Path, clock: list[float]
) -> None:
    ours, other = some(tmp_path, 2)
    with ours.collective("max"):
        ours.look(training=True)
        clock[0] = 100.0 + ours.interval - 0.1
        assert ours.look(training=True) is None
        assert other.look(training=True) is not None
        clock[0] = 100.0 + ours.interval
        assert ours.look(training=True) is not None


def test_a_stage_that_was_stopped_as_a_whole_and_goes_on_does_not_stand_still(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a batch system stops a job, or Ctrl-Z one of a shell. 100 seconds without a move are a standstill."""
    ours, _other = some(tmp_path, 2)
    seconds = iter([1000.0, *[ours.interval] * 51])  # that waiting for a signal takes; that for the first is too long
    heard, end = os.pipe()
    told: list[float] = []

    def wait(*_: Any) -> tuple[list[int], list[int], list[int]]:
        clock[0] += next(seconds)
        return [heard] if told else [], [], []

    def tell(_: str) -> None:
        told.append(clock[0])
        os.write(end, b"\0")

    monkeypatch.setattr(stopping, "select", SimpleNamespace(select=wait))
    monkeypatch.setattr(stopping, "monotonic", lambda: clock[0])
    watched = Stopping(tmp_path, 30, print, tell_status(tmp_path), [], ours)
    watched.training = True
    monkeypatch.setattr(watched, "_end_standstill", tell)
    watched._watch(heard)
    os.close(end)
    assert told == [1000.0 + 98.0]  # 2 of the first 1000 seconds count


def test_a_slow_process_that_moves_is_waited_for(tmp_path: Path, clock: list[float]) -> None:
    ours, slow, third = some(tmp_path, 3)
    with ours.collective("sum"), third.collective("sum"):
        for minute in range(1, 60):
            clock[0] = 60.0 * minute
            slow.move("evaluation")
            for each in (slow, ours, third):
                assert each.look(training=True) is None


def test_before_there_is_a_training_state_nobody_looks_and_the_time_does_not_count(
    tmp_path: Path, clock: list[float]
) -> None:
    ours, _ = some(tmp_path, 2)
    for hour in range(6):
        clock[0] = 3600.0 * hour
        assert ours.look(training=False) is None
    clock[0] += 99
    assert ours.look(training=True) is None
    clock[0] += 2
    assert ours.look(training=True) is not None


@contextmanager
def fewer_collectives(ours: Watchdog, other: Watchdog, clock: list[float]) -> Iterator[None]:
    """On a GPU a process goes through collectives and waits later, where it wants a number."""
    for each in (ours, other):
        each.move("the update", step=4)
        with each.collective("sum"):
            pass
    with ours.collective("gradients"), ours.collective("max"):
        pass
    clock[0] = 20.0
    other.move("the update")
    yield


@contextmanager
def a_step_less(ours: Watchdog, other: Watchdog, clock: list[float]) -> Iterator[None]:
    """However many collectives it went into."""
    with other.collective("sum"):
        pass
    ours.move(step=1)
    yield


@contextmanager
def at_work_in_the_same_collective(ours: Watchdog, other: Watchdog, clock: list[float]) -> Iterator[None]:
    """What a process does by itself within a collective is no waiting."""
    with ours.collective("checkpoint"), other.collective("checkpoint"), watchdog.at_work():  # the last that started
        yield


@pytest.mark.parametrize(
    ("so_far", "said_of_both"),
    [
        (
            fewer_collectives,
            "in the update after step 4, last collective sum, no. 1 (rank 0 is in the update after step 4, last "
            "collective max, no. 3)",
        ),
        (a_step_less, "in loading after step 0, last collective sum, no. 1 (rank 0 is in loading after step 1)"),
        (
            at_work_in_the_same_collective,
            "in loading after step 0, last collective checkpoint, no. 1 (rank 0 is in the collective checkpoint, "
            "no. 1, in loading after step 0)",
        ),
    ],
)
def test_the_one_that_the_others_wait_for_is_named(
    tmp_path: Path,
    clock: list[float],
    so_far: Callable[[Watchdog, Watchdog, list[float]], AbstractContextManager[None]],
    said_of_both: str,
) -> None:
    ours, other = some(tmp_path, 2)
    with so_far(ours, other, clock):
        for now in (20.0, 123.0):
            clock[0] = now
            other.look(training=True)
            said = ours.look(training=True)
    assert said is not None
    assert said.startswith("it stands still: rank 1 (pid")
    assert f"; it is {said_of_both}; if it was at work" in said
    assert not ours._place.waits


def test_a_process_that_does_not_write_any_more_is_named_before_one_that_came_less_far_and_it_alone_is_silent(
    tmp_path: Path, clock: list[float]
) -> None:
    ours, stopped, slow = some(tmp_path, 3)
    with stopped.collective("sum"), ours.collective("sum"):
        stopped.look(training=True)
        clock[0] = 10.0
        ours.move("saving", step=1)
        for now in (10.0, 74.9, 113.0):
            clock[0] = now
            for each in (slow, ours):
                said = each.look(training=True)
            assert ours.silent_here() == ([os.getpid()] if now == 113.0 else [])
    assert said is not None
    assert said.startswith(
        f"it stands still: rank 1 (pid {os.getpid()} on {HOST}) gave its last sign of life 113 s ago"
    )
    assert "it was in the collective sum, no. 1, in loading after step 0 (rank 0 is in saving after step 1" in said


def test_a_phase_that_begins_after_an_error_in_a_collective_is_no_waiting(tmp_path: Path) -> None:
    (ours,) = some(tmp_path, 1)
    with pytest.raises(MemoryError), ours.collective("gradients"):
        raise MemoryError
    assert ours._place.waits  # for the message of the error
    ours.move("the update")
    assert not ours._place.waits


def test_where_all_wait_each_collective_is_told(tmp_path: Path, clock: list[float]) -> None:
    ours, other = some(tmp_path, 2)
    with ours.collective("sum"), other.collective("barrier"):
        for each in (ours, other):
            each.look(training=True)
        clock[0] = 103.0
        other.look(training=True)
        said = ours.look(training=True)
    assert said is not None
    assert "which process is waited for cannot be told, for some came equally far: rank 0 (pid" in said
    assert "it is in the collective sum" in said
    assert "rank 1 is in the collective barrier" in said


def test_of_many_processes_those_that_only_wait_are_not_listed(tmp_path: Path, clock: list[float]) -> None:
    many = some(tmp_path, 16)
    for each in many:
        if each is not many[9]:
            each.collective("sum").__enter__()
        each.look(training=True)
    clock[0] = 103.0
    for each in many:
        said = each.look(training=True)
    assert said is not None
    assert said.startswith("it stands still: rank 9 (pid")
    assert "(the others wait)" in said


def test_where_a_process_cannot_be_heard_of_nobody_is_ended(tmp_path: Path, clock: list[float]) -> None:
    ours, _ = some(tmp_path, 2)
    (tmp_path / "checkpoints" / "ranks" / "1.json").unlink()
    clock[0] = 200.0
    assert ours.look(training=True) is None
    (tmp_path / "checkpoints" / "ranks").rename(tmp_path / "gone")  # as a full disk
    ours.move("saving")
    for now in (300.0, 500.0):
        clock[0] = now
        assert ours.look(training=True) is None


def fail(error: Exception) -> Callable[..., None]:
    def failing(*_: Any, **__: Any) -> None:
        raise error

    return failing


@pytest.mark.parametrize("what", ["mkdir", "write_text", "replace"])
def test_where_a_process_cannot_write_where_it_is_it_says_so_once_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """And writes again as soon as it can. The folder may be impossible to make, a file to write or to put in place."""
    ours = Watchdog(tmp_path, 1, 2, 100)
    path = {"mkdir": ours.folder}.get(what, ours.folder / "1.json")
    with monkeypatch.context() as patch:
        error = OSError(errno.ENOSPC, "No space left on device", *([str(path)] if what == "mkdir" else []))
        patch.setattr(os if what == "replace" else Path, what, fail(error))
        ours.start()
        for _ in range(3):
            assert ours.look(training=True) is None
    assert capsys.readouterr().out == (
        f"warning: rank 1 (pid {os.getpid()} on {HOST}) cannot write where it is: {path}: No space left on device; "
        "make room there; until it can, those that wait for it longer than stop_hung_after take it for one that hangs\n"
    )
    ours.folder.mkdir(parents=True, exist_ok=True)
    assert ours.look(training=True) is None
    assert [place.rank for place in ours.places()] == [1]
    assert capsys.readouterr().out == ""


def test_a_folder_that_goes_while_training_is_told_but_not_at_the_end_of_a_stage_that_removes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, other = some(tmp_path, 2)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "manifest.json").touch()
    assert ours.look(training=True) is None
    assert capsys.readouterr().out == ""
    (tmp_path / "manifest.json").unlink()
    for _ in range(2):
        assert other.look(training=True) is None
    (line,) = capsys.readouterr().out.splitlines()
    where = (
        f"{tmp_path / 'checkpoints' / 'ranks' / '1.json'}: No such file or directory; look whether its folder is there"
    )
    assert line.startswith(f"warning: rank 1 (pid {os.getpid()} on {HOST}) cannot write where it is: {where}; ")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file or directory; look whether its folder is there"),
        ("", "JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
        ("[]", "TypeError: "),
    ],
)
def test_in_a_standstill_of_which_a_file_cannot_be_read_that_is_said_once_and_nobody_is_ended(
    tmp_path: Path, clock: list[float], capsys: pytest.CaptureFixture[str], content: str | None, why: str
) -> None:
    """No sooner: the others may go on."""
    ours, _, third = some(tmp_path, 3)
    path = tmp_path / "checkpoints" / "ranks" / "1.json"
    path.unlink() if content is None else path.write_text(content)
    clock[0] = 60.0
    third.move("saving")
    for now in (60.0, 110.0):
        clock[0] = now
        for each in (third, ours):
            assert each.look(training=True) is None
    assert capsys.readouterr().out == ""
    for now in (160.0, 170.0):
        clock[0] = now
        assert ours.look(training=True) is None
    (line,) = capsys.readouterr().out.splitlines()
    begin = (
        f"warning: rank 0 (pid {os.getpid()} on {HOST}) has not moved for 3 min, and which process hangs cannot be told"
    )
    assert line.startswith(f"{begin}: {path}: {why}")
    assert line.endswith("; it goes on waiting")


def test_a_warning_that_cannot_be_written_either_breaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkpoints").write_text("a file in the way")
    for number, error in enumerate(
        (OSError(errno.ENOSPC, "No space left on device"), ValueError("I/O operation on closed file"))
    ):
        monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=fail(error), flush=fail(error)))
        found = Watchdog(tmp_path, number, 2, 100)
        found.start()
        assert found.look(training=True) is None


def test_code_that_knows_of_no_watchdog_tells_the_one_that_is_there(tmp_path: Path) -> None:
    watchdog.moved("sampling")
    with watchdog.collective("sum"):
        pass
    assert watchdog.here() == ""
    found = Watchdog(tmp_path, 1, 2, 100)
    found.start()
    watchdog.moved("sampling")
    watchdog.moved(step=3)
    with watchdog.collective("max"):
        pass
    assert watchdog.here() == " (rank 1 of 2, in sampling after step 3, last collective max, no. 1)"


def test_the_one_that_died_is_named_with_what_it_was_doing(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    told: list[tuple[str, str]] = []
    ours, other = some(tmp_path, 2)
    other._place = Place(1, HOST, process.pid, time.time(), "scoring", 2, "sum")
    ours.move("the update", step=4)
    other.look(training=False)
    found = Stopping(tmp_path, 30, print, lambda state, step, text, code=None: told.append((state, text)),
                     [process.pid], ours)  # fmt: skip
    found.code = 143
    found.start()
    with pytest.raises(Stopped) as stopped:
        found.leave()
    stopping.close()
    assert stopped.value.code == 1
    name = f"rank 1 (pid {process.pid} on {HOST}), last seen 0 s ago in scoring after step 2, last collective sum"
    assert told == [("failed", f"{LOST} It was {name}; left is rank 0 of 2, in the update after step 4")]


def test_a_process_that_stands_still_ends_itself_and_says_where_in_the_code_it_is(tmp_path: Path) -> None:
    """The others hang too; whole runs are in tests/faults/test_ranks.py."""
    child = os.fork()
    if child == 0:
        try:
            os.dup2(os.open(tmp_path / "said", os.O_CREAT | os.O_WRONLY), 2)
            ours, other = Watchdog(tmp_path, 0, 2, 0.4), Watchdog(tmp_path, 1, 2, 0.4)
            other.start()
            found = Stopping(tmp_path, 30, print, tell_status(tmp_path), [], ours)
            found.start()
            with ours.collective("sum"):
                found.training = True
                time.sleep(60)
        finally:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    told = json.loads((tmp_path / "status.json").read_text())
    assert told["state"] == "failed"
    assert told["message"].startswith(f"it stands still: rank 1 (pid {child} on {HOST}) gave its last sign of life ")
    assert "(rank 0 is in the collective sum, no. 1, in loading after step 0)" in told["message"]
    said = (tmp_path / "said").read_text()
    assert said.startswith(told["message"])
    assert "in test_a_process_that_stands_still" in said


def tell_status(folder: Path) -> Tell:
    def tell(state: str, step: int, message: str, code: int | None = None) -> None:
        (folder / "status.json").write_text(json.dumps({"state": state, "message": message}))

    return tell


def test_a_process_waits_for_the_others_in_the_last_backward_pass_of_a_step_and_not_in_the_forward_pass_before_it(
    tmp_path: Path, clock: list[float]
) -> None:
    some(tmp_path, 2)
    waits: list[bool] = []

    def note(_: torch.Tensor | None = None) -> None:
        assert watchdog._current is not None
        waits.append(watchdog._current._place.waits)

    accelerator: Any = SimpleNamespace(
        device=torch.device("cpu"), process_index=1, num_processes=2, is_main_process=False,
        no_sync=lambda _: nullcontext(), backward=note,
    )  # fmt: skip
    processes = Processes(accelerator)
    for _ in processes.accumulate([[0], [1], [2]], torch.nn.Linear(1, 1)):
        note()
        processes.backward(torch.ones(()))
    assert waits == [False, False, False, False, False, True]
    assert watchdog.here() == " (rank 1 of 2, in loading after step 0, last collective gradients, no. 1)"


WAITING = re.compile(
    r"(dist|distributed|accelerator)\.(all_|gather|reduce|broadcast|scatter|barrier|send|recv|wait_for|pad_across|backward)"
    r"|(gather_object|broadcast_object_list|full_tensor|unshard|clip_grad_norm_|write_together|read_together)$"
)
"""Calls in which a process waits for the others."""


def unmarked(node: ast.AST) -> Iterator[int]:
    """Lines of such calls that stand in no `with collective(…)`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.With) and any(
            re.search(r"collective\(|reducing\(", ast.unparse(item)) for item in child.items
        ):
            continue
        if isinstance(child, ast.Call) and WAITING.search(ast.unparse(child.func)):
            yield child.lineno
        yield from unmarked(child)


def test_no_process_waits_for_the_others_without_saying_so() -> None:
    """One that does would be taken for one at work, and be named in the place of the one that it waits for."""
    root = Path(next(iter(rlhf.stages.__path__)))
    files = {path.relative_to(root): ast.parse(path.read_text(encoding="utf-8")) for path in root.rglob("*.py")}
    assert any(str(path) == "processes.py" for path in files)
    assert [f"stages/{path}:{line}" for path, tree in files.items() for line in unmarked(tree)] == []
