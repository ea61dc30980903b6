"""Peak memory and seconds of a PPO iteration by layout, each in a process of its own.

    python benchmarks/ppo_memory.py                      three layouts of a 90M model, on a CPU (about three minutes)
    python benchmarks/ppo_memory.py 1b                   the same of a 1.2B model, on a GPU
    python benchmarks/ppo_memory.py 8b adapters          one layout of an 8.0B model (Llama 3's shape) in bf16

Random models; the reward model of `adapters` is an adapter too. Memory is the GPU's peak as torch counts it; on a CPU
the process's peak resident set, less what it held before the stage began. The first iteration is not timed.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from worlds import build_world

LAYOUTS = ("separate", "shared_trunk", "adapters")
LLAMA3 = {"vocab_size": 128256, "max_position_embeddings": 1024, "num_attention_heads": 32, "num_key_value_heads": 8}
SIZES: dict[str, dict[str, Any]] = {
    "90m": {
        "shape": {
            "vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10,
            "num_attention_heads": 12, "max_position_embeddings": 1024,
        },
        "prompts": 8, "prompt_tokens": 32, "new_tokens": 32, "microbatch": 2,
    },
    "1b": {
        "shape": {**LLAMA3, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                  "tie_word_embeddings": True},
        "prompts": 64, "prompt_tokens": 128, "new_tokens": 256, "microbatch": 16,
    },
    "8b": {
        "shape": {**LLAMA3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        "prompts": 64, "prompt_tokens": 128, "new_tokens": 256, "microbatch": 8,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("size", choices=SIZES, nargs="?", default="90m")
    parser.add_argument("layouts", nargs="*", default=LAYOUTS, help=f"of {', '.join(LAYOUTS)}; all by default")
    parser.add_argument("--iterations", type=int, default=2, help="the first is not timed")
    parser.add_argument("--settings", default="{}", help="further settings of ppo, as JSON")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.iterations < 2:
        parser.error("--iterations must be 2 or more: the first is not timed")
    if wrong := set(options.layouts) - set(LAYOUTS):
        parser.error(f"no layout called {', '.join(wrong)}")
    if options.child:
        found = run(options.child, SIZES[options.size], options.layouts[0], options.iterations,
                    json.loads(options.settings))  # fmt: skip
        print(json.dumps(found))
        return
    print(f"{date.today()}, {device()}, Python {platform.python_version()}, {options.size}")
    print(f"{'layout':16}{'peak GiB':>10}{'of separate':>14}{'seconds':>10}")
    with tempfile.TemporaryDirectory() as name:
        builder = multiprocessing.get_context("spawn").Process(target=build, args=(Path(name), options.size))
        builder.start()
        builder.join()
        if builder.exitcode:
            sys.exit("no world to measure in")
        first = None
        for layout in options.layouts:
            words = [sys.executable, __file__, options.size, layout, "--child", name]
            words += ["--iterations", str(options.iterations), "--settings", options.settings]
            answer = subprocess.run(words, capture_output=True, text=True, check=False)
            if answer.returncode:
                print(f"{layout:16} failed: {answer.stderr.strip().splitlines()[-1]}")
                continue
            found = json.loads(answer.stdout.splitlines()[-1])
            first = found["gib"] if layout == "separate" else first
            share = f"{found['gib'] / first:.2f}" if first else "–"
            print(f"{layout:16}{found['gib']:>10.2f}{share:>14}{found['seconds']:>10.2f}", flush=True)


def device() -> str:
    """What the figures belong to."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"{platform.machine()}, {os.cpu_count()} cores"


def run(world: Path, size: dict[str, Any], layout: str, iterations: int, more: dict[str, Any]) -> dict[str, float]:
    """Peak memory in GiB, and seconds of an iteration."""
    import torch

    from rlhf.stages.artifact import write_settings
    from rlhf.stages.logs import peak_memory
    from rlhf.stages.ppo.config import PPOSettings
    from rlhf.stages.ppo.train import train
    from rlhf.stages.runtime import Runtime

    settings = PPOSettings.load(
        {
            "model": str(world / "policy"), "reward_model": str(world / "reward"),
            "data": str(world / "prompts.jsonl"), "num_iterations": iterations + 1,
            "rollout_batch_size": size["prompts"], "max_prompt_length": size["prompt_tokens"],
            "max_new_tokens": size["new_tokens"], "microbatch_size": size["microbatch"], "learning_rate": 1e-6,
            "critic_learning_rate": 1e-6, "eval_every": 1000, "save_every": 1000, "eval_share": 0.02,
            "layout": layout, "report_to": [], **more,
        },
        "ppo",
    )  # fmt: skip
    moments: list[float] = []
    peak = 0.0

    class EnoughError(Exception):
        """Saving is not part of what is measured."""

    def log(self: Any, *_arguments: Any, **_options: Any) -> None:
        nonlocal peak
        moments.append(time.monotonic())
        if len(moments) == iterations:
            peak = peak_memory(self.device)
            raise EnoughError

    Runtime.log = log  # type: ignore[method-assign]
    before = 0.0 if torch.cuda.is_available() else peak_memory(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        write_settings(Path(folder), settings)
        with contextlib.suppress(EnoughError):
            train(folder)
    return {"gib": (peak - before) / 2**30, "seconds": (moments[-1] - moments[0]) / (len(moments) - 1)}


def build(world: Path, size: str) -> None:
    """Models and prompts; the reward model once whole, and once as an adapter of the policy's start."""
    import torch

    from rlhf.stages import adapters
    from rlhf.stages.artifact import model_digest
    from rlhf.stages.models import ScalarModel, load_policy, load_tokenizer
    from rlhf.stages.settings import LoraSettings

    given = SIZES[size]
    build_world(world, given["shape"], given["prompts"] + 8, given["prompt_tokens"], half=size == "8b")
    base = load_policy(str(world / "policy"), load_tokenizer(str(world / "policy")), torch.bfloat16)
    classifier = adapters.classifier_on(base)
    adapters.add_lora(classifier, LoraSettings())
    digest = model_digest(str(world / "policy"), "policy")
    adapters.save_scalar(world / "reward" / "adapter", ScalarModel(classifier), digest)


if __name__ == "__main__":
    main()
