"""The demo's figures over several seeds: whole wall time, peak memory, and what each stage reached.

    python benchmarks/demo.py                 three seeds, fresh run folders, about ten minutes on two cores
    python benchmarks/demo.py --seeds 0 1     others
    python benchmarks/demo.py --kill          also: kill -9 in the middle of each stage, run again, compare

Prints one row per figure with its bar; exits 1 if a bar is missed. Nothing else should run meanwhile.
"""

import argparse
import json
import math
import os
import platform
import resource
import signal
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


def table(runs: dict[int, Figures]) -> bool:
    """Print the figures of all seeds; True if every bar holds."""
    print(f"{'':28}" + "".join(f"{f'seed {seed}':>12}" for seed in runs) + "   bar")
    good = True
    for name, (bar, holds) in BARS.items():
        held = [holds(figures) for figures in runs.values()]
        good &= all(held)
        cells = "".join(f"{figures[name]:>12.3f}" for figures in runs.values())
        print(f"{name:28}{cells}   {bar}{'' if all(held) else '   MISSED'}")
    for stage in STAGES:
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


def killed_run(folder: Path, undisturbed: Path) -> bool:
    """Kill -9 once in the middle of each stage, run again; the weights must equal those of the undisturbed run."""
    words = [*RLHF, "run", "demo", "--run-dir", str(folder)]
    for stage in STAGES:
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        while process.poll() is None:
            time.sleep(0.05)
            status = next(folder.glob(f"{stage}-*/status.json"), None)
            told = json.loads(status.read_text()) if status else {"step": 0, "steps": 1}
            if told["step"] >= told["steps"] / 2 > 0.5:
                process.send_signal(signal.SIGKILL)
                break
        process.wait()
        print(f"killed in {stage} at step {told['step']} of {told['steps']}")
    again = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
    print("\n".join(line for line in again.splitlines() if "resum" in line))
    same = True
    for stage in STAGES:
        ours, theirs = (
            json.loads(next(f.glob(f"{stage}-*/manifest.json")).read_text())["files"]["model/model.safetensors"]
            for f in (folder, undisturbed)
        )
        print(f"{stage}: weights {'equal' if ours == theirs else 'DIFFER'} those of the undisturbed run")
        same &= ours == theirs
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--kill", action="store_true", help="also kill -9 in the middle of each stage")
    options = parser.parse_args()
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as name:
        runs = {seed: run_once(seed, Path(name) / str(seed)) for seed in options.seeds}
        good = table(runs)
        command_line_times()
        if options.kill:
            good &= killed_run(Path(name) / "killed", Path(name) / str(options.seeds[0]))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
