"""The demo's figures over several seeds: whole wall time, peak memory, and what each stage reached.

    python benchmarks/demo.py                 three seeds, fresh run folders, about ten minutes on two cores
    python benchmarks/demo.py --seeds 0 1     others
    python benchmarks/demo.py --layouts       also: PPO in its two other memory layouts
    python benchmarks/demo.py --kill          also: kill -9 in the middle of each stage, run again, compare

Prints one row per figure with its bar; exits 1 if a bar is missed. Nothing else should run meanwhile.
"""

import argparse
import json
import math
import os
import platform
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

RLHF = [str(Path(sys.executable).parent / "rlhf")]
STAGES = ("pretrain", "sft", "reward", "ppo")

LAYOUTS = {
    "shared_trunk": ["ppo.layout=shared_trunk"],
    "adapters": ["ppo.layout=adapters", "ppo.learning_rate=1e-3", "ppo.critic_learning_rate=2e-3"],
}
"""Adapters, which are few weights, want larger steps."""

Figures = dict[str, Any]
BARS: dict[str, tuple[str, Callable[[Figures], bool]]] = {
    "wall_seconds": ("≤ 180", lambda f: f["wall_seconds"] <= 180),
    "peak_gib": ("≤ 3", lambda f: f["peak_gib"] <= 3),
    "pretrain.val_loss": ("< ln(V)/2", lambda f: f["pretrain.val_loss"] < math.log(f["pretrain.vocab_size"]) / 2),
    "sft.eval_loss": ("< base", lambda f: f["sft.eval_loss"] < f["sft.base_eval_loss"]),
    "sft.base_eval_loss": ("", lambda f: True),
    "reward.accuracy": ("≥ 0.80", lambda f: f["reward.accuracy"] >= 0.80),
    "reward.longer_wins_accuracy": (
        "≤ acc − 0.10", lambda f: f["reward.longer_wins_accuracy"] <= f["reward.accuracy"] - 0.10,
    ),
    "ppo.true_quality": ("≥ 1.5 × sft, or half way to 1", lambda f: f["ppo.true_quality"] >= quality_bar(f)),
    "ppo.sft_true_quality": ("", lambda f: True),
    "ppo.win_rate": ("≥ 0.65", lambda f: f["ppo.win_rate"] >= 0.65),
    "ppo.kl": ("≤ 15", lambda f: f["ppo.kl"] <= 15),
    "ppo.eos_share": ("≥ sft", lambda f: f["ppo.eos_share"] >= f["ppo.sft_eos_share"]),
    "ppo.sft_eos_share": ("", lambda f: True),
    "rerun_seconds": ("< 2", lambda f: f["rerun_seconds"] < 2),
}  # fmt: skip


def quality_bar(figures: Figures) -> float:
    """One and a half times SFT's quality, or half of what is missing to 1, whichever is easier."""
    sft = figures["ppo.sft_true_quality"]
    return min(1.5 * sft, sft + (1 - sft) / 2)


def run_once(seed: int, folder: Path) -> Figures:
    """One whole `rlhf run demo`, and a second one that reuses everything."""
    words = [*RLHF, "run", "demo", f"seed={seed}", "--run-dir", str(folder)]
    began = time.monotonic()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    figures: Figures = {"wall_seconds": time.monotonic() - began, "peak_gib": usage.ru_maxrss / 2**20}
    if status:
        raise SystemExit(f"rlhf run demo seed={seed} ended with status {status}")
    began = time.monotonic()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    figures["rerun_seconds"] = time.monotonic() - began
    summary = json.loads((folder / "summary.json").read_text())
    for stage in STAGES:
        figures |= {f"{stage}.{name}": value for name, value in summary["stages"][stage]["metrics"].items()}
        figures[f"{stage}_seconds"] = summary["stages"][stage]["seconds"]
    return figures


def run_layout(seed: int, folder: Path, layout: str) -> Figures:
    """PPO again, in another layout, from the models that are there."""
    words = [*RLHF, "run", "demo", f"seed={seed}", "--run-dir", str(folder), *LAYOUTS[layout]]
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    ppo = json.loads((folder / "summary.json").read_text())["stages"]["ppo"]
    return {"ppo_seconds": ppo["seconds"], **{f"ppo.{name}": value for name, value in ppo["metrics"].items()}}


def table(runs: dict[int, Figures], title: str = "", stages: tuple[str, ...] = STAGES) -> bool:
    """Print the figures of all seeds; True if every bar holds."""
    print(f"{title:28}" + "".join(f"{f'seed {seed}':>12}" for seed in runs) + "   bar")
    good = True
    for name, (bar, holds) in BARS.items():
        if any(name not in figures for figures in runs.values()):
            continue  # another stage's
        held = [holds(figures) for figures in runs.values()]
        good &= all(held)
        cells = "".join(f"{figures[name]:>12.3f}" for figures in runs.values())
        print(f"{name:28}{cells}   {bar}{'' if all(held) else '   MISSED'}")
    for stage in stages:
        cells = "".join(f"{figures[f'{stage}_seconds']:>12.1f}" for figures in runs.values())
        print(f"{f'{stage} seconds':28}{cells}")
    return good


def command_line_times() -> None:
    """CPU seconds of the commands that must not import torch."""
    for words in (["--help"], ["plan", "demo", "reward.learning_rate=1e-4"]):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([*RLHF, *words], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"rlhf {' '.join(words)}: {cpu:.2f} s of CPU")


def killed_run(seed: int, folder: Path, undisturbed: Path) -> bool:
    """Kill -9 once in the middle of each stage and run again: each must resume from a checkpoint, and end with the
    weights of the undisturbed run of the same seed."""
    words = [*RLHF, "run", "demo", f"seed={seed}", "--run-dir", str(folder)]
    killed: dict[str, tuple[int, int] | None] = {}
    resumed: dict[str, str] = {}
    for stage in (*STAGES, None):  # the last run goes through
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        if stage:
            killed[stage] = kill_midway(process, folder, stage)
        said = process.communicate()[0]
        resumed |= dict(re.findall(r"^(\w+): resuming from step (\d+)", said, re.MULTILINE))
    good = True
    for stage in STAGES:
        made = next(folder.glob(f"{stage}-*/manifest.json"), None)
        ours, theirs = (
            json.loads((run / made.parent.name / "manifest.json").read_text())["files"]["model/model.safetensors"]
            if made
            else None
            for run in (folder, undisturbed)
        )
        step, steps = killed[stage] or (None, None)
        print(f"{stage}: killed at step {step} of {steps}, resumed from step {resumed.get(stage)}, weights ", end="")
        print("equal" if ours == theirs else "DIFFER")
        good &= step is not None and int(resumed.get(stage, 0)) > 0 and ours == theirs is not None
    return good


def kill_midway(process: subprocess.Popen[str], folder: Path, stage: str) -> tuple[int, int] | None:
    """Kill a run when `stage` is half done; its step and number of steps, None if it ended before that."""
    while process.poll() is None:
        time.sleep(0.02)
        for status in folder.glob(f"{stage}-*/status.json"):
            told = json.loads(status.read_text())
            if told["state"] == "running" and 0 < told["steps"] / 2 <= told["step"] < told["steps"]:
                process.kill()
                process.wait()
                return None if (status.parent / "manifest.json").exists() else (told["step"], told["steps"])
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--layouts", action="store_true", help="also PPO in its other memory layouts")
    parser.add_argument("--kill", action="store_true", help="also kill -9 in the middle of each stage")
    options = parser.parse_args()
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as name:
        runs = {seed: run_once(seed, Path(name) / str(seed)) for seed in options.seeds}
        good = table(runs)
        command_line_times()
        for layout in LAYOUTS if options.layouts else ():
            others = {seed: run_layout(seed, Path(name) / str(seed), layout) for seed in options.seeds}
            good &= table(others, f"ppo.layout={layout}", ("ppo",))
        if options.kill:
            good &= killed_run(options.seeds[0], Path(name) / "killed", Path(name) / str(options.seeds[0]))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
