"""What checkpoints cost, and how soon a run that was killed trains again.

    python benchmarks/checkpoints.py                      about half an hour on two cores
    python benchmarks/checkpoints.py --small --rounds 1   a demo so short that its figures say nothing
    python benchmarks/checkpoints.py --only resume        or: cost

Cost: each stage of the demo with a checkpoint every 10 steps and with none, in turn, from the same inputs; seconds of
the stage without its imports, the least of the rounds. Bar: 5 % over all stages.

Resume: a decoder of gpt3-125m's shape in pretrain is killed after its first checkpoint; seconds from the start of the
next process to the end of the first step that is new. Bar: 15 s.

Prints a table; exits 1 if a bar is missed. Nothing else should run meanwhile.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

RLHF = str(Path(sys.executable).parent / "rlhf")
STAGES = ("pretrain", "sft", "reward", "ppo")
NEVER = 10**9
SMALL = [
    *("pretrain.num_steps=12", "pretrain.data.options.num=400", "sft.data.options.num=400", "sft.num_epochs=1"),
    *("reward.data.options.num=200", "reward.num_epochs=1", "reward.num_sampled_answers=0", "ppo.num_iterations=11"),
    *("ppo.rollout_batch_size=8", "ppo.num_eval_samples=1", "ppo.max_new_tokens=8"),
]
TIMED = """
import importlib, sys, time
train = importlib.import_module(f"rlhf.stages.{sys.argv[1]}.train").train
began = time.monotonic()
train(sys.argv[2])
print(time.monotonic() - began)
"""
COST_BAR, RESUME_BAR = 0.05, 15.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--rounds", type=int, default=2, help="how often each side of the cost has its turn")
    parser.add_argument("--only", choices=("cost", "resume"))
    parser.add_argument("--small", action="store_true", help="a demo so short that its figures say nothing")
    options = parser.parse_args()
    print(f"{date.today()}, {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    good = True
    with tempfile.TemporaryDirectory() as name:
        if options.only != "resume":
            good &= cost(Path(name), options.rounds, SMALL if options.small else [])
        if options.only != "cost":
            good &= resume(Path(name))
    sys.exit(0 if good else 1)


def cost(home: Path, rounds: int, changes: list[str]) -> bool:
    """Print the seconds of each stage with and without checkpoints; True if their share is below the bar."""
    run = home / "demo"
    subprocess.run([RLHF, "run", "demo", *changes, "--run-dir", str(run)], check=True, stdout=subprocess.DEVNULL)
    seconds: dict[str, dict[int, list[float]]] = {stage: {10: [], NEVER: []} for stage in STAGES}
    for turn in range(rounds):
        for stage in STAGES:
            for save_every in (NEVER, 10) if turn % 2 == 0 else (10, NEVER):
                seconds[stage][save_every].append(stage_again(run, stage, save_every))
    print(f"{'stage':12}{'save_every 10':>15}{'never':>10}{'share':>9}")
    total = {10: 0.0, NEVER: 0.0}
    for stage, found in seconds.items():
        least = {save_every: min(values) for save_every, values in found.items()}
        total = {save_every: total[save_every] + least[save_every] for save_every in total}
        print(f"{stage:12}{least[10]:13.1f} s{least[NEVER]:8.1f} s{least[10] / least[NEVER] - 1:9.1%}")
    share = total[10] / total[NEVER] - 1
    missed = "" if share < COST_BAR else "   MISSED"
    print(f"{'all':12}{total[10]:13.1f} s{total[NEVER]:8.1f} s{share:9.1%}   bar < {COST_BAR:.0%}{missed}")
    return not missed


def stage_again(run: Path, stage: str, save_every: int) -> float:
    """Train a stage of a finished run once more, by hand; its seconds, from the settings to the seal."""
    settings = next(run.glob(f"{stage}-*/settings.yaml")).read_text()
    with tempfile.TemporaryDirectory(dir=run) as name:
        changed = re.sub(r"^save_every: .*$", f"save_every: {save_every}", settings, flags=re.MULTILINE)
        (Path(name) / "settings.yaml").write_text(changed)
        answer = subprocess.run([sys.executable, "-c", TIMED, stage, name], check=True, capture_output=True, text=True)
    return float(answer.stdout.split()[-1])


def resume(home: Path) -> bool:
    """Print how long a killed pretraining of 124 million weights takes to train again; True if below the bar."""
    (home / "text.txt").write_text("\n\n".join(f"Number {n} is followed by number {n + 1}." for n in range(2000)))
    (home / "large.yaml").write_text(
        f"pretrain: {{data: '{home / 'text.txt'}', preset: gpt3-125m, pad_vocab_to: 50304, block_size: 64, "
        "num_steps: 1000, global_batch_size: 1, eval_every: 1000, save_every: 4, log_every: 1, report_to: []}\n"
    )
    words = [RLHF, "run", str(home / "large.yaml"), "--run-dir", str(home / "large")]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL) as first:
        while not list((home / "large").glob("pretrain-*/checkpoints/step-*4/state.json")):
            if first.poll() is not None:
                sys.exit(f"the run ended with {first.returncode} before its first checkpoint")
            time.sleep(0.05)
        first.kill()
    began = time.monotonic()
    size = seconds = 0.0
    step = 0
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as second:
        assert second.stdout is not None
        for line in second.stdout:
            if found := re.match(r"pretrain: ([\d,]+) parameters", line):
                size = int(found[1].replace(",", ""))
            if found := re.match(r"pretrain: step (\d+)/", line):
                step, seconds = int(found[1]), time.monotonic() - began
                break
        second.kill()
    good = step > 4 and seconds <= RESUME_BAR
    print(
        f"{size / 1e6:.0f}M weights, killed after the checkpoint of step 4: step {step} is done {seconds:.1f} s after "
        f"the start   bar ≤ {RESUME_BAR:.0f} s{'' if good else '   MISSED'}"
    )
    return good


if __name__ == "__main__":
    main()
