"""Models in recipes: named as a run, a stage, a folder or a hub id, they are what commands take them for."""

from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from pipeline_world import FakeStages

from rlhf.data.errors import SettingsError
from rlhf.pipeline.estimate import estimate
from rlhf.pipeline.plan import make_plan
from rlhf.pipeline.recipe import load_recipe
from rlhf.pipeline.references import loadable, model_at

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(world: Path, stages: FakeStages, rlhf: Call) -> Path:
    """A run that got as far as the reward model."""
    assert rlhf("run", "recipe.yaml", "--to", "reward", "--run-dir", "run")[0] == 0
    return Path("run")


@pytest.fixture
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(url: str) -> None:
        raise OSError("no route")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)


def test_a_stage_starts_from_a_run_or_a_stage_as_from_its_model(run: Path) -> None:
    (sft,), (reward,) = run.glob("sft-*"), run.glob("reward-*")
    words = ["ppo.model=run", "ppo.reward_model=run", f"reward.model={sft}", f"reward.compare_with=[{reward},run]"]
    words += ["ppo.rewards=[{model: run, weight: 2.0}]"]
    steps = {step.stage: step.settings for step in make_plan(load_recipe("recipe.yaml", words), Path("new"))}
    ppo, rewards = steps["ppo"], steps["reward"]
    assert ppo is not None
    assert rewards is not None
    assert ppo.inputs() == {
        "model": str(sft / "model"), "reward_model": str(reward / "model"), "rewards.0": str(reward / "model"),
    }  # fmt: skip
    assert rewards.inputs() == {"model": str(sft / "model")}
    assert rewards.model_dump()["compare_with"] == [str(reward / "model")] * 2
    assert ppo.model_dump()["rewards"][0]["weight"] == 2


def test_which_model_is_meant_by_a_run_is_said_once(run: Path, rlhf: Call) -> None:
    (sft,), (reward,) = run.glob("sft-*"), run.glob("reward-*")
    words = ("recipe.yaml", "pretrain=null", "sft.model=run", "ppo.reward_model=run", "--run-dir", "new")
    notes = [f"sft: starts from {sft}/model", f"ppo: its reward_model is {reward}/model"]
    for command in ("plan", "run"):
        code, out, _ = rlhf(command, *words)
        assert code == 0
        assert [line for line in out.splitlines() if str(run) + "/" in line] == notes
    for again in (words, ("recipe.yaml", f"sft.model={sft}/model", *words[3:])):  # reused; and named by itself
        assert "starts from" not in rlhf("plan", *again)[1]


def test_what_is_no_model_is_told_by_the_setting(run: Path) -> None:
    for words, message in (
        ("ppo.model=runs/gone", "ppo.model: no folder 'runs/gone'"),
        ("reward.compare_with=[./gone]", "reward.compare_with: no folder './gone'"),
        ("sft.model=run/gone", r"sft.model: no folder 'run/gone'; run has pretrain-"),
    ):
        with pytest.raises(SettingsError, match=message):
            make_plan(load_recipe("recipe.yaml", [words]), Path("new"))


def test_how_far_an_unfinished_stage_is_tells_a_command_to_copy(world: Path) -> None:
    folder = Path("my run/sft-0123abcd")
    folder.mkdir(parents=True)
    (folder / "settings.yaml").touch()
    with pytest.raises(SettingsError, match="this stage is not finished; `rlhf status 'my run'` shows how far it is"):
        model_at(str(folder), ("sft",))


@pytest.mark.usefixtures("_no_hub")
def test_the_hub_is_asked_before_anything_is_trained(world: Path, stages: FakeStages, rlhf: Call) -> None:
    words = ("recipe.yaml", "sft.model=models/llama", "--run-dir", "new")
    told = "sft.model: no folder 'models/llama' here, and the hub could not be reached (no route)"
    code, out, err = rlhf("run", *words)
    assert (code, out, err) == (2, "", f"error: {told}\n")
    assert (stages.trained, Path("new").exists()) == ([], False)
    with pytest.raises(SettingsError, match="and the hub could not be reached"):
        estimate(load_recipe("recipe.yaml", words[1:2]))
    with pytest.raises(SettingsError, match="and the hub could not be reached"):
        loadable("models/llama", ("sft",))
    code, out, _ = rlhf("plan", *words)  # which asks nobody, and says so
    assert code == 0
    assert "sft.model: no folder models/llama here, so it is a hub id; `rlhf run` asks the hub" in out
