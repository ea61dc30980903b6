"""The reward stage writes its report card: from every held-out answer once, with the texts it is most wrong about."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_world import marked, new_run, policy_folder, ranking, rankings_file, run_reward, tokenised

from rlhf.data.errors import DataError, SettingsError
from rlhf.stages.artifact import Artifact
from rlhf.stages.models import load_scalar
from rlhf.stages.reward import evaluate
from rlhf.stages.reward.evaluate import accuracy, all_scores, grade

ROWS = marked(40)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A language model and rankings with strengths from two sources."""
    root = tmp_path_factory.mktemp("world")
    rows = [
        {**row, "strengths": [4.0 - rank for rank in row["ranks"]], "source": "forum" if number % 2 else "labelers"}
        for number, row in enumerate(ROWS)
    ]
    return {"model": policy_folder(root), "data": rankings_file(root / "rows.jsonl", rows)}


@pytest.fixture(scope="module")
def trained(world: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished reward stage."""
    folder = tmp_path_factory.mktemp("reward") / "reward"
    run_reward(folder, **world)
    return folder


def card_of(folder: Path) -> dict[str, Any]:
    card: dict[str, Any] = json.loads((folder / "card.json").read_text())
    return card


def test_the_card_is_sealed_with_the_model_and_its_figures_are_final_metrics(trained: Path) -> None:
    manifest = Artifact(trained).manifest
    assert {"card.json", "worst_pairs.jsonl"} <= manifest["files"].keys()
    assert {
        "accuracy", "prompt_accuracy", "longer_wins_accuracy", "num_eval_pairs", "ece", "temperature",
        "ece_after_temperature", "chosen_mean", "chosen_std", "rejected_mean", "rejected_std",
    } <= manifest["metrics"].keys()  # fmt: skip
    assert manifest["metrics"]["accuracy"] == pytest.approx(Artifact(trained).metrics[-1]["accuracy"])


def test_the_card_counts_each_pair_in_each_of_its_tables(trained: Path) -> None:
    card, metrics = card_of(trained), Artifact(trained).manifest["metrics"]
    assert card["num_prompts"] == metrics["num_eval_prompts"]
    assert card["num_pairs"] == metrics["num_eval_pairs"] == 6 * card["num_prompts"]  # of four answers each
    for table in ("by_length", "by_margin", "by_source", "reliability", "reliability_after_temperature"):
        assert sum(group["pairs"] for group in card[table]) == card["num_pairs"]
    assert [group["name"] for group in card["by_margin"]] == ["1", "2", "3"]
    assert {group["name"] for group in card["by_source"]} == {"forum", "labelers"}
    assert sum(card["histogram"]["chosen"]) == card["num_prompts"]
    assert "compared" not in card


def test_rankings_of_the_same_prompt_are_counted_as_one_prompt(
    world: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three rankings of each of four prompts, which may differ in outer white space; five of two others held out."""
    rows = [row | {"prompt": "abcd"[place % 4] + " " * (place // 4)} for place, row in enumerate(ROWS[:12])]
    held_out = [row | {"prompt": "ef"[place // 4]} for place, row in enumerate(ROWS[12:17])]
    given = {
        "data": rankings_file(tmp_path / "rows.jsonl", rows),
        "eval_data": rankings_file(tmp_path / "held_out.jsonl", held_out),
    }
    metrics = run_reward(tmp_path / "reward", model=world["model"], **given)
    assert (metrics["num_prompts"], metrics["num_eval_prompts"], metrics["num_eval_pairs"]) == (4, 2, 30)
    assert card_of(tmp_path / "reward")["num_prompts"] == 2
    said = capsys.readouterr().out
    assert "4 prompts with 12 rankings of 48 answers; 2 prompts with 5 rankings held out" in said


def test_the_worst_pairs_are_of_held_out_answers_as_they_were_written(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path / "run")
    data = tokenised(run, tokenizer, [ranking("ab", ["c " * 30, "x", "<y>", "z"], [1, 1, 2, 3])])  # one is too long
    monkeypatch.setattr(evaluate, "all_scores", lambda *_: [[0.0, -1.0, 1.0]])
    scorer = load_scalar(run.settings.model or "", tokenizer, new_head=True)
    scorer.std = 2.0  # Δ is 2, -2 and -4
    figures = grade(run, scorer, data, 0, {})
    run.close()
    (worst, other) = [json.loads(line) for line in (run.folder / "worst_pairs.jsonl").read_text().splitlines()]
    assert worst == {
        "prompt": "ab", "better": "<y>", "better_score": -1.0, "better_rank": 2.0,
        "worse": "z", "worse_score": 1.0, "worse_rank": 3.0,
    }  # fmt: skip
    assert (other["better"], other["worse"]) == ("x", "z")
    assert figures["accuracy"] == pytest.approx(1 / 3)
    sure, surest = 1 / (1 + math.exp(-2)), 1 / (1 + math.exp(-4))
    assert figures["ece"] == pytest.approx((2 * (sure - 0.5) + surest) / 3)


def test_processes_score_each_row_once_and_all_know_all_scores(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path / "run", microbatch_size=2)
    scorer = load_scalar(run.settings.model or "", tokenizer, new_head=True)
    data = tokenised(run, tokenizer, [ranking(r["prompt"], r["responses"], r["ranks"]) for r in ROWS[:7]])
    alone = all_scores(run, scorer, data, 0)
    right = [row.ranks[i] < row.ranks[j] and s[i] > s[j] for row, s in zip(data, alone, strict=True) for i in range(4)
             for j in range(4)]  # fmt: skip
    assert accuracy(run, scorer, data, 0) == pytest.approx(sum(right) / (7 * 6))
    gathered: list[Any] = []

    def gather(found: list[Any]) -> list[Any]:
        gathered.extend(found)
        return gathered

    monkeypatch.setattr(run, "gather_objects", gather)
    monkeypatch.setattr(run, "num_processes", 2)
    for rank in (1, 0):
        monkeypatch.setattr(run, "rank", rank)
        together = all_scores(run, scorer, data, 0)
    run.close()
    assert sorted(number for number, _ in gathered) == list(range(7))
    torch.testing.assert_close(torch.tensor(together), torch.tensor(alone), rtol=0, atol=1e-5)


def test_a_process_that_hangs_while_another_model_scores_is_told(
    trained: Path, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path / "run", compare_with=[str(trained / "model")])
    watched, score = [], evaluate.all_scores

    def note(*arguments: Any) -> Any:
        watched.append(run.stopping.watched)
        return score(*arguments)

    monkeypatch.setattr(evaluate, "all_scores", note)
    evaluate.scores_of_others(run, tokenised(run, tokenizer, [ranking("a", ["b", "c"], [1, 2])]))
    run.close()
    assert watched == [True]
    assert not run.stopping.watched


def test_a_reward_model_agrees_with_itself(world: dict[str, str], trained: Path, tmp_path: Path) -> None:
    twin = str(trained / "model")
    metrics = run_reward(tmp_path / "reward", **world, compare_with=[twin])
    card = card_of(tmp_path / "reward")
    assert card["compared"] == [{"model": name, "accuracy": metrics["accuracy"]} for name in ("this one", twin)]
    assert (card["agreement"]["all_agree"], card["agreement"]["mean_pairwise"]) == (1, 1)
    assert card["agreement"]["score_std"] == pytest.approx(0, abs=1e-4)
    assert Artifact(tmp_path / "reward").manifest["key"] == Artifact(trained).manifest["key"]


def test_prompts_that_another_model_has_no_room_for_are_left_out_of_the_comparison(
    trained: Path, tmp_path: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run = new_run(tmp_path / "run", max_length=200, compare_with=[str(trained / "model")])  # which has 64 positions
    data = tokenised(run, tokenizer, [ranking("a", ["b", "c"], [1, 2]), ranking("d", ["e" * 80, "f"], [1, 2])])
    others = evaluate.scores_of_others(run, data)
    run.close()
    ((first, second),) = others.values()
    assert first is not None
    assert len(first) == 2
    assert second is None
    assert "has no room for answers in 1 of 2 held-out rankings" in capsys.readouterr().out
    rows = [evaluate.Scored([1.0, 0.0], [1, 2], [1, 1], key="p")] * 2
    this, other = evaluate.compare(rows, others)["compared"]
    assert (this["accuracy"], other["accuracy"]) == (1, float(first[0] > first[1]))
    assert evaluate.compare(rows[1:], {"other": [None]}) == {}


def test_another_reward_model_that_is_none_is_refused_before_training(world: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"reward\.compare_with: .* lacks the weights"):
        run_reward(tmp_path / "reward", **world, compare_with=[world["model"]])
    assert not (tmp_path / "reward" / "metrics.jsonl").exists()


def test_held_out_answers_that_are_all_tied_are_refused_before_training(world: dict[str, str], tmp_path: Path) -> None:
    tied = rankings_file(tmp_path / "tied.jsonl", [{"prompt": "q", "responses": ["a", "b"], "ranks": [1, 1]}])
    with pytest.raises(DataError, match=r"reward\.eval_data: .*different rank"):
        run_reward(tmp_path / "reward", **world, eval_data=tied, ties="soft")
    assert not (tmp_path / "reward" / "metrics.jsonl").exists()
