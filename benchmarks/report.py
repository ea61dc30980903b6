"""How large the report of a long run is, how long it takes to draw, and how soon a browser shows it.

    python benchmarks/report.py              10,000 steps of each stage, a gallery of 1,000 prompts
    python benchmarks/report.py --keep DIR   the same, and the run folder stays in DIR

The figures in the run folder are made up, and written as the stages write them: metrics.jsonl with as many metrics as
PPO logs, evaluation.json, evaluation.jsonl with answers of three models. A fresh headless Chromium opens the page from
the disk; `load` is when everything in it is there, `first paint` when something is seen, both from the start of the
navigation. `filter` is a letter typed into the filter box until the page is laid out anew.
"""

import argparse
import json
import math
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "pipeline"))

from browser_world import Browser

from rlhf.stages.evaluation.records import short_hash

STAGES = ("pretrain", "sft", "reward", "ppo")
WORDS = ("the", "a", "fox", "king", "river", "sang", "found", "was", "very", "proud", "of", "“quoted”", "<b>", "&")
PPO_METRICS = (
    "score", "score_std", "kl", "kl_per_token", "non_score_reward", "rlhf_reward", "entropy", "sampler_gap",
    "eos_share", "length", "length_max", "explained_variance", "policy_loss", "value_loss", "policy_grad_norm",
    "critic_grad_norm", "clip_fraction", "value_clip_fraction", "ratio", "ratio_min", "ratio_max", "approx_kl",
    "num_updates", "kl_coef", "learning_rate", "tokens_per_second", "peak_gib",
)  # fmt: skip
OPENED = """(() => {
  const [page] = performance.getEntriesByType("navigation");
  const paints = Object.fromEntries(performance.getEntriesByType("paint").map(p => [p.name, p.startTime]));
  return [page.loadEventEnd, paints["first-paint"] ?? 0];
})()"""
TYPED = """new Promise(done => {
  const box = document.getElementById("filter"), start = performance.now();
  box.value = "fox";
  box.dispatchEvent(new Event("input"));
  requestAnimationFrame(() => setTimeout(() => done(performance.now() - start)));
})"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--prompts", type=int, default=1_000)
    parser.add_argument("--words", type=int, default=150, help="in an answer")
    parser.add_argument("--times", type=int, default=5, help="openings of the page")
    parser.add_argument("--keep", type=Path, help="where the run folder stays")
    options = parser.parse_args()
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as folder:
        run_dir = options.keep or Path(folder) / "run"
        make_run(run_dir, options.steps, options.prompts, options.words)
        began = time.monotonic()
        subprocess.run(
            [Path(sys.executable).with_name("rlhf"), "report", run_dir], check=True, stdout=subprocess.DEVNULL
        )
        seconds, used, page = time.monotonic() - began, getrusage(RUSAGE_CHILDREN), run_dir / "report.html"
        print(f"{options.steps:,} steps in each of {len(STAGES)} stages, {options.prompts:,} prompts of 3 answers")
        print(f"page                {page.stat().st_size / 1e6:8.2f} MB    bar < 5")
        print(f"rlhf report         {seconds:8.1f} s     {used.ru_utime + used.ru_stime:.1f} s of CPU")
        loads, paints, typed = zip(*(opened(page) for _ in range(options.times)), strict=True)
        for name, found, bar in (("load", loads, "bar < 2"), ("first paint", paints, "bar < 2"), ("filter", typed, "")):
            print(f"{name:20}{median(found):8.2f} s     worst {max(found):.2f}    {bar}".rstrip())


def make_run(run_dir: Path, num_steps: int, num_prompts: int, num_words: int) -> None:
    """A finished run of four stages."""
    chance = random.Random(0)
    entries = {}
    finals: dict[str, dict[str, Any]] = {
        "pretrain": {"val_loss": 2.1, "vocab_size": 32_000},
        "sft": {"eval_loss": 1.3, "base_eval_loss": 1.9},
        "reward": {"accuracy": 0.72, "longer_wins_accuracy": 0.55, "num_eval_prompts": 2000},
        "ppo": {
            "score": 2.0,
            "sft_score": 0.0,
            "kl": 25.0,
            "true_quality": 0.7,
            "sft_true_quality": 0.5,
            "findings": [],
        },
    }
    for stage in STAGES:
        folder = run_dir / f"{stage}-0123abcd"
        folder.mkdir(parents=True, exist_ok=True)
        names = (
            PPO_METRICS if stage == "ppo" else ("loss", "grad_norm", "learning_rate", "tokens_per_second", "peak_gib")
        )
        with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
            for step in range(1, num_steps + 1):
                row = {"step": step} | {name: math.log1p(step) + chance.gauss(0, 1) for name in names}
                if step % 25 == 0:
                    of_ppo = {
                        "eval_score": step / num_steps,
                        "eval_true_quality": 0.5,
                        "eval_kl": 25 * step / num_steps,
                    }
                    row |= of_ppo if stage == "ppo" else {"val_loss" if stage == "pretrain" else "accuracy": 0.7}
                file.write(json.dumps(row) + "\n")
        made = {"versions": {"torch": "2.13.0"}, "commit": "c0ffee", "processes": 8}
        manifest = {"settings": {"learning_rate": 1e-5}, "made_with": made, "files": {}, "metrics": finals[stage]}
        (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        model = f"{folder.name}/model"
        entries[stage] = {
            "status": "done", "folder": folder.name, "model": model, "seconds": 3600.0, "metrics": finals[stage],
        }  # fmt: skip
    (run_dir / "summary.json").write_text(json.dumps({"stages": entries}), encoding="utf-8")
    (run_dir / "recipe.yaml").write_text("seed: 0\n" + "# a comment\n" * 400, encoding="utf-8")
    write_evaluation(run_dir, chance, num_prompts, num_words)


def write_evaluation(run_dir: Path, chance: random.Random, num_prompts: int, num_words: int) -> None:
    def text() -> str:
        return " ".join(chance.choices(WORDS, k=num_words))

    rows = []
    for _ in range(num_prompts):
        words = text().split()
        changed = [chance.choice(WORDS) if chance.random() < 0.3 else word for word in words]
        rows.append({
            "prompt": text()[:200], "answers": {"base": text(), "sft": " ".join(words), "ppo": " ".join(changed)},
            "scores": {name: chance.gauss(0, 1) for name in ("base", "sft", "ppo")},
            "qualities": {name: chance.random() for name in ("base", "sft", "ppo")},
            "lengths": dict.fromkeys(("base", "sft", "ppo"), num_words),
        })  # fmt: skip
    (run_dir / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    pair = {"one": "ppo", "other": "sft", "by": "judge", "wins": 600, "ties": 0, "losses": 400,
            "win_rate": 0.6, "interval": [0.57, 0.63], "length_controlled": 0.58,
            "length_controlled_interval": [0.55, 0.61]}  # fmt: skip
    models = {name: {"model": name, "text_perplexity": 9.0, "length": 150.0} for name in ("base", "sft", "ppo")}
    best_of_n = [
        {"n": n, "score": math.log(n), "quality": 0.5, "kl": math.log(n) - (n - 1) / n} for n in (1, 2, 4, 8, 16)
    ]
    evaluation = {"form": "full", "settings": {}, "models": models, "pairs": [pair], "best_of_n": best_of_n,
                  "answers_digest": short_hash(rows)}  # fmt: skip
    (run_dir / "evaluation.json").write_text(json.dumps(evaluation), encoding="utf-8")


def opened(page: Path) -> tuple[float, float, float]:
    """Seconds until the page is loaded, until something is seen, and that a letter in the filter takes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        browser = Browser(Path(home))
        try:
            tab = browser.tab(browser.person())
            tab.go(page.resolve().as_uri())
            tab.wait(f"{OPENED}[0] > 0 && {OPENED}[1] > 0")
            load, paint = tab.run(OPENED)
            return load / 1e3, paint / 1e3, tab.run(TYPED) / 1e3
        finally:
            browser.close()


if __name__ == "__main__":
    main()
