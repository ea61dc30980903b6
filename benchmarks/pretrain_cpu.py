"""The pretrain stage beside a bare PyTorch loop of the same model on the same blocks, in turn, on a CPU.

    python benchmarks/pretrain_cpu.py

Tokens per second of each, as the median over its steps, and their ratio, for two sizes; then how long the stage
takes from the start of its process to the end of its first step.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

SIZES = {"1M": (128, 4), "5M": (256, 6)}
BLOCK, BATCH = 128, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=15, help="of each run; the first five are not timed")
    parser.add_argument("--rounds", type=int, default=2, help="how often each side has its turn")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        side, size, folder = options.child
        print(json.dumps({"stage": stage, "bare": bare}[side](Path(folder), size, options.steps)))
        return
    print(f"{date.today()}, {platform.machine()}, Python {platform.python_version()}")
    print(f"{'size':6}{'stage tokens/s':>16}{'bare tokens/s':>16}{'stage / bare':>14}")
    with tempfile.TemporaryDirectory() as name:
        text = Path(name) / "text.txt"
        text.write_text(a_text(400_000), encoding="utf-8")
        for size in SIZES:
            rates: dict[str, list[float]] = {"stage": [], "bare": []}
            for turn in range(options.rounds):
                for side in ("stage", "bare"):  # bare has the shape from the stage
                    folder = Path(name) / f"{size}-{turn}"
                    words = [sys.executable, __file__, "--child", side, size, str(folder)]
                    answer = subprocess.run(
                        [*words, "--steps", str(options.steps)], capture_output=True, text=True, check=False
                    )
                    if answer.returncode:
                        sys.exit(answer.stderr)
                    rates[side].append(json.loads(answer.stdout.splitlines()[-1]))
            ours, theirs = (statistics.median(rates[side]) for side in ("stage", "bare"))
            print(f"{size:6}{ours:16,.0f}{theirs:16,.0f}{ours / theirs:14.2f}")
        folder = Path(name) / "start"
        write(folder, "1M", text, num_steps=1)
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "rlhf.stages.pretrain", str(folder)], check=True, capture_output=True)
        print(f"a stage of one step, whole process: {time.monotonic() - began:.1f} s")


def a_text(length: int) -> str:
    """Sentences of some hundred words, by a rule."""
    words = [f"{a}{b}" for a in "bcdfglmnprst" for b in ("ade", "irun", "ole", "um", "anti", "eso", "ix", "ara")]
    state, parts, size = 1, [], 0
    while size < length:
        state = state * 1103515245 % 2**31 + 12345
        parts.append(words[(state >> 8) % len(words)] + (". " if state % 11 == 0 else " "))
        size += len(parts[-1])
    return "".join(parts)


def write(folder: Path, size: str, text: Path, num_steps: int) -> None:
    """The stage's folder with its settings."""
    from rlhf.stages.pretrain.config import PretrainSettings
    from rlhf.stages.settings_file import write_settings

    width, layers = SIZES[size]
    fields: dict[str, Any] = {
        "data": str(text), "vocab_size": 512, "hidden_size": width, "num_layers": layers, "num_heads": width // 64,
        "context_length": BLOCK, "global_batch_size": BATCH, "num_steps": num_steps, "eval_every": 10**6,
        "log_every": 1, "save_every": 10**6, "report_to": [],
    }  # fmt: skip
    write_settings(folder, PretrainSettings.load(fields, "pretrain"))


def stage(folder: Path, size: str, steps: int) -> float:
    """Tokens per second of our loop."""
    from rlhf.stages.artifact import Artifact
    from rlhf.stages.pretrain.train import train

    write(folder / "stage", size, folder.parent / "text.txt", steps)
    train(folder / "stage")
    rows = Artifact(folder / "stage").metrics
    return statistics.median(row["tokens_per_second"] for row in rows[5:-1])  # the last one evaluates, too


def bare(folder: Path, size: str, steps: int) -> float:
    """Tokens per second of what one would write by hand."""
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "stage" / "model"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batches = torch.randint(model.config.vocab_size, (steps, BATCH, BLOCK + 1))
    rates = []
    for batch in batches:
        began = time.perf_counter()
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        rates.append(BATCH * BLOCK / (time.perf_counter() - began))
    return statistics.median(rates[5:])


if __name__ == "__main__":
    main()
