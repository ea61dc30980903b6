"""`rlhf eval`: what it asks for, what it says on the way, and how it ends."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from pipeline_world import FakeStages

from rlhf.pipeline import cli, progress
from rlhf.stages.evaluation.config import EvaluationSettings
from rlhf.stages.evaluation.records import EvaluationFailed
from rlhf.stages.streams import _going_on

Call = Callable[..., tuple[int, str, str]]
RUN = Path("run")


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


@pytest.mark.parametrize("words", [(), ("--json",)])
def test_figures_and_report_are_written_though_nobody_reads_stdout(
    world: Path, stages: FakeStages, rlhf: Call, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    """As in `rlhf eval RUN | head -1`."""
    rlhf("run", "recipe.yaml", "--run-dir", "run", "--to", "pretrain")
    (RUN / "evaluation.json").unlink()
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w", buffering=1) as stdout, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", _going_on(stdout))
        with pytest.raises(SystemExit) as ended:
            cli.main(["eval", "run", *words])
    assert (ended.value.code, stages.reports) == (0, 2)
    assert (RUN / "evaluation.json").exists()


def test_a_failed_attempt_does_not_hide_the_models_that_were_finished_before(
    world: Path, stages: FakeStages, rlhf: Call
) -> None:
    """Here of other text: no stage of the new recipe is finished."""

    def broken(folder: Path) -> None:
        raise RuntimeError("typo")

    rlhf("run", "recipe.yaml", "--run-dir", "run")
    (ppo,) = (path.name for path in RUN.glob("ppo-*"))
    (pretrain,) = (path.name for path in RUN.glob("pretrain-*"))
    stages.in_stage["pretrain"] = broken
    assert rlhf("run", "recipe.yaml", "--run-dir", "run", "pretrain.num_steps=7")[0] == 1
    code, out, err = rlhf("eval", "run")
    assert (code, ppo in out) == (0, True)
    assert err == f"warning: no model of the last attempt is finished; measured is {ppo}, of an earlier one\n"
    assert stages.evaluated[-1] == ["base", "sft", "ppo"]
    told = f"pretrain: {pretrain} was finished before, with other settings, data or code"
    assert told in rlhf("status", "run")[1].splitlines()
    entries = json.loads(rlhf("status", "run", "--json")[1])["stages"]
    assert entries["pretrain"]["finished_before"] == pretrain
    assert "finished_before" not in entries["ppo"]  # which was not begun
    stages.in_stage.clear()
    assert rlhf("run", "recipe.yaml", "--run-dir", "run")[0] == 0
    assert "finished before" not in rlhf("status", "run")[1]
    assert rlhf("eval", "run")[2] == ""


def test_what_could_not_be_measured_is_a_warning(
    world: Path, stages: FakeStages, rlhf: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `rlhf eval`, and after the stage of a run."""
    why = "sft.data: demos.jsonl: not as sft-1 had it, by its digest; left out: the perplexity of responses"

    def evaluate(run_dir: Path, *given: Any) -> dict[str, Any]:
        found = stages.evaluate(run_dir, *given) | {"left_out": [why]}
        (run_dir / "evaluation.json").write_text(json.dumps(found))
        return found

    monkeypatch.setattr(sys.modules["rlhf.stages.evaluation.evaluate"], "evaluate", evaluate)
    out = rlhf("run", "recipe.yaml", "--run-dir", "run", "--to", "pretrain")[1]
    assert f"warning: evaluation: {why}" in out.splitlines()
    assert rlhf("eval", "run")[2] == f"warning: {why}\n"
