"""Which model is meant by a run, a stage, a folder or a hub id."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_world import FakeStages

from rlhf.data.errors import SettingsError
from rlhf.pipeline.references import POLICIES, model_at

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(world: Path, stages: FakeStages, rlhf: Call) -> Path:
    """A run that got as far as the reward model."""
    assert rlhf("run", "recipe.yaml", "--to", "reward", "--run-dir", "run")[0] == 0
    return Path("run")


def test_of_a_run_it_is_the_newest_of_the_last_finished_stage(run: Path) -> None:
    (sft,) = run.glob("sft-*")
    (reward,) = run.glob("reward-*")
    assert model_at("run", POLICIES) == str(sft / "model")
    assert model_at("run", ["reward"]) == str(reward / "model")


def test_of_a_stage_it_is_its_model_and_a_model_is_itself(run: Path) -> None:
    (sft,) = run.glob("sft-*")
    assert model_at(str(sft), POLICIES) == model_at(str(sft / "model"), POLICIES) == str(sft / "model")
    assert model_at("owner/name", POLICIES) == "owner/name"


def test_what_holds_no_model_is_refused_by_what_it_is(run: Path) -> None:
    (sft,) = run.glob("sft-*")
    (sft / "manifest.json").unlink()
    Path("empty").mkdir()
    for reference, message in (
        (str(sft), "this stage is not finished; `rlhf status run`"),
        ("empty", "holds no config.json"),
        ("./nowhere", "no folder './nowhere'"),
        ("a/b/c", "no folder 'a/b/c'"),
        ("runs/none", "no folder 'runs/none'"),  # which could be a hub id, too
        ("text.jsonl", "text.jsonl is a file"),
    ):
        with pytest.raises(SettingsError, match=message):
            model_at(reference, POLICIES)
