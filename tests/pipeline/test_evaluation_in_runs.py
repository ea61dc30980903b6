"""Brief evaluations that a run makes after its stages, and which fail no run."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from pipeline_world import FakeStages, contents

from rlhf.data.errors import DataError
from rlhf.pipeline import evaluation, runner
from rlhf.pipeline.launch import Ended
from rlhf.pipeline.plan import Scope
from rlhf.pipeline.recipe import load_recipe
from rlhf.stages.evaluation.config import EvaluationSettings

Call = Callable[..., tuple[int, str, str]]
RUN = Path("run")
BASE, SFT, ALL = ["base"], ["base", "sft"], ["base", "sft", "ppo"]


def run(*overrides: str, scope: Scope | None = None) -> list[str]:
    """Run the recipe; what it said."""
    said: list[str] = []
    runner.run(load_recipe("recipe.yaml", overrides), RUN, scope, said.append)
    return said


def test_models_are_measured_after_each_stage_that_makes_one(world: Path, stages: FakeStages) -> None:
    """Not after reward, which makes none that answers; and nothing where nothing was trained."""
    run()
    assert stages.evaluated == [BASE, SFT, ALL]
    run()
    assert stages.evaluated == [BASE, SFT, ALL]
    run("ppo.learning_rate=1e-6")
    assert stages.evaluated == [BASE, SFT, ALL, ALL]


def test_scopes_and_single_stages_are_measured_too(world: Path, stages: FakeStages) -> None:
    run(scope=Scope(last="sft"))
    assert stages.evaluated == [BASE, SFT]
    run(scope=Scope(first="reward"))
    assert stages.evaluated == [BASE, SFT, ALL]
    run("sft.num_epochs=2", scope=Scope(last="sft"))  # PPO's model is of another recipe now
    assert stages.evaluated[3:] == [SFT]


def test_a_recipe_may_do_without(world: Path, stages: FakeStages) -> None:
    run("evaluate=false")
    assert not stages.evaluated
    assert not (RUN / "evaluation.json").exists()
    keys = {path.name for path in RUN.glob("*-*")}
    run()  # it is in no stage's key: nothing is trained again
    assert {path.name for path in RUN.glob("*-*")} == keys
    assert stages.evaluated == [ALL]


def test_rounds_compare_the_newest_policy(world: Path, stages: FakeStages) -> None:
    """Of two finished rounds."""
    run()
    ppo = json.loads((RUN / "summary.json").read_text())["stages"]["ppo"]["folder"]
    entries = runner.read_summary(RUN)
    entries["ppo 2"] = entries["ppo"]
    entries["ppo"] = entries["reward"]
    assert evaluation.finished(RUN, entries)["ppo"] == RUN / ppo


@pytest.mark.parametrize(
    "error", [DataError("no such file"), RuntimeError("out of memory\nand more"), OSError(28, "full")]
)
def test_an_evaluation_that_fails_fails_no_run(world: Path, stages: FakeStages, error: Exception) -> None:
    def fail() -> None:
        raise error

    stages.in_evaluation = fail
    said = run()
    warnings = [line for line in said if line.startswith("warning: no evaluation: ")]
    assert len(warnings) == 3
    assert all("`rlhf eval run --cheap` tries again" in line and "\n" not in line for line in warnings)
    assert {entry.status for entry in runner.read_summary(RUN).values()} == {"done"}
    assert (RUN / "report.html").exists()


def test_what_a_kill_kept_from_being_measured_is_by_the_next_run(world: Path, stages: FakeStages) -> None:
    def killed() -> None:
        if (RUN / "evaluation.json").exists():
            raise SystemExit(143)

    stages.in_evaluation = killed
    with pytest.raises(SystemExit) as stop:
        run()
    assert stop.value.code == 143
    assert runner.read_summary(RUN)["sft"].status == "done"
    stages.in_evaluation = lambda: None
    stages.trained.clear()
    run()
    assert stages.trained == ["reward", "ppo"]
    assert stages.evaluated[1:] == [ALL]


def test_a_run_that_was_killed_before_it_wrote_that_ppo_is_done_is_measured_too(
    world: Path, stages: FakeStages
) -> None:
    run()
    (RUN / "evaluation.json").unlink()
    summary = (RUN / "summary.json").read_text()
    assert summary.count('"status": "done"') == 4
    (RUN / "summary.json").write_text('"status": "running"'.join(summary.rsplit('"status": "done"', 1)))
    run()
    assert stages.evaluated[3:] == [ALL]


def test_a_report_is_drawn_after_the_evaluation_that_it_shows(world: Path, stages: FakeStages) -> None:
    run()
    (RUN / "evaluation.json").unlink()
    run()
    assert (stages.evaluated[3:], stages.reports) == ([ALL], 2)
    before = contents(RUN)
    run()
    assert contents(RUN) == before


def test_stages_with_processes_of_their_own_are_measured_in_one(
    world: Path, stages: FakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []
    ends = Ended(1, [], "Traceback …\nOutOfMemoryError: 2 GiB")

    def launch(words: list[str], environment: dict[str, str], seconds: float, lock: int) -> Ended:
        called.append(words)
        return ends

    monkeypatch.setattr(evaluation, "stays_in_process", lambda *_: False)
    monkeypatch.setattr(evaluation, "to_its_end", launch)
    assert [line for line in run(scope=Scope(last="sft")) if "OutOfMemoryError: 2 GiB" in line]
    assert called[1][:4] == [sys.executable, "-m", "rlhf.stages.evaluation", "run"]
    folders = {path.name.partition("-")[0]: str(path) for path in RUN.glob("*-*")}
    assert json.loads(called[1][4]) == folders
    assert EvaluationSettings.model_validate_json(called[1][5]).form == "cheap"
    ends = Ended(1, [15], "")
    with pytest.raises(SystemExit) as stop:
        run("sft.num_epochs=2", scope=Scope(last="sft"))
    assert stop.value.code == 143


def test_a_sweep_measures_no_variant(world: Path, stages: FakeStages, rlhf: Call) -> None:
    Path("sweep.yaml").write_text("pretrain:\n- {learning_rate: 0.1}\n- {learning_rate: 0.2}\n")
    rlhf("pretrain", "recipe.yaml", "--run-dir", "run", "--sweep", "sweep.yaml")
    assert not stages.evaluated


def test_a_run_says_that_it_is_the_evaluation_which_goes_on(
    world: Path, stages: FakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lines stand between those of the stages."""

    @contextmanager
    def telling(what: str, say: Any) -> Iterator[Any]:
        yield say

    def evaluate(run_dir: Path, done: dict[str, Path], asked: EvaluationSettings, say: Any) -> dict[str, Any]:
        say("sft: 0 of 4 answers")
        return stages.evaluate(run_dir, done, asked, say)

    monkeypatch.setattr(evaluation, "telling", telling)
    monkeypatch.setattr(sys.modules["rlhf.stages.evaluation.evaluate"], "evaluate", evaluate)
    said = run(scope=Scope(last="pretrain"))
    assert "evaluation, sft: 0 of 4 answers" in said
    assert "sft: 0 of 4 answers" not in said


def test_a_run_ends_with_the_verdict_on_each_stage(world: Path, stages: FakeStages, rlhf: Call) -> None:
    stages.metrics = {
        "sft": {"eval_loss": 1.0, "base_eval_loss": 2.0},
        "ppo": {"kl": 5.0, "win_rate": 0.2, "num_eval_prompts": 100, "true_quality": 0.3, "sft_true_quality": 0.5},
    }
    said = rlhf("run", "recipe.yaml", "--run-dir", "run")[1].splitlines()
    verdicts = said[next(n for n, line in enumerate(said) if line.startswith("ppo  ")) + 1 :]
    assert verdicts[:2] == [
        "? Pretraining tells no held-out loss, so nothing is known of what it learned.",
        "✓ SFT learned: held-out loss 2.00 → 1.00.",
    ]
    assert verdicts[3].startswith("✗ PPO made it worse: ")
    assert "win rate over SFT by the judge 0.20 (100 prompts, 95 % interval" in verdicts[3]
    assert verdicts[4] == "report: run/report.html"


def test_files_of_an_evaluation_that_is_not_ours_are_not_written_over(
    world: Path, stages: FakeStages, rlhf: Call
) -> None:
    RUN.mkdir()
    (RUN / "evaluation.json").write_text("mine")
    code, _, err = rlhf("run", "recipe.yaml", "--run-dir", "run")
    assert (code, "run/evaluation.json: is not of a run of ours" in err) == (2, True)


def test_half_written_files_of_an_evaluation_go(world: Path, stages: FakeStages, rlhf: Call) -> None:
    run()
    left = RUN / ".evaluation.json.17.writing"
    left.write_text("{")
    assert rlhf("clean", "run")[0] == 0
    assert not left.exists()
    assert (RUN / "evaluation.json").exists()
    assert rlhf("verify", "run")[0] == 0


def test_the_recipe_that_a_run_writes_keeps_the_switch(world: Path, stages: FakeStages) -> None:
    run("evaluate=false")
    assert OmegaConf.load(RUN / "recipe.yaml").evaluate is False
