"""Two rounds of feedback through real stages, small and in one process: a judge ranks, the second learns from both."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlhf.pipeline import runner
from rlhf.pipeline.recipe import load_recipe
from rlhf.recipes import demo_world

WORLD = "rlhf.recipes.demo_world"
RECIPE: dict[str, Any] = {
    "judge": "e2e_judge:letters", "rounds": 2, "eval_share": 0.2,
    "pretrain": {
        "data": {"path": f"{WORLD}:documents", "options": {"num": 60}}, "vocab_size": 300, "hidden_size": 16,
        "num_layers": 1, "num_heads": 2, "context_length": 96, "block_size": 32, "num_steps": 2, "global_batch_size": 2,
    },
    "sft": {"data": {"path": f"{WORLD}:demonstrations", "options": {"num": 30}}, "max_length": 96},
    "feedback": {
        "prompts": "prompts.jsonl", "judge": "${judge}", "num_answers": 3, "temperatures": [0.7, 1.0],
        "max_new_tokens": 8, "max_length": 96,
    },
    "reward": {"max_length": 96, "global_batch_size": 8},
    "ppo": {
        "data": "prompts.jsonl", "num_iterations": 1, "rollout_batch_size": 8, "max_prompt_length": 64,
        "max_new_tokens": 8, "num_eval_samples": 1, "learning_rate": 1e-2,
    },
}  # fmt: skip


def test_a_second_round_samples_the_new_policy_and_learns_from_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf.pipeline.report.charts.draw_lines", lambda *_: "")  # which takes as long as all stages
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "e2e_judge.py").write_text(
        "def letters(prompts, responses):\n    return [text.count('e') + len(text) / 100 for text in responses]\n"
    )
    rows = [json.dumps(row) + "\n" for row in islice(demo_world.prompts(), 24)]
    (tmp_path / "prompts.jsonl").write_text("".join(rows))
    sections = {name: found | {"report_to": []} if isinstance(found, dict) else found for name, found in RECIPE.items()}
    (tmp_path / "tiny.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(sections)))
    entries = runner.run(load_recipe("tiny.yaml"), Path("run"), say=lambda text: None)
    assert [entry.status for entry in entries.values()] == ["done"] * 8
    assert entries["feedback"].metrics["num_rankings"] == 24
    assert entries["feedback 2"].metrics["num_rankings"] == 48
    total = [
        entries[name].metrics["num_prompts"] + entries[name].metrics["num_eval_prompts"]
        for name in ("reward", "reward 2")
    ]
    assert total == [24, 24]  # prompts, of which the second round has two rankings each
    ranked = (Path("run") / str(entries["feedback 2"].folder) / "rankings.jsonl").read_text().splitlines()
    firsts = (Path("run") / str(entries["feedback"].folder) / "rankings.jsonl").read_text().splitlines()
    assert set(firsts) < set(ranked)
    assert {"true_quality", "sft_true_quality", "win_rate"} <= entries["ppo 2"].metrics.keys()
    assert "<h2>Rounds</h2>" in Path("run/report.html").read_text()
    again = runner.run(load_recipe("tiny.yaml"), Path("run"), say=lambda text: None)
    assert again == entries
