"""Steps of the SFT and the reward stage beside TRL's SFTTrainer and RewardTrainer, same model and same rows.

    python benchmarks/sft_reward.py sft [--rounds 2] [--json FILE]      on one GPU; reward likewise
    python benchmarks/sft_reward.py both --small                        on a CPU: minutes

A random Llama of 124M weights (12 layers, width 768, vocabulary 50304, tied); rows of unlike lengths: prompts of 16 to
256 tokens, responses of 16 to 768, uniformly. A step of SFT takes 64 rows, one of reward 32 pairs; what each side reads
in step n is the same. bf16 autocast, AdamW, clipped gradients, a line of metrics every ten steps, no saving. The sides
take turns, each in a process of its own. TRL has its turns as it comes (it checkpoints activations), without that, and
with torch_compile as well; it pads 32 texts at a time. Ours packs, and has a turn with `compile`, one with Liger's
kernels (SFT alone) and one with padding. Steps are timed from the eleventh on; tokens are those of the rows without
padding; peaks are torch's, on a CPU those of the process. `loss` is the mean over the first ten steps: the same work
gives the same number. `processor` is processor time per step, which a busy machine changes less. `start` is the time
from the start of the process to the end of the tenth step. Ratios are to TRL without checkpointing.
"""

import argparse
import json
import math
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from worlds import EOS, PAD, numbered_words

WARM_UP = 10
BASELINE = "trl"
SIDES: dict[str, dict[str, Any]] = {
    "trl": {"gradient_checkpointing": False},
    "ours padded": {"packing": False},
    "ours": {},
    "ours compiled": {"compile": True},
    "ours liger": {"args": {"use_liger_kernel": True}},
    "trl as it comes": {"gradient_checkpointing": True},
    "trl compiled": {"gradient_checkpointing": False, "torch_compile": True},
}
LARGE: dict[str, Any] = {
    "shape": {
        "vocab_size": 50304, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 12, "max_position_embeddings": 1024, "tie_word_embeddings": True,
    },
    "prompt": (16, 256), "response": (16, 767), "batch": {"sft": 64, "reward": 32}, "texts_at_once": 32, "steps": 40,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "shape": LARGE["shape"] | {
        "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4,
        "num_attention_heads": 4, "max_position_embeddings": 128,
    },
    "prompt": (4, 32), "response": (4, 95), "batch": {"sft": 16, "reward": 8}, "texts_at_once": 16, "steps": 30,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("what", choices=("sft", "reward", "both"))
    parser.add_argument("--small", action="store_true", help="a model and rows for a CPU")
    parser.add_argument("--rounds", type=int, default=2, help="how often the sides take turns")
    parser.add_argument("--only", help="the baseline and these sides alone, with commas between them")
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--world", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    size = SMALL if options.small else LARGE
    if options.child:
        run = run_trl if options.child.startswith("trl") else run_ours
        print("\n" + json.dumps(run(options.what, options.world, size, SIDES[options.child])))
        return
    import torch

    card = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"{platform.machine()}, {os.cpu_count()} cores"
    )
    made_with = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl"))
    print(f"{date.today()}, {card}, {made_with}", flush=True)
    found = {}
    with tempfile.TemporaryDirectory() as name:
        for what in ("sft", "reward") if options.what == "both" else (options.what,):
            build(what, Path(name) / what, size)
            found[what] = measure(what, Path(name) / what, options)
    if options.json:
        figures = {"date": str(date.today()), "card": card, "made_with": made_with, "figures": found}
        options.json.write_text(json.dumps(figures, indent=1))


def measure(what: str, world: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Let the sides take turns and print the table; a side that fails says why and the others go on."""
    names = list(SIDES) if options.only is None else [BASELINE, *options.only.split(",")]
    if unknown := set(names) - set(SIDES):
        sys.exit(f"--only: no side called {', '.join(sorted(unknown))}; there are {', '.join(SIDES)}")
    if what == "reward":  # whose section has no `args`
        names = [name for name in names if "args" not in SIDES[name]]
    if options.small:  # without a GPU nothing is compiled, nor packed unasked, and Liger has no kernels
        names = [name for name in names if "compiled" not in name and name not in ("ours", "ours liger")]
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    table: dict[str, Any] = {}
    columns = ("ms / step", "processor", "tokens / s", "ratio", "peak GiB", "loss", "start s")
    print(f"{what:18}" + "".join(f"{column:>12}" for column in columns), flush=True)
    for number in range(options.rounds):
        for name in (name for name in names if name not in table):
            words = [sys.executable, __file__, what, "--child", name, "--world", str(world)]
            words += ["--small"] if options.small else []
            answer = subprocess.run(words, capture_output=True, text=True, check=False, cwd=world)
            if answer.returncode:
                table[name] = {"failed": answer.stderr.strip()[-1500:]}
                print(f"{name:18} failed: {table[name]['failed']}", flush=True)
                continue
            turns[name].append(json.loads(answer.stdout.splitlines()[-1]))
            if number == options.rounds - 1:
                row = {key: statistics.median(turn[key] for turn in turns[name]) for key in turns[name][0]}
                row["ratio"] = table.get(BASELINE, row).get("ms", math.nan) / row["ms"]
                table[name] = {**row, "turns": turns[name]}
                print(
                    f"{name:18}{row['ms']:12.1f}{row['processor_ms']:12.1f}{row['rate']:12,.0f}{row['ratio']:11.2f}x"
                    f"{row['peak']:12.2f}{row['loss']:12.4f}{row['start']:12.1f}", flush=True,
                )  # fmt: skip
    return table


def build(what: str, world: Path, size: dict[str, Any]) -> None:
    """model/, rows.jsonl and held_out.jsonl."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(**size["shape"], bos_token_id=None, eos_token_id=EOS, pad_token_id=PAD, num_labels=1)
    model = (LlamaForCausalLM if what == "sft" else LlamaForSequenceClassification)(config)
    model.save_pretrained(world / "model")
    numbered_words(config.vocab_size).save_pretrained(world / "model")
    chance = random.Random(0)

    def text(limits: tuple[int, int]) -> str:
        return " ".join(f"w{chance.randrange(2, config.vocab_size)}" for _ in range(chance.randint(*limits)))

    for name, number in (("rows", size["batch"][what] * size["steps"]), ("held_out", size["batch"][what])):
        lines = []
        for _ in range(number):
            row: dict[str, Any] = {"prompt": text(size["prompt"])}
            if what == "sft":
                row["response"] = text(size["response"])
            else:
                row |= {"chosen": text(size["response"]), "rejected": text(size["response"])}
            lines.append(json.dumps(row) + "\n")
        (world / f"{name}.jsonl").write_text("".join(lines))


class Clock:
    """When steps ended; the device has done all of them at the first and the last of those that are timed."""

    def __init__(self, steps: int) -> None:
        self.steps, self.done, self.began = steps, 0, 0.0
        self.start, self.seconds, self.processor = 0.0, 0.0, 0.0

    def step(self) -> None:
        import torch

        self.done += 1
        if self.done not in (WARM_UP, self.steps):
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if self.done == WARM_UP:
            self.start = time.time() - PROCESS_BEGAN
            self.began, self.processor = time.perf_counter(), time.process_time()
        else:
            self.seconds, self.processor = time.perf_counter() - self.began, time.process_time() - self.processor

    def figures(self, num_tokens: int, loss: float) -> dict[str, float]:
        import torch

        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated()
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        steps = (self.steps - WARM_UP) / 1e3
        return {
            "ms": self.seconds / steps, "processor_ms": self.processor / steps, "rate": num_tokens / self.seconds,
            "peak": peak / 2**30, "loss": loss, "start": self.start,
        }  # fmt: skip


PROCESS_BEGAN = time.time()


def encoded_steps(what: str, world: Path, size: dict[str, Any]) -> list[list[Any]]:
    """What each step reads, as token ids: an Encoded, or a pair of them."""
    from transformers import AutoTokenizer

    from rlhf.data.collate import batch_indices
    from rlhf.data.tokens import encode_example

    tokenizer = AutoTokenizer.from_pretrained(world / "model")
    lines = [json.loads(line) for line in (world / "rows.jsonl").read_text().splitlines()]

    def encode(row: dict[str, str], name: str) -> Any:
        return encode_example(tokenizer, [{"role": "user", "content": row["prompt"]}], row[name], 10**6)

    names = ("response",) if what == "sft" else ("chosen", "rejected")
    rows = [[encode(row, name) for name in names] for row in lines]
    batch = size["batch"][what]
    return [[rows[i] for i in batch_indices(len(rows), batch, step, 0)] for step in range(size["steps"])]


def timed_tokens(steps: list[list[Any]]) -> int:
    return sum(len(text.input_ids) for step in steps[WARM_UP:] for row in step for text in row)


def run_ours(what: str, world: Path, size: dict[str, Any], fields: dict[str, Any]) -> dict[str, float]:
    """Our stage, whole."""
    import importlib

    from transformers import TrainerCallback

    from rlhf.stages.artifact import Artifact
    from rlhf.stages.settings_file import write_settings

    config = importlib.import_module(f"rlhf.stages.{what}.config")
    stage = importlib.import_module(f"rlhf.stages.{what}.train")
    cls = config.SFTSettings if what == "sft" else config.RewardSettings
    common = {
        "model": str(world / "model"), "data": str(world / "rows.jsonl"), "eval_data": str(world / "held_out.jsonl"),
        "global_batch_size": size["batch"][what], "max_length": size["shape"]["max_position_embeddings"],
        "learning_rate": 1e-5, "log_every": 10, "save_every": 10**6, "report_to": [],
    }  # fmt: skip
    common |= {} if what == "sft" else {"eval_every": 10**6, "normalise": "none"}
    clock = Clock(size["steps"])
    if what == "sft":

        class Watch(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                clock.step()

        build_trainer = stage.build_trainer

        def watched(*arguments: Any) -> Any:
            trainer = build_trainer(*arguments)
            trainer.add_callback(Watch())
            return trainer

        stage.build_trainer = watched
    else:
        optimise, losses = stage.optimise, []

        def watched(*arguments: Any) -> Any:
            found = optimise(*arguments)
            losses.append(found["loss"])
            clock.step()
            return found

        stage.optimise = watched
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / what
        write_settings(folder, cls.load(common | fields, what))
        stage.train(folder)
        rows = [row for row in Artifact(folder).metrics if "loss" in row]
    if what == "sft":
        loss = next(row["loss"] for row in rows if row["step"] == WARM_UP)
    else:  # whose line of metrics is of one step
        loss = statistics.fmean(float(loss) for loss in losses[:WARM_UP])
    return clock.figures(timed_tokens(encoded_steps(what, world, size)), loss)


def run_trl(what: str, world: Path, size: dict[str, Any], fields: dict[str, Any]) -> dict[str, float]:
    """TRL's trainer on the same rows, ready as ids."""
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )
    from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

    steps, cuda = encoded_steps(what, world, size), torch.cuda.is_available()
    at_once = size["texts_at_once"] if what == "sft" else size["texts_at_once"] // 2
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "output_dir": folder, "max_steps": size["steps"], "per_device_train_batch_size": at_once,
            "gradient_accumulation_steps": size["batch"][what] // at_once, "learning_rate": 1e-5, "bf16": cuda,
            "use_cpu": not cuda, "lr_scheduler_type": "cosine", "warmup_steps": math.ceil(0.03 * size["steps"]),
            "logging_steps": 10, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
            "train_sampling_strategy": "sequential", **fields,
        }  # fmt: skip
        tokenizer = AutoTokenizer.from_pretrained(world / "model")
        if what == "sft":
            model = AutoModelForCausalLM.from_pretrained(world / "model", dtype=torch.float32)
            rows = [
                {"input_ids": row.input_ids, "labels": [-100] * row.prompt_length + row.input_ids[row.prompt_length :]}
                for step in steps
                for (row,) in step
            ]
            trainer_class, args = SFTTrainer, SFTConfig(**options)
        else:
            model = AutoModelForSequenceClassification.from_pretrained(world / "model", dtype=torch.float32)
            rows = [
                {"chosen_ids": chosen.input_ids, "rejected_ids": rejected.input_ids}
                for step in steps
                for chosen, rejected in step
            ]
            trainer_class, args = RewardTrainer, RewardConfig(**options)
        clock = Clock(size["steps"])

        class Watch(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                clock.step()

        trainer = trainer_class(
            model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
            callbacks=[Watch()],
        )  # fmt: skip
        trainer.train()
    loss = next(row["loss"] for row in trainer.state.log_history if row.get("step") == WARM_UP)
    return clock.figures(timed_tokens(steps), loss)


if __name__ == "__main__":
    main()
