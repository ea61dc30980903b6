"""Three seeded runs of PPO that end well, too far and nowhere: the report's verdict names each as what it is."""

import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ppo_world import model_folders, run_ppo
from reward_world import marked, run_reward

from rlhf.pipeline.report.charts import draw_charts
from rlhf.pipeline.report.curves import curves
from rlhf.pipeline.report.facts import is_of_phases
from rlhf.pipeline.report.judgement import judge_run
from rlhf.pipeline.report.page import page
from rlhf.pipeline.report.run import Run, read_run
from rlhf.pipeline.summary import Entry, write_summary
from rlhf.stages.artifact import Artifact

LENGTH = 6  # tokens, of which each is a byte


def quality(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """The judge's: different letters in an answer."""
    return [len(set(filter(_is_letter, response))) / LENGTH for response in responses]


def letters(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """A reward that is right about answers of the SFT model, where letters are rare, and goes on to pay for more."""
    return [sum(map(_is_letter, response)) / LENGTH for response in responses]


def half_letters(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Another judge's quality: one half of an answer should be letters."""
    return [1 - abs(2 * share - 1) for share in letters(prompts, responses)]


def other_signs(prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """A reward for what no judge asks for."""
    return [1 - share for share in letters(prompts, responses)]


def _is_letter(sign: str) -> bool:
    return sign.isascii() and sign.isalpha()


@pytest.fixture(autouse=True)
def _without_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.pipeline.report.charts.draw_lines", lambda *_: "")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    found = model_folders(root, tokenizer)
    held_out = [json.dumps({"prompt": one + other}) + "\n" for one in "mnopqrst" for other in "mnopq"]
    (root / "held_out.jsonl").write_text("".join(held_out))
    return found


def run_of(folder: Path, given: dict[str, str], **fields: Any) -> Run:
    """PPO without anything that holds it back, in a run folder."""
    chosen = {
        "judge": "test_report_runs:quality", "reward_model": None, "kl_coef": 0.0, "kl_budget": 1e3,
        "rollout_batch_size": 64, "num_epochs": 4, "num_minibatches": 1, "temperature": 1.0, "learning_rate": 3e-2,
        "save_every": 100,
    }  # fmt: skip
    metrics = run_ppo(folder / "ppo-1", given | chosen | fields)
    entries = {"ppo": Entry("done", "ppo-1", "ppo-1/model", 1.0, metrics)}
    if (folder / "reward-1").is_dir():
        of_reward = json.loads((folder / "reward-1" / "manifest.json").read_text())["metrics"]
        entries = {"reward": Entry("done", "reward-1", "reward-1/model", 1.0, of_reward), **entries}
    write_summary(folder, entries)
    return read_run(folder)


def test_a_healthy_run_is_said_to_have_improved(given: dict[str, str], tmp_path: Path) -> None:
    run = run_of(tmp_path, given, rewards=[{"function": "test_report_runs:quality"}], num_iterations=12)
    verdict = judge_run(run)["ppo"]
    assert (verdict.name, verdict.tone) == ("improved", "good")
    assert verdict.sentence in page(run)


def test_a_run_that_went_too_far_is_said_to_be_over_optimised(given: dict[str, str], tmp_path: Path) -> None:
    rewards = [{"function": "test_report_runs:letters"}]
    run = run_of(tmp_path, given, rewards=rewards, judge="test_report_runs:half_letters", num_iterations=20)
    line = dict(run.stages["ppo"].curves["eval_true_quality"])
    assert max(line.values()) > line[0] + 0.05  # it was better at first
    verdict = judge_run(run)["ppo"]
    assert (verdict.name, verdict.tone) == ("over_optimised", "bad")
    assert ", at its best " in verdict.sentence
    assert verdict.sentence in page(run)


def test_a_run_on_shuffled_ranks_is_said_to_have_a_broken_reward(given: dict[str, str], tmp_path: Path) -> None:
    rows = marked(360, answers=2)
    for row in rows:
        random.Random(row["prompt"]).shuffle(row["ranks"])
    rows.append({"prompt": "a", "responses": ["b" * 60, "c"], "ranks": [1, 2]})  # of whose answers one is too long
    data = tmp_path / "rankings.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_reward(tmp_path / "reward-1", given["model"], str(data), eval_share=0.5, seed=12)
    rewards = [{"function": "test_report_runs:other_signs", "weight": 10.0}]  # which makes sure that the score rises
    model = str(tmp_path / "reward-1" / "model")
    run = run_of(tmp_path, given, reward_model=model, rewards=rewards, num_iterations=6)
    found = judge_run(run)
    assert found["reward"].name == "guesses"
    assert (found["ppo"].name, found["ppo"].tone) == ("broken_reward", "bad")
    assert "the score rose" in found["ppo"].sentence
    shown = " ".join(re.sub("<[^>]*>", " ", page(run)).split())
    assert "unrelated to ranks" in shown
    assert "Reward model data 361 361 nothing" in shown
    assert "Reward model answers, tokenised 721 722 1 × longer than max_length" in shown
    assert "Reward model rankings, tokenised 360 361 1 × nothing to compare" in shown


def test_every_curve_says_what_it_shows(chain: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the title of its chart, or in a line."""
    monkeypatch.setattr("rlhf.pipeline.report.charts.draw_lines", lambda *_: "")
    for stage, folder in chain.items():
        found = {name: line for name, line in curves(Artifact(folder).metrics).items() if not is_of_phases(name)}
        drawn = draw_charts(stage, found, {})
        assert drawn["charts"]
        assert [chart["title"] for chart in drawn["more_charts"] if not chart["what"]] == []
