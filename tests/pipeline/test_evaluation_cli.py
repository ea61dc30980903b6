"""Evaluations of a run: brief ones after stages, which fail no run, and those that `rlhf eval` is asked for."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from pipeline_world import FakeStages, contents

from rlhf.data.errors import DataError
from rlhf.pipeline import evaluation, progress, runner
from rlhf.pipeline.evaluation_tables import show
from rlhf.pipeline.launch import Ended
from rlhf.pipeline.plan import Scope
from rlhf.pipeline.recipe import load_recipe
from rlhf.pipeline.report.run import read_run
from rlhf.stages.artifact import STAGES
from rlhf.stages.evaluation.config import EvaluationSettings
from rlhf.stages.evaluation.records import EvaluationFailed

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


def asked_for(stages: FakeStages, monkeypatch: pytest.MonkeyPatch) -> list[EvaluationSettings]:
    """What evaluations are asked for from now on."""
    found: list[EvaluationSettings] = []

    def watch(run_dir: Path, done: dict[str, Path], asked: EvaluationSettings, say: Any) -> dict[str, Any]:
        found.append(asked)
        return stages.evaluate(run_dir, done, asked, say)

    monkeypatch.setattr(sys.modules["rlhf.stages.evaluation.evaluate"], "evaluate", watch)
    return found


def test_eval_asks_for_what_its_options_say(
    world: Path, stages: FakeStages, rlhf: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    rlhf("run", "recipe.yaml", "--run-dir", "run", "judge=rlhf.recipes.demo_world:judge")
    asked = asked_for(stages, monkeypatch)
    code, out, _ = rlhf("eval", "run")
    assert code == 0
    assert out.splitlines()[0].split() == ["model"]
    assert (asked[0].form, asked[0].num_prompts, asked[0].num_samples, asked[0].best_of) == ("full", 128, 4, 16)
    assert asked[0].judge == "rlhf.recipes.demo_world:judge"
    assert stages.reports == 2
    options = ("--num-prompts", "9", "--num-samples", "2", "--best-of", "0", "--judge", "a:b")
    rlhf("eval", "run", *options, "--tasks", "one,two", "--include-path", "mine")
    assert (asked[1].num_prompts, asked[1].num_samples, asked[1].best_of, asked[1].judge) == (9, 2, 0, "a:b")
    assert (asked[1].tasks, asked[1].include_path) == (["one", "two"], "mine")
    code, out, _ = rlhf("eval", "run", "--cheap", "--json", "--endpoint", "http://127.0.0.1:1", "--model", "m")
    assert (asked[2].form, asked[2].num_prompts, asked[2].judge) == ("cheap", 16, None)
    assert asked[2].judge_from is not None
    assert json.loads(out) == json.loads((RUN / "evaluation.json").read_text())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("nowhere",), "not a run folder"),
        (("run", "--model", "m"), "--endpoint URL with --model NAME"),
        (("run", "--judge", "a:b", "--endpoint", "u", "--model", "m"), "say who judges"),
        (("run", "--key-variable", "K"), "--key-variable goes with --endpoint"),
        (("run", "--include-path", "mine"), "--include-path goes with --tasks"),
        (("run", "--stage", "sft"), "goes with --attention TEXT"),
    ],
)
def test_eval_refuses_what_cannot_be_meant(
    world: Path, stages: FakeStages, rlhf: Call, words: tuple[str, ...], message: str
) -> None:
    rlhf("run", "recipe.yaml", "--run-dir", "run", "--to", "pretrain")
    code, _, err = rlhf("eval", *words)
    assert (code, message in err) == (2, True)


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_eval_says_how_far_it_is_and_never_between_the_figures(
    world: Path, stages: FakeStages, rlhf: Call, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    rlhf("run", "recipe.yaml", "--run-dir", "run", "--to", "pretrain")

    @contextmanager
    def telling(what: str, say: Any) -> Iterator[Any]:
        say(f"{what} …")
        yield say

    monkeypatch.setattr(progress, "telling", telling)
    out, err = rlhf("eval", "run", *words)[1:]
    assert err.splitlines()[0] == "starting …"
    assert "starting" not in out


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


def test_answers_are_drawn_as_the_recipe_s_ppo_draws_them_before_it_is_finished(
    world: Path, stages: FakeStages, rlhf: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a stage, and by `rlhf eval`; without a ppo section by what is usual."""
    asked = asked_for(stages, monkeypatch)
    rlhf(
        "run", "recipe.yaml", "--run-dir", "run", "--to", "sft", "ppo.max_new_tokens=20", "ppo.temperature=0.7",
        "ppo.max_prompt_length=30",
    )  # fmt: skip
    rlhf("eval", "run")
    rlhf("eval", "run", "--cheap")
    assert [(one.max_new_tokens, one.temperature) for one in asked] == [(20, 0.7)] * 4
    path = RUN / "recipe.yaml"
    recipe = OmegaConf.load(path)
    del recipe["ppo"]
    OmegaConf.save(recipe, path)
    rlhf("eval", "run")
    assert (asked[-1].max_new_tokens, asked[-1].temperature) == (128, 1.0)


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_measured(
    world: Path, stages: FakeStages, rlhf: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    rlhf("run", "recipe.yaml", "--run-dir", "run", "--to", "pretrain")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    code, _, err = rlhf("eval", "run")
    assert (code, "run: cannot be written to, and the figures go there" in err) == (2, True)
    assert stages.evaluated == [BASE]


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


def test_what_a_judge_prints_is_none_of_the_figures(world: Path, stages: FakeStages, rlhf: Call) -> None:
    rlhf("run", "recipe.yaml", "--run-dir", "run", "--to", "pretrain")
    stages.in_evaluation = lambda: print("judging")
    code, out, err = rlhf("eval", "run", "--json")
    assert (code, err) == (0, "judging\n")
    assert list(json.loads(out)["models"]) == ["base"]


def test_a_judge_that_fails_is_a_failure(world: Path, stages: FakeStages, rlhf: Call) -> None:
    rlhf("run", "recipe.yaml", "--run-dir", "run", "--to", "pretrain")

    def fail() -> None:
        raise EvaluationFailed("judge a:b: KeyError: 'x'")

    stages.in_evaluation = fail
    code, _, err = rlhf("eval", "run")
    assert (code, err) == (1, "error: judge a:b: KeyError: 'x'\n")


def test_a_copy_without_the_whole_folder_of_a_finished_stage_is_refused(
    world: Path, stages: FakeStages, rlhf: Call
) -> None:
    """And so is one without what a stage started from, though that still lies at the old place."""
    rlhf("run", "recipe.yaml", "--run-dir", "run")
    for stage in STAGES:
        shutil.copytree("run", stage)
        (folder,) = Path(stage).glob(f"{stage}-*")
        for leave_out in ((folder / "manifest.json").unlink, lambda folder=folder: shutil.rmtree(folder)):
            leave_out()
            code, out, err = rlhf("eval", stage)
            assert (code, out) == (2, "")
            assert err.startswith(f"error: {stage}: the folder {folder.name} of this run is not finished or missing")
    assert stages.evaluated == [BASE, SFT, ALL]
    shutil.copytree("run", "copy")
    assert rlhf("eval", "copy")[0] == 0
    models = json.loads(Path("copy/evaluation.json").read_text())["models"]
    assert [figures["model"].partition("-")[0] for figures in models.values()] == ["pretrain", "sft", "ppo"]


def test_status_and_report_say_that_the_folder_of_a_finished_stage_is_missing(
    world: Path, stages: FakeStages, rlhf: Call
) -> None:
    """In a copy that was made without it, or with a part of it; the status of the stage stays what it was."""
    rlhf("run", "recipe.yaml", "--run-dir", "run")
    code, out, err = rlhf("status", "run")
    assert (code, err, "missing" in out) == (0, "", False)
    assert read_run("run").warnings == []
    assert "message" not in json.loads(rlhf("status", "run", "--json")[1])["stages"]["reward"]
    for stage in STAGES:
        shutil.copytree("run", stage)
        (folder,) = Path(stage).glob(f"{stage}-*")
        for leave_out in ((folder / "manifest.json").unlink, lambda folder=folder: shutil.rmtree(folder)):
            leave_out()
            code, out, _ = rlhf("status", stage)
            told = f"{stage}: the folder {folder.name} of this run is not finished or missing; copy it whole from"
            (row,) = [line for line in out.splitlines() if line.startswith(f"{stage} ")]
            (line,) = [line for line in out.splitlines() if line.startswith(f"warning: {told}")]
            assert "done, folder missing" in row
            assert line.endswith(f"or `rlhf run {stage}/recipe.yaml --run-dir {stage}` makes it anew")
            assert code == 0
            entries = json.loads(rlhf("status", stage, "--json")[1])["stages"]
            assert {entry["status"] for entry in entries.values()} == {"done"}
            assert f"warning: {entries[stage]['message']}" == line
            assert [warning for warning in read_run(stage).warnings if "missing" in warning] == [
                entries[stage]["message"]
            ]


def shown(found: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines that are printed of it, without what aligns them."""
    show(found)
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def figures(**others: Any) -> dict[str, Any]:
    """evaluation.json with one model, of which there is a text perplexity of 3.4567 over 1,984 tokens."""
    model = {"model": "sft-1", "text_perplexity": 3.4567, "num_text_tokens": 1984}
    return {"form": "cheap", "models": {"sft": model | others.pop("model", {})}, **others}


def test_the_table_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    spread = {"mean": 1.0, "std": 0.25, "quantiles": [0.0] * 5}
    model = {"score": spread, "kl": 0.5, "kl_interval": [0.4, 0.6], "length": 12.0, "distinct_2": 0.9684}
    best = {"n": 2, "kl": 0.193147, "score": 0.5, "score_interval": [0.25, 0.75], "quality": None}
    lines = shown(figures(model=model, best_of_n=[best]), capsys)
    assert lines[0] == "model text ppl score KL from sft tokens distinct-2"
    assert lines[1] == "sft (sft-1) 3.46 1.00 ± 0.250 0.500 (0.400 to 0.600) 12.0 0.968"
    assert lines[-2:] == ["best of KL score", "2 0.193 0.500 (0.250 to 0.750)"]  # and no column that would be empty
    judged = shown(figures(model=model, best_of_n=[best | {"quality": 0.75}, best]), capsys)
    assert judged[-3:] == [
        "best of KL score quality", "2 0.193 0.500 (0.250 to 0.750) 0.750", "2 0.193 0.500 (0.250 to 0.750) –",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("best_of", "told"),
    [
        (16, "best of: 16 answers of sft to each prompt, the 4 above and 12 more; 1 is the mean of all 16"),
        (4, "best of: the first 4 of the 4 answers of sft above to each prompt"),
        (1, "best of: the first 1 of the 4 answers of sft above to each prompt"),
    ],
)
def test_below_the_best_of_n_stands_of_which_answers_they_are(
    capsys: pytest.CaptureFixture[str], best_of: int, told: str
) -> None:
    """They are others than those of the first table, so that the best of 1 is not its score."""
    best = {"n": 1, "kl": 0.0, "score": 0.5, "score_interval": [0.25, 0.75], "quality": None}
    settings = {"num_prompts": 9, "num_samples": 4, "best_of": best_of}
    assert shown(figures(best_of_n=[best], settings=settings), capsys)[-1] == told


def test_shares_have_the_digits_of_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(figures(model={"eos_share": 0.9684, "refusal_share": 0.0021}), capsys)
    assert lines[:2] == ["model text ppl ended refused", "sft (sft-1) 3.46 0.97 0.00"]


def test_below_the_figures_stands_on_how_much_they_rest(capsys: pytest.CaptureFixture[str]) -> None:
    """Of what there is none nothing is said."""
    assert shown(figures(), capsys)[2:] == ["held out: 1,984 tokens of text"]
    whole = figures(model={"num_response_tokens": 930}, settings={"num_prompts": 16, "num_samples": 1})
    assert shown(whole, capsys)[2:] == [
        "held out: 1,984 tokens of text, 930 tokens of responses, 16 prompts (answers to each: 1)"
    ]
    several = figures(model={"num_response_tokens": 930})
    several["models"] |= {"base": {"model": "hub/id"}, "ppo": several["models"]["sft"] | {"num_text_tokens": 2000}}
    told = "held out: 1,984 to 2,000 tokens of text, 930 tokens of responses"
    assert shown(several, capsys)[4:] == [told]  # base was not measured


def test_win_rates_have_two_decimals_as_in_the_report_and_a_dash_where_there_is_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pair = {
        "one": "ppo", "other": "sft", "by": "score", "wins": 7, "ties": 1, "losses": 2, "win_rate": 0.7549,
        "interval": [0.5, 0.9], "length_controlled": None, "length_controlled_interval": None,
    }  # fmt: skip
    controlled = pair | {"by": "judge", "length_controlled": 0.996, "length_controlled_interval": [0.061, 1.0]}
    lines = shown(figures(pairs=[pair, controlled]), capsys)
    assert "ppo than sft score 7 1 2 0.75 (0.50 to 0.90) –" in lines
    assert "ppo than sft judge 7 1 2 0.75 (0.50 to 0.90) 1.00 (0.06 to 1.00)" in lines


def test_results_of_lm_eval_are_a_row_per_metric_with_a_column_per_model(capsys: pytest.CaptureFixture[str]) -> None:
    """As lm-eval names them; a standard error stands by its value, and what a model has not is a dash."""
    tasks = {
        "base": {"fox": {"acc,none": 0.25, "acc_stderr,none": 0.0433}},
        "sft": {
            "fox": {"acc,none": 0.5, "acc_stderr,none": 0.05},
            "sums": {"exact_match,strict-match": 0.125, "exact_match_stderr,strict-match": None},
        },
    }
    assert shown(figures(tasks=tasks), capsys)[-3:] == [
        "task metric base sft",
        "fox acc 0.250 ± 0.0433 0.500 ± 0.0500",
        "sums exact_match (strict-match) – 0.125",
    ]


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
