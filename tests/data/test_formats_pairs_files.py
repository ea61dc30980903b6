"""Real preference files, and samples after published schemas, read where they lie beside the checkout."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf.data.check import check
from rlhf.data.rows import load, read_rankings
from rlhf.data.sources import Source

PREFERENCES = Path(__file__).resolve().parents[3] / "shared" / "data" / "preferences"


TIED, EMPTY, FEW = "all answers tied", "empty response", "fewer than two answers"
TRUTH: dict[str, tuple[str, int, int, dict[str, list[int]], int, int, int]] = {
    # format, rows, kept, dropped, pairs, ties, prompts
    "lf_dpo_en_demo.json": ("sharegpt_rankings", 300, 300, {}, 300, 0, 295),
    "medicalgpt_dpo_zh_500.jsonl": ("sharegpt_rankings", 500, 500, {}, 500, 0, 500),
    "nectar.jsonl": ("nectar", 2, 2, {}, 21 + 2, 1, 2),
    "ultrafeedback_raw.jsonl": ("ultrafeedback_raw", 3, 2, {FEW: [3]}, 5 + 3, 1, 2),
    "ultrafeedback_binarized.jsonl": ("ultrafeedback_binarized", 3, 1, {TIED: [2], EMPTY: [3]}, 1, 1, 1),
    "shp.jsonl": ("shp", 2, 2, {}, 2, 0, 2),
    "webgpt_comparisons.jsonl": ("webgpt_comparisons", 3, 2, {TIED: [3]}, 2, 1, 2),
    "summarize_from_feedback_comparisons.jsonl": ("summarize_from_feedback_comparisons", 3, 3, {}, 3, 0, 2),
    "helpsteer2_preference.jsonl": ("helpsteer2_preference", 3, 2, {TIED: [2]}, 2, 1, 2),
    "stack_exchange_paired_tiny.json": ("stack_exchange_pairs", 25, 25, {}, 25, 0, 8),
}
# The text of the best answers of a row, said in the file's own terms.
BEST: dict[str, Callable[[dict[str, Any]], set[str]]] = {
    "lf_dpo_en_demo.json": lambda row: {row["chosen"]["value"]},
    "medicalgpt_dpo_zh_500.jsonl": lambda row: {row["chosen"]},
    "nectar.jsonl": lambda row: {a["answer"] for a in row["answers"] if a["rank"] == 1},
    "ultrafeedback_raw.jsonl": lambda row: {
        c["response"]
        for c in row["completions"]
        if c["overall_score"] == max(other["overall_score"] for other in row["completions"])
    },
    "ultrafeedback_binarized.jsonl": lambda row: {row["chosen"][-1]["content"]},
    "shp.jsonl": lambda row: {row["human_ref_A"] if row["score_A"] > row["score_B"] else row["human_ref_B"]},
    "webgpt_comparisons.jsonl": lambda row: {row["answer_0"] if row["score_0"] > 0 else row["answer_1"]},
    "summarize_from_feedback_comparisons.jsonl": lambda row: {row["summaries"][row["choice"]]["text"]},
    "helpsteer2_preference.jsonl": lambda row: {row["response_1" if row["preference_strength"] < 0 else "response_2"]},
    "stack_exchange_paired_tiny.json": lambda row: {row["response_j"]},
}

shared = pytest.mark.skipif(not PREFERENCES.is_dir(), reason="no shared data here")


def given(name: str) -> list[dict[str, Any]]:
    text = (PREFERENCES / name).read_text(encoding="utf-8")
    rows = json.loads(text) if name.endswith(".json") else [json.loads(line) for line in text.split("\n") if line]
    assert isinstance(rows, list)
    return rows


@shared
@pytest.mark.parametrize("name", TRUTH)
def test_real_files_are_counted_exactly(name: str) -> None:
    found = check(Source(path=str(PREFERENCES / name)), "preferences")
    lost = {reason: drop["rows"] for reason, drop in found["dropped"].items()}
    counts = found["format"], found["rows"], found["kept"], lost, found["pairs"], found["ties"], found["prompts"]
    assert counts == TRUTH[name]


@shared
@pytest.mark.parametrize("name", TRUTH)
def test_the_best_answers_of_real_files_are_those_of_the_file(name: str) -> None:
    loaded = load(Source(path=str(PREFERENCES / name)), "preferences")
    left_out = {number for drop in loaded.report.dropped.values() for number in drop.rows}
    rows = [row for number, row in enumerate(given(name), start=1) if number not in left_out]
    for row, ranking in zip(rows, loaded.rows, strict=True):
        best = {r for r, rank in zip(ranking.responses, ranking.ranks, strict=True) if rank == min(ranking.ranks)}
        assert best == BEST[name](row)


@shared
@pytest.mark.parametrize(
    ("name", "with_system", "longer"), [("lf_dpo_en_demo.json", 80, 106), ("medicalgpt_dpo_zh_500.jsonl", 84, 0)]
)
def test_conversations_of_real_files_lose_no_turn(name: str, with_system: int, longer: int) -> None:
    rankings = read_rankings(Source(path=str(PREFERENCES / name))).rows
    for row, ranking in zip(given(name), rankings, strict=True):
        assert [turn["content"] for turn in ranking.prompt] == [turn["value"] for turn in row["conversations"]]
    roles = [[turn["role"] for turn in ranking.prompt] for ranking in rankings]
    assert sum(each[0] == "system" for each in roles) == with_system
    assert sum(each.count("user") > 1 for each in roles) == longer


@shared
def test_the_empty_answer_of_the_raw_ultrafeedback_sample_is_counted_as_a_part() -> None:
    found = check(Source(path=str(PREFERENCES / "ultrafeedback_raw.jsonl")), "preferences")
    assert found["parts"] == {EMPTY: {"count": 1, "rows": [2]}}
