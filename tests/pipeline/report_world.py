"""Run folders written by hand for the tests of the report, and what a reader sees of a page."""

import json
import re
from pathlib import Path
from typing import Any

from rlhf.pipeline.report import render

METRICS = {
    "pretrain": {"val_loss": 2.164, "vocab_size": 1024},
    "sft": {"eval_loss": 1.17, "base_eval_loss": 3.42},
    "reward": {"accuracy": 0.868, "longer_wins_accuracy": 0.571},
    "ppo": {"true_quality": 0.83, "sft_true_quality": 0.386, "win_rate": 0.82, "kl": 8.7},
}
ROWS = {
    "pretrain": [{"step": step, "loss": 7 - step / 10, "val_loss": 7 - step / 9} for step in range(30)],
    "sft": [{"step": step, "loss": 3 - step / 10, "eval_loss": 3 - step / 9} for step in range(10)],
    "reward": [{"step": step, "loss": 0.7, "accuracy": 0.5 + step / 100} for step in range(10)],
    "ppo": [{"step": step, "score": step / 10, "kl": step / 5, "entropy": 9 - step / 5} for step in range(10)],
}
SAMPLE = {
    "prompt": "What does a fox eat?",
    "sft": "the the the",
    "ppo": "A fox eats mice.",
    "sft_score": -0.5,
    "ppo_score": 2.25,
}


def make_run(folder: Path, stages: list[str], samples: list[dict[str, Any]] | None = None) -> Path:
    entries = {}
    for stage in stages:
        artifact = folder / f"{stage}-0123abcd"
        artifact.mkdir(parents=True)
        write_lines(artifact / "metrics.jsonl", ROWS[stage])
        made_with = {"versions": {"torch": "2.13.0"}, "commit": "c0ffee", "processes": 1}
        manifest = {"settings": {"learning_rate": 0.003}, "made_with": made_with, "files": {}}
        (artifact / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        entries[stage] = {
            "status": "done",
            "folder": artifact.name,
            "model": f"{artifact.name}/model",
            "seconds": 12.5,
            "metrics": METRICS[stage],
        }
        if stage == "ppo":
            write_lines(artifact / "samples.jsonl", samples or [])
    (folder / "summary.json").write_text(json.dumps({"stages": entries}), encoding="utf-8")
    (folder / "recipe.yaml").write_text("seed: 7\n", encoding="utf-8")
    return folder


CARD: dict[str, Any] = {
    "num_pairs": 1234,
    "num_prompts": 250,
    "by_length": [
        {"name": "better answer longer", "pairs": 800, "accuracy": 0.9},
        {"name": "better answer shorter", "pairs": 434, "accuracy": 0.55},
    ],
    "by_margin": [],
    "by_source": [{"name": "<forum>", "pairs": 1000, "accuracy": 0.7}, {"name": "web", "pairs": 234, "accuracy": 1.0}],
    "reliability": [
        {"confidence": 0.6, "accuracy": 0.55, "pairs": 400},
        {"confidence": 0.9, "accuracy": 0.8, "pairs": 834},
    ],
    "reliability_after_temperature": [{"confidence": 0.72, "accuracy": 0.719, "pairs": 1234}],
    "histogram": {"edges": [-2.0, 0.0, 2.0], "chosen": [50, 200], "rejected": [180, 70]},
}
FIGURES = {
    "accuracy": 0.7189, "prompt_accuracy": 0.7, "longer_wins_accuracy": 0.571, "ece": 0.0812, "temperature": 1.62,
    "ece_after_temperature": 0.0123, "chosen_mean": 0.41, "rejected_mean": -0.52,
}  # fmt: skip
WORST = {
    "prompt": "What does a fox eat?",
    "better": "Mice <b>and</b> berries.",
    "better_score": -1.5,
    "better_rank": 1.0,
    "worse": "No idea.",
    "worse_score": 2.25,
    "worse_rank": 2.5,
}


def make_graded(folder: Path, worst: list[dict[str, Any]], **more: Any) -> Path:
    """A run of the reward model alone with a report card."""
    run_dir = make_run(folder, ["reward"])
    artifact = run_dir / "reward-0123abcd"
    manifest = json.loads((artifact / "manifest.json").read_text(encoding="utf-8"))
    (artifact / "manifest.json").write_text(json.dumps(manifest | {"metrics": FIGURES}), encoding="utf-8")
    (artifact / "card.json").write_text(json.dumps(CARD | more), encoding="utf-8")
    write_lines(artifact / "worst_pairs.jsonl", worst)
    return run_dir


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def set_metrics(run_dir: Path, stage: str, **metrics: Any) -> Path:
    """Put these among the final metrics of a stage; None takes one away."""
    summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
    found = summary["stages"][stage]["metrics"] | metrics
    summary["stages"][stage]["metrics"] = {name: value for name, value in found.items() if value is not None}
    (run_dir / "summary.json").write_text(json.dumps(summary), encoding="utf-8")
    return run_dir


def page(run_dir: Path) -> str:
    """The report with runs of white space made one space."""
    return " ".join(render(run_dir).read_text(encoding="utf-8").split())


def words(html: str) -> str:
    """What a reader sees of it."""
    html = re.sub(r"<(style|script)\b.*?</\1>|</?(ins|del)>", "", html, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", html).split())


def together(html: str) -> list[str]:
    """Sentences that stand in one paragraph without a space between them."""
    paragraphs = re.findall(r"<p\b.*?</p>", html, flags=re.DOTALL)
    texts = [re.sub(r"<[^>]*>", "", text) for text in paragraphs]
    return [found for text in texts for found in re.findall(r"\S*[a-z0-9)][.;:?!][A-Z]\S*", text)]
