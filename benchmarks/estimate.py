"""What `rlhf estimate` says beside what is measured: peak memory, and seconds of a step, of each stage.

    python benchmarks/estimate.py                  on a CPU: models of 96M parameters (about five minutes)
    python benchmarks/estimate.py 124m 1b 8b       on one GPU: models of 124M, 1.2B and 8.0B parameters

Every case is a process of its own and runs its stage for a few steps, of which the first is not timed; texts are as
long as the settings allow. Memory is the GPU's peak as torch counts it; on a CPU the process's peak resident set, less
what it held before the stage began.
"""

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

from ppo_step import SIZES, device, make_world

STEPS = 3
PPO = ("separate", "shared_trunk", "adapters")
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "90m": {
        "pretrain": {"length": 128, "global_batch_size": 8, "microbatch_size": 4},
        "sft": {"length": 128, "global_batch_size": 8, "microbatch_size": 4},
        "reward": {"length": 128, "global_batch_size": 4, "microbatch_size": 2},
        **{f"ppo {layout}": {"layout": layout} for layout in PPO},
    },
    "124m": {
        "pretrain": {"length": 1024, "global_batch_size": 32, "compile": True},
        "pretrain recomputed": {"length": 1024, "global_batch_size": 32, "gradient_checkpointing": True},
        **{f"ppo {layout}": {"layout": layout} for layout in PPO},
    },
    "1b": {
        "sft": {"length": 1024, "global_batch_size": 16},
        "sft lora": {"length": 1024, "global_batch_size": 16, "lora": {}},
        "reward": {"length": 1024, "global_batch_size": 8, "microbatch_size": 4},
        "ppo separate": {"layout": "separate"},
        "ppo separate recomputed": {"layout": "separate", "gradient_checkpointing": True},
        "ppo adapters": {"layout": "adapters"},
    },
    "8b": {"ppo adapters": {"layout": "adapters"}},
}
"""By size of the model; a case's first word is its stage. `length` is of a text in tokens."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("sizes", nargs="*", help=f"of {', '.join(CASES)}; 90m by default")
    parser.add_argument("--only", default="", help="only cases whose names hold this")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    parser.add_argument("--child", nargs=2, metavar=("CASE", "WORLD"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = options.sizes or ["90m"]
    if unknown := set(sizes) - set(CASES):
        parser.error(f"no size called {', '.join(unknown)}")
    if options.child:
        case, world = options.child
        print("\n" + json.dumps(measured(case, settings_of(case, sizes[0], Path(world)))))
        return
    print(f"{date.today()}, {device()}, torch {version('torch')}, transformers {version('transformers')}", flush=True)
    print(f"{'':31}{'GiB':>8}{'measured':>10}{'ratio':>7}{'seconds':>10}{'measured':>10}{'ratio':>7}", flush=True)
    found = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as name:
            make_world(Path(name), size)
            write_texts(Path(name), size)
            for case in (case for case in CASES[size] if options.only in case):
                row = {"size": size, "case": case, **beside(case, size, name)}
                found.append(row)
                print(line(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps({"device": device(), "cases": found}, indent=1) + "\n", encoding="utf-8")


def line(row: dict[str, Any]) -> str:
    name = f"{row['size']:6}{row['case']:25}"
    if "error" in row:
        return f"{name} failed: {row['error']}"
    gib, seconds = row["gib"], row["seconds"]
    return (
        f"{name}{gib[0]:8.2f}{gib[1]:10.2f}{gib[0] / gib[1]:7.2f}"
        f"{seconds[0]:10.3f}{seconds[1]:10.3f}{seconds[0] / seconds[1]:7.2f}"
    )


def beside(case: str, size: str, world: str) -> dict[str, Any]:
    """Peaks in GiB and seconds of a step, each as [estimated, measured]; or an error."""
    stage = case.split()[0]
    request = {"stages": {stage: settings_of(case, size, Path(world))}}
    said = subprocess.run([sys.executable, "-m", "rlhf.stages.estimate"], input=json.dumps(request), text=True,
                          capture_output=True, check=False)  # fmt: skip
    done = subprocess.run([sys.executable, __file__, size, "--child", case, world], text=True, capture_output=True,
                          check=False)  # fmt: skip
    for process in (said, done):
        if process.returncode:
            print(process.stderr[-3000:], file=sys.stderr)
            return {"error": (process.stderr.strip().splitlines() or ["no word"])[-1]}
    expected, real = (json.loads(process.stdout.splitlines()[-1]) for process in (said, done))
    of_stage = expected["stages"][stage]
    seconds = sum(phase["seconds"] for phase in of_stage["phases"])
    return {"gib": [of_stage["peak_gib"], real["gib"]], "seconds": [seconds, real["seconds"]], "phases": {
        "estimated": of_stage["phases"], "measured": real["phases"]}}  # fmt: skip


def settings_of(case: str, size: str, world: Path) -> dict[str, Any]:
    """The section of a recipe."""
    stage, given, more = case.split()[0], SIZES[size], dict(CASES[size][case])
    often = {"log_every": 1, "save_every": 1000, "report_to": [], "eval_share": 0.02}
    if stage == "ppo":
        return often | {
            "model": str(world / "policy"), "reward_model": str(world / "reward"),
            "data": str(world / "prompts.jsonl"), "num_iterations": STEPS + 1, "eval_every": 1000,
            "rollout_batch_size": given["prompts"], "max_prompt_length": given["prompt_tokens"],
            "max_new_tokens": given["new_tokens"], "microbatch_size": given["microbatch"], "learning_rate": 1e-6,
            "critic_learning_rate": 1e-6, **more,
        }  # fmt: skip
    length = more.pop("length")
    if stage == "pretrain":
        shape = given["shape"]
        return often | {
            "data": str(world / "text.txt"), "tokenizer": str(world / "policy"), "num_steps": STEPS + 1,
            "hidden_size": shape["hidden_size"], "num_layers": shape["num_hidden_layers"],
            "num_heads": shape["num_attention_heads"], "intermediate_size": shape["intermediate_size"],
            "context_length": length, "tie_embeddings": shape.get("tie_word_embeddings", False), "eval_every": 1000,
            **more,
        }  # fmt: skip
    return often | {
        "model": str(world / "policy"), "data": str(world / f"{stage}.jsonl"), "max_length": length, **more
    }  # fmt: skip


def write_texts(world: Path, size: str) -> None:
    """A text, demonstrations and rankings of numbered words, each row as long as a case wants it."""
    chance = random.Random(0)
    most = SIZES[size]["shape"]["vocab_size"]

    def words(number: int) -> str:
        return " ".join(f"w{chance.randrange(2, most)}" for _ in range(number))

    for case, given in CASES[size].items():
        stage, length = case.split()[0], given.get("length", 0)
        half = length // 2 - 1
        if stage == "pretrain":
            text = "\n\n".join(words(length) for _ in range(200))
            (world / "text.txt").write_text(text, encoding="utf-8")
        elif stage == "sft":
            rows = [{"prompt": words(half), "response": words(half)} for _ in range(128)]
            (world / "sft.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        elif stage == "reward":
            rows = [{"prompt": words(half), "chosen": words(half), "rejected": words(half)} for _ in range(64)]
            (world / "reward.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def measured(case: str, section: dict[str, Any]) -> dict[str, Any]:
    """Peak in GiB and median seconds of a step, of STEPS steps of a stage."""
    import importlib

    import torch

    from rlhf.stages import logs
    from rlhf.stages.budget_recipe import SECTIONS
    from rlhf.stages.settings_file import write_settings

    stage = case.split()[0]
    train = importlib.import_module(f"rlhf.stages.{stage}.train").train
    before = 0 if torch.cuda.is_available() else logs.peak_memory(torch.device("cpu"))
    rows: list[dict[str, Any]] = []
    moments: list[float] = []

    class EnoughError(Exception):
        """Saving is not part of what is measured."""

    def take(_folder: Path, row: dict[str, Any]) -> None:
        moments.append(time.perf_counter())
        rows.append(row)
        if len(rows) == STEPS:
            raise EnoughError

    logs.write_row = take
    with tempfile.TemporaryDirectory() as folder:
        write_settings(Path(folder), SECTIONS[stage].load(section, stage))
        with contextlib.suppress(EnoughError):
            train(folder)
    spent = [later - sooner for sooner, later in pairwise(moments)]
    phases = {name: value for name, value in rows[-1].items() if name.startswith("seconds_")}
    return {"gib": rows[-1]["peak_gib"] - before / 2**30, "seconds": statistics.median(spent), "phases": phases}


if __name__ == "__main__":
    main()
