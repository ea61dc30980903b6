"""What a second round of feedback gains: the demo in two rounds over several seeds, its judge in the place of people.

    python benchmarks/demo_rounds.py                 three seeds, fresh run folders
    python benchmarks/demo_rounds.py --seeds 0       others
    python benchmarks/demo_rounds.py --set key=value …  with settings changed

Prints a line per seed and round; exits 1 unless the last round ends with a higher true quality than the first for every
seed, and every run within six minutes. Nothing else should run meanwhile.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

RLHF = str(Path(sys.executable).parent / "rlhf")
MOST_SECONDS = 360.0
COLUMNS = ("seed", "round", "rankings", "accuracy", "true quality", "gain", "win rate", "KL", "seconds")


def run_once(seed: int, folder: Path, settings: list[str]) -> tuple[list[dict[str, Any]], float]:
    """The rounds of one whole run, as summary.json has them, and its wall time in seconds."""
    words = [RLHF, "run", "demo_rounds", f"seed={seed}", *settings, "--run-dir", str(folder)]
    began = time.monotonic()
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
    rounds: list[dict[str, Any]] = json.loads((folder / "summary.json").read_text())["rounds"]
    return rounds, time.monotonic() - began


def lines(seed: int, rounds: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row per round, and before them the model that PPO starts from."""
    before = rounds[0]["ppo"]["metrics"]["sft_true_quality"]
    found: list[tuple[str, ...]] = [(str(seed), "SFT", "", "", f"{before:.3f}", "", "", "", "")]
    for number, entries in enumerate(rounds, start=1):
        ppo = entries["ppo"]["metrics"]
        seconds = sum(entry["seconds"] for entry in entries.values())
        found.append((
            str(seed), str(number), str(entries["feedback"]["metrics"]["num_rankings"]),
            f"{entries['reward']['metrics']['accuracy']:.3f}", f"{ppo['true_quality']:.3f}",
            f"{ppo['true_quality'] - before:+.3f}", f"{ppo['win_rate']:.3f}", f"{ppo['kl']:.2f}", f"{seconds:.0f}",
        ))  # fmt: skip
        before = ppo["true_quality"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--set", nargs="*", default=[], metavar="key=value", help="settings of the recipe to change")
    options = parser.parse_args()
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    print("".join(f"{name:>13}" for name in COLUMNS))
    good = True
    for seed in options.seeds:
        with tempfile.TemporaryDirectory() as name:
            rounds, seconds = run_once(seed, Path(name) / "run", options.set)
        for row in lines(seed, rounds):
            print("".join(f"{cell:>13}" for cell in row), flush=True)
        first, last = (rounds[place]["ppo"]["metrics"]["true_quality"] for place in (0, -1))
        better, quick = last > first, seconds <= MOST_SECONDS
        good &= better and quick
        print(
            f"{'':>13}{seconds:.0f} s in all (at most {MOST_SECONDS:.0f}{'' if quick else ', MISSED'}), round", end=""
        )
        print(f" {len(rounds)} over round 1: {last - first:+.3f}{'' if better else ' MISSED'}", flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
