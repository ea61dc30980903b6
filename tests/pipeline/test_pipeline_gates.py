"""Bars for the reward model: a run stops before ppo where it fails one, whether it was trained now or reused."""

import json
from pathlib import Path
from typing import Any

import pytest
from pipeline_world import FakeStages, contents

from rlhf.data.errors import SettingsError
from rlhf.pipeline import cli, runner
from rlhf.pipeline.errors import RunFailed
from rlhf.pipeline.gates import failures
from rlhf.pipeline.plan import Scope
from rlhf.pipeline.recipe import load_recipe
from rlhf.stages.artifact import identify
from rlhf.stages.reward.config import RewardSettings

RUN = Path("run")
METRICS = {"accuracy": 0.6, "longer_wins_accuracy": 0.5}


@pytest.fixture(autouse=True)
def reward_model(stages: FakeStages) -> None:
    """It orders 60 % of the held-out pairs rightly, where their lengths alone would order 50 %."""
    stages.metrics["reward"] = METRICS


def run(*overrides: str, scope: Scope | None = None) -> None:
    runner.run(load_recipe("recipe.yaml", overrides), RUN, scope, lambda text: None)


def summary() -> dict[str, dict[str, Any]]:
    stages: dict[str, dict[str, Any]] = json.loads((RUN / "summary.json").read_text())["stages"]
    return stages


def settings(**fields: Any) -> RewardSettings:
    return RewardSettings.load({"data": "rankings.jsonl", **fields}, "reward")


def test_a_reward_model_below_the_bar_is_kept_and_ppo_is_not_started(world: Path, stages: FakeStages) -> None:
    with pytest.raises(RunFailed, match=r"^ppo: not started.*accuracy 0\.6 is below reward\.min_accuracy 0\.7 .*lower"):
        run("reward.min_accuracy=0.7")
    assert stages.trained == ["pretrain", "sft", "reward"]
    assert [entry["status"] for entry in summary().values()] == ["done", "done", "done", "planned"]
    assert (RUN / summary()["reward"]["folder"] / "manifest.json").is_file()
    assert stages.reports == 1  # it shows what the model gets wrong


def test_a_lowered_bar_goes_on_without_training_the_reward_model_again(world: Path, stages: FakeStages) -> None:
    with pytest.raises(RunFailed):
        run("reward.min_accuracy=0.7")
    with pytest.raises(RunFailed, match=r"below reward\.min_accuracy 0\.65"):
        run("reward.min_accuracy=0.65")
    run("reward.min_accuracy=0.6")
    assert stages.trained == ["pretrain", "sft", "reward", "ppo"]
    assert "gates_failed" not in summary()["reward"]["metrics"]


def test_a_raised_bar_fails_a_finished_run_and_changes_no_result(world: Path, stages: FakeStages) -> None:
    run()
    before = contents(RUN)
    with pytest.raises(RunFailed):
        run("reward.min_accuracy=0.7")
    assert stages.trained == ["pretrain", "sft", "reward", "ppo"]
    after = contents(RUN)
    changed = {Path(path).name for path in before if before[path] != after[path]}
    assert changed == {"summary.json", "recipe.yaml", "report.html"}


def test_a_failed_run_that_is_run_again_fails_again_and_changes_no_file(world: Path, stages: FakeStages) -> None:
    for _ in range(2):
        with pytest.raises(RunFailed):
            run("reward.min_accuracy=0.7")
        before = contents(RUN)
    with pytest.raises(RunFailed):
        run("reward.min_accuracy=0.7")
    assert contents(RUN) == before


def test_ppo_alone_is_held_back_too_and_a_run_that_ends_before_ppo_is_not(world: Path, stages: FakeStages) -> None:
    run("reward.min_accuracy=0.7", scope=Scope(last="reward"))
    assert summary()["reward"]["metrics"]["gates_failed"]
    with pytest.raises(RunFailed):
        run("reward.min_accuracy=0.7", scope=Scope(first="ppo"))
    assert stages.trained == ["pretrain", "sft", "reward"]


def test_the_lead_over_longer_wins_is_a_bar_of_its_own() -> None:
    (told,) = failures(settings(min_over_longer_wins=0.2), {"accuracy": 0.75, "longer_wins_accuracy": 0.625})
    assert told == (
        "held-out accuracy 0.75 is 0.125 above longer_wins_accuracy 0.625, less than reward.min_over_longer_wins 0.2"
    )
    assert len(failures(settings(min_accuracy=0.8, min_over_longer_wins=0.2), METRICS)) == 2


def test_a_bar_that_is_just_met_is_passed() -> None:
    assert failures(settings(min_accuracy=0.6, min_over_longer_wins=0.1), METRICS) == []  # 0.6 - 0.5 < 0.1 in floats
    assert failures(settings(), METRICS) == []


def test_bars_are_shares_and_no_part_of_the_key(world: Path) -> None:
    with pytest.raises(SettingsError, match=r"reward\.min_accuracy"):
        settings(min_accuracy=70)
    one, other = (settings(model="hub/model", **bar) for bar in ({}, {"min_accuracy": 0.7, "compare_with": ["a/b"]}))
    assert identify(one).key == identify(other).key


def test_the_command_line_ends_with_code_1_and_status_says_which_gate(
    world: Path, stages: FakeStages, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "recipe.yaml", "reward.min_accuracy=0.7", "--run-dir", "run"])
    assert ended.value.code == 1
    assert "error: ppo: not started" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["status", "run"])
    assert "done, gate failed" in capsys.readouterr().out
