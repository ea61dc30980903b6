"""Numbers of steps are read a step later, and all processes learn after the same step that one was asked to end."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlhf.stages import late as late_module
from rlhf.stages.late import Late
from rlhf.stages.runtime import Runtime


class Run(Runtime[Any]):
    """One of `num` processes; `told` is what the others add to the two flags of a step."""

    def __init__(self, num: int) -> None:
        self.num_processes, self.device = num, torch.device("cpu")
        self.settings, self.stopping = SimpleNamespace(stop_within=30), SimpleNamespace(code=0)
        self.told = torch.zeros(2)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.told if self.num_processes > 1 else values


def made(late: Late, step: int, all_steps: bool = False) -> list[int]:
    """Make a step; those that are read after it."""
    late.add(step, {"loss": torch.tensor(step / 2), "grad_norm": torch.tensor(1)})
    read = list(late.read(all_steps))
    assert all(numbers == {"loss": step / 2, "grad_norm": 1} for step, numbers in read)
    return [step for step, _ in read]


def test_all_steps_but_the_last_are_read_unless_all_are_asked_for() -> None:
    for num in (1, 2):
        reader = Late(Run(num))
        assert [made(reader, 1), made(reader, 2), made(reader, 3, all_steps=True), made(reader, 4)] == [
            [], [1], [2, 3], [],
        ]  # fmt: skip
        assert not reader.must_end


def test_a_process_alone_ends_after_the_step_in_which_it_was_asked_to() -> None:
    run = Run(1)
    reader = Late(run)
    assert made(reader, 1) == []
    run.stopping.code = 143
    assert made(reader, 2) == [1, 2]
    assert reader.must_end


@pytest.mark.parametrize("asked", ["this one", "another"])
def test_several_processes_end_when_the_step_that_told_of_it_is_read(asked: str) -> None:
    run = Run(2)
    reader = Late(run)
    assert made(reader, 1) == []
    if asked == "this one":
        run.stopping.code = 143
    else:
        run.told[0] = 1
    assert made(reader, 2) == [1]
    assert not reader.must_end  # the other has not heard of it before this step's numbers are there
    run.told[0] = 0
    assert made(reader, 3) == [2, 3]
    assert reader.must_end


def test_where_four_steps_would_not_end_in_time_each_is_read_at_once_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 30 seconds 24 are to finish what is under way: 6 for a step."""
    clock = [0.0]
    monkeypatch.setattr(late_module, "monotonic", lambda: clock[0])
    run = Run(2)
    reader, read = Late(run), []
    for step, seconds in enumerate((5.9, 5.9, 6.1, 5.9, 5.9, 5.9), start=1):
        clock[0] += seconds
        read.append(made(reader, step))
    assert read == [[], [1], [2], [3, 4], [], [5]]
    run.told[1] = 1  # another process was slow
    assert [made(reader, 7), made(reader, 8)] == [[6], [7, 8]]
    alone = Late(Run(1))
    clock[0] += 100
    assert [made(alone, 1), made(alone, 2)] == [[], [1]]
