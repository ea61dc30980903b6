"""K-wise training of the reward model beside pairwise training on the same rankings, by forward passes of answers.

    python benchmarks/reward_kwise.py             two seeds, four to five minutes of CPU
    python benchmarks/reward_kwise.py --seeds 0   others

The demo's SFT model learns from rankings of four answers. Pairwise: each pair is a row of its own, whose two answers
are read for it; one pass over all pairs. K-wise: all answers of a prompt lie in one step, and each is read once for up
to three pairs. Both read the same number of answers in a step (24, and 64), make the same number of steps and so of
forward passes, and have the same learning rates. Accuracy is that on the same held-out rankings, without noise.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from datetime import date
from itertools import permutations
from pathlib import Path
from typing import Any

RANKINGS, ANSWERS, NUM_EVALS = 800, 4, 10
ANSWERS_PER_STEP = (24, 64)
WORLD = "rlhf.recipes.demo_world"
Curve = list[tuple[int, float]]  # (forward passes of answers so far, accuracy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    seeds = parser.parse_args().seeds
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        words = [str(Path(sys.executable).parent / "rlhf"), "run", "demo", "--to", "sft", "--run-dir", str(run)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        model = next(run.glob("sft-*")) / "model"
        for seed in seeds:
            compare(Path(name) / f"seed-{seed}", str(model), seed)


def compare(folder: Path, model: str, seed: int) -> None:
    """Train both ways with small and large steps, and print what they reached by when."""
    from rlhf.data.rows import prompt_key, read_rankings
    from rlhf.data.sources import Source
    from rlhf.data.split import split_by_prompt

    options = {"num": RANKINGS, "answers": ANSWERS, "seed": seed}
    every = read_rankings(Source(path=f"{WORLD}:rankings", options=options)).rows
    rows, held_out = split_by_prompt(every, lambda row: prompt_key(row.prompt), 0.2)
    folder.mkdir()
    ranked = [{"prompt": row.prompt, "responses": row.responses, "ranks": row.ranks} for row in rows]
    pairs = [
        {"prompt": row.prompt, "chosen": row.responses[i], "rejected": row.responses[j]}
        for row in rows
        for i, j in permutations(range(ANSWERS), 2)
        if row.ranks[i] < row.ranks[j]
    ]
    data = {"pairs": write(folder / "pairs.jsonl", pairs), "ranked": write(folder / "ranked.jsonl", ranked)}
    kept = [{"prompt": row.prompt, "responses": row.responses, "ranks": row.ranks} for row in held_out]
    common = {"model": model, "seed": seed, "eval_data": write(folder / "held_out.jsonl", kept)}
    num_passes = 2 * len(pairs)

    def train(name: str, source: str, num_rows: int, per_step: int, answers: int) -> Curve:
        num_steps = num_passes // (per_step * answers)
        fields = {
            "data": data[source], "global_batch_size": per_step, "eval_every": max(num_steps // NUM_EVALS, 1),
            "num_epochs": (num_steps - 0.5) * per_step / num_rows,  # rounded up to whole steps
        }  # fmt: skip
        found = curve(folder / name, {**common, **fields})
        return [(step * per_step * answers, accuracy) for step, accuracy in found]

    curves = {}
    for size in ANSWERS_PER_STEP:
        curves[f"pairwise, {size}"] = train(f"pairwise-{size}", "pairs", len(pairs), size // 2, 2)
        curves[f"K-wise, {size}"] = train(f"kwise-{size}", "ranked", len(rows), size // ANSWERS, ANSWERS)
    print(f"\nseed {seed}: {len(rows)} rankings of {ANSWERS} answers, {len(pairs)} pairs, {len(held_out)} held out")
    print("forward passes" + "".join(f"{name:>14}" for name in curves))
    for share in range(1, 6):
        passes = share * num_passes // 5
        print(f"{passes:>14}" + "".join(f"{latest(found, passes):>14.3f}" for found in curves.values()))
    for size in ANSWERS_PER_STEP:
        passes, target = curves[f"pairwise, {size}"][-1]
        reached = next((done for done, accuracy in curves[f"K-wise, {size}"] if accuracy >= target), None)
        kwise = f"{reached}, {passes / reached:.1f} times fewer" if reached else "not reached"
        print(f"{size} answers a step, forward passes to {target:.3f}: pairwise {passes}, K-wise {kwise}")


def curve(folder: Path, fields: dict[str, Any]) -> list[tuple[int, float]]:
    """(step, held-out accuracy) of the stage's training."""
    from rlhf.stages.artifact import Artifact
    from rlhf.stages.reward.config import RewardSettings
    from rlhf.stages.settings_file import write_settings

    settings = {
        **fields, "judge": f"{WORLD}:judge", "pooling": "mean", "max_length": 96, "learning_rate": 1e-3,
        "log_every": 10_000, "save_every": 10_000, "report_to": [],
    }  # fmt: skip
    write_settings(folder, RewardSettings.load(settings, "reward"))
    words = [sys.executable, "-m", "rlhf.stages.reward", str(folder)]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    return [(row["step"], row["accuracy"]) for row in Artifact(folder).metrics if "accuracy" in row]


def latest(found: Curve, passes: int) -> float:
    """The accuracy that was measured last, `passes` forward passes into the training."""
    return [accuracy for done, accuracy in found if done <= passes][-1]


def write(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


if __name__ == "__main__":
    main()
