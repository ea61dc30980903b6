"""A stage goes on with another number of processes: the same rows in each step, none twice, none left out."""

import io
import json
import os
import signal
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from processes_world import in_two_processes
from resume_world import STEPS, make_world, rows, run_and_watch, watch
from safetensors.torch import load_file
from stages_world import run_stage

from rlhf.data.errors import Stopped
from rlhf.stages.artifact import STAGES, Artifact
from rlhf.stages.checkpoints import newest_checkpoint

END_AFTER = 7  # inside the second of three epochs
STOPPED = ("sft", "reward")  # that read late of a signal


@dataclass
class Found:
    """What the processes took in each step, by stage, and what they said."""

    alone: dict[str, list[Any]] = field(default_factory=dict)
    two_then_one: dict[str, list[Any]] = field(default_factory=dict)
    one_then_two: dict[str, list[Any]] = field(default_factory=dict)
    said: str = ""
    stopped: list[dict[str, tuple[int, int]]] = field(default_factory=list)
    """Of each of two processes, by stage: the exit code, and how many steps it had made."""


class Signalled(list[Any]):
    """Sends this process a signal when it begins the fourth step."""

    def append(self, item: Any) -> None:
        super().append(item)
        if len(self) == 4:
            os.kill(os.getpid(), signal.SIGTERM)


def stop_in_step_4(stage: str, folder: Path, fields: dict[str, Any], rank: int) -> tuple[int, int]:
    """The stage until it ends, because one process got a signal."""
    seen: list[Any] = Signalled() if rank == 1 else []
    seldom = {name: STEPS for name in ("log_every", "eval_every") if name in fields}
    with pytest.MonkeyPatch.context() as patch:
        watch(stage, patch, seen)
        with pytest.raises(Stopped) as stopped:
            run_stage(stage, folder, save_every=STEPS, **{**fields, **seldom})
    return stopped.value.code, len(seen)


def process(rank: int, root: Path, world: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One of two: the first steps of some folders, the last steps of others."""
    first = {stage: run_and_watch(stage, root / "fewer" / stage, world[stage], END_AFTER) for stage in STAGES}
    last = {stage: run_and_watch(stage, root / "more" / stage, world[stage]) for stage in STAGES}
    stopped = {stage: stop_in_step_4(stage, root / "stopped" / stage, world[stage], rank) for stage in STOPPED}
    return [first, last, stopped]


def together(both: list[dict[str, list[Any]]], stage: str) -> list[Any]:
    """The rows that two processes took in each step."""
    return [sorted(a + b) for a, b in zip(both[0][stage], both[1][stage], strict=True)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def found(root: Path) -> Found:
    world = make_world(root / "world", "llama", dropout=0.0)
    found, said = Found(), io.StringIO()
    for stage in STAGES:
        found.alone[stage] = run_and_watch(stage, root / "alone" / stage, world[stage])
        found.one_then_two[stage] = run_and_watch(stage, root / "more" / stage, world[stage], END_AFTER)
    first, last, found.stopped = zip(*in_two_processes(root, process, root, world), strict=True)
    for stage in STAGES:
        with redirect_stdout(said):
            rest = run_and_watch(stage, root / "fewer" / stage, world[stage])
        found.two_then_one[stage] = together(first, stage) + rest
        found.one_then_two[stage] += together(last, stage)
    found.said = said.getvalue()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_each_step_takes_the_rows_that_one_process_takes(found: Found, stage: str) -> None:
    assert len(found.alone[stage]) == STEPS
    assert found.two_then_one[stage] == found.alone[stage]
    assert found.one_then_two[stage] == found.alone[stage]


@pytest.mark.parametrize("folder", ["fewer", "more"])
@pytest.mark.parametrize("stage", ["pretrain", "sft", "reward"])
def test_without_dropout_the_result_is_that_of_one_process(found: Found, root: Path, stage: str, folder: str) -> None:
    ours, theirs = (load_file(root / name / stage / "model" / "model.safetensors") for name in (folder, "alone"))
    for name, weights in theirs.items():
        torch.testing.assert_close(ours[name], weights, rtol=1e-5, atol=1e-5)
    for one, other in zip(rows(root / folder / stage), rows(root / "alone" / stage), strict=True):
        assert one == pytest.approx(other, rel=1e-5)


@pytest.mark.parametrize("folder", ["fewer", "more"])
def test_ppo_ends_with_all_its_rows_of_metrics(found: Found, root: Path, folder: str) -> None:
    assert [row["step"] for row in Artifact(root / folder / "ppo").metrics] == [3, 5, 6, 9, 10, 12, 15]


@pytest.mark.parametrize("stage", STAGES)
def test_that_random_numbers_differ_is_said_in_one_line(found: Found, stage: str) -> None:
    lines = [line for line in found.said.splitlines() if line.startswith(f"{stage}: ") and "random numbers" in line]
    assert lines == [
        f"{stage}: step 7 was saved by 2 process(es) on cpu and goes on with 1 on cpu: each step takes the rows that "
        "it would have taken, random numbers (sampling, dropout) differ"
    ]


@pytest.mark.parametrize("stage", STOPPED)
def test_a_signal_to_one_process_ends_all_after_the_same_step_and_that_step_is_saved(
    found: Found, root: Path, stage: str
) -> None:
    """The fourth step tells of it, and is read after the fifth."""
    assert [of_rank[stage] for of_rank in found.stopped] == [(143, 5), (143, 5)]
    status = json.loads((root / "stopped" / stage / "status.json").read_text())
    assert (status["state"], status["step"]) == ("stopped", 5)
    saved = newest_checkpoint(root / "stopped" / stage)
    assert saved is not None
    assert saved.step == 5
