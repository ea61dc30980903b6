"""A stage that was ended and goes on is, bit for bit, one that was not; also inside a later epoch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from resume_world import STEPS, make_world, rows, run_and_watch, weights

from rlhf.stages.artifact import STAGES, Artifact

World = dict[str, dict[str, Any]]
Unbroken = dict[str, tuple[Path, list[Any]]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Settings of the four stages; the models have dropout, so that random numbers count."""
    return make_world(tmp_path_factory.mktemp("world"), "gpt2", dropout=0.2)


@pytest.fixture(scope="module")
def unbroken(world: World, tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    """Each stage's folder after a run that nothing disturbed, and the rows of its steps."""
    root = tmp_path_factory.mktemp("unbroken")
    return {stage: (root / stage, run_and_watch(stage, root / stage, world[stage])) for stage in STAGES}


@pytest.mark.parametrize("stage", ["sft", "reward", "ppo"])  # pretrain cuts its text elsewhere in each epoch
def test_each_of_three_epochs_sees_each_row_once(unbroken: Unbroken, stage: str) -> None:
    steps = unbroken[stage][1]
    assert len(steps) == STEPS
    epochs = [sorted(row for step in steps[first : first + 5] for row in step) for first in (0, 5, 10)]
    assert epochs[0] == epochs[1] == epochs[2]
    assert len({str(row) for row in epochs[0]}) == 10


@pytest.mark.parametrize("end_after", [5, 7, 14])  # at 5 an epoch ends and an evaluation is made
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_that_goes_on_unpickles_nothing_freely_takes_the_same_rows_and_ends_with_the_same_bits(
    world: World, unbroken: Unbroken, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, end_after: int
) -> None:
    folder, taken = unbroken[stage]
    run_and_watch(stage, tmp_path / stage, world[stage], end_after)
    assert not Artifact(tmp_path / stage).sealed
    load, asked = torch.load, []

    def noting(*arguments: Any, **options: Any) -> Any:
        asked.append(options.get("weights_only"))
        return load(*arguments, **options)

    monkeypatch.setattr(torch, "load", noting)
    assert run_and_watch(stage, tmp_path / stage, world[stage]) == taken[end_after:]
    assert set(asked) == {True}  # for random states
    assert weights(tmp_path / stage) == weights(folder)
    assert rows(tmp_path / stage) == rows(folder)
