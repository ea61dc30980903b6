"""A PPO iteration of ours and of TRL 1.12's PPOTrainer, its last release with PPO: seconds by phase, memory, the first.

    python benchmarks/ppo_step.py 124m 1b --trl112 DIR      on one GPU, in bf16
    python benchmarks/ppo_step.py --small --trl112 DIR      on a CPU (about a quarter of an hour on two cores)

DIR is a folder for PYTHONPATH with TRL 1.12: `pip install --target DIR --no-deps trl==1.12.0`; without it ours run
alone. Every side is a process of its own, and the sides take turns. Models are random Llamas, the four of an iteration
equal; TRL's are in bf16 on a GPU, ours as `--settings` say. Figures are medians over the iterations but the first;
`first` has compilation and capture in it, and of ours the evaluation before it. In the table of `--small`, `early`
answers end after some 20 tokens; all others never end. There both sides at last train at learning rate 0, and the
log-probabilities that TRL's update saw are compared with ours of the same tokens.

Memory is the GPU's peak as torch counts it; on a CPU the process's peak resident set, less what it held before the
models were loaded. `planned` is what `rlhf estimate` says of it.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
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

from worlds import build_world, planned

LLAMA3 = {"vocab_size": 128256, "max_position_embeddings": 1024, "num_attention_heads": 32, "num_key_value_heads": 8}
EPISODES = {"prompts": 64, "prompt_tokens": 128, "new_tokens": 256, "microbatch": 16}
SIZES: dict[str, dict[str, Any]] = {
    "small": {
        "shape": {
            "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 5,
            "num_attention_heads": 4, "max_position_embeddings": 128, "tie_word_embeddings": False,
        },
        "prompts": 64, "prompt_tokens": 24, "new_tokens": 48, "microbatch": None,
    },
    "90m": {
        "shape": {
            "vocab_size": 16384, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 10,
            "num_attention_heads": 12, "max_position_embeddings": 1024,
        },
        "prompts": 8, "prompt_tokens": 32, "new_tokens": 32, "microbatch": 2,
    },
    "124m": {
        "shape": {
            "vocab_size": 50304, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
            "num_attention_heads": 12, "max_position_embeddings": 1024, "tie_word_embeddings": True,
        },
        **EPISODES,
    },
    "1b": {
        "shape": {**LLAMA3, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
                  "tie_word_embeddings": True},
        **EPISODES,
    },
    "8b": {
        "shape": {**LLAMA3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **EPISODES, "microbatch": 8, "half": True, "reward": "adapter",
    },
}  # fmt: skip
SIZES["early"] = {**SIZES["small"], "mean_length": 22}  # cut off at 48 tokens, their mean is about 20
LAYOUTS = ("separate", "shared_trunk", "adapters")
EPOCHS, TRL = 4, "TRL 1.12"
PHASES = ("rollout", "scoring", "update")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("sizes", nargs="*", help=f"of {', '.join(SIZES)}; by default 124m and 1b")
    parser.add_argument("--small", action="store_true", help="instead of sizes: early and small, on a CPU")
    parser.add_argument("--trl112", type=Path, help="folder with TRL 1.12")
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=["separate", "adapters"])
    parser.add_argument("--iterations", type=int, default=4, help="of each run, 2 or more; the first is told apart")
    parser.add_argument("--rounds", type=int, default=1, help="how often the sides take turns")
    parser.add_argument("--settings", default="{}", help="further settings of ours, as JSON")
    parser.add_argument("--json", type=Path, help="write all figures to this file too")
    parser.add_argument("--child", nargs=2, metavar=("SIDE", "WORLD"), help=argparse.SUPPRESS)
    parser.add_argument("--learning-rate", type=float, default=1e-6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = ["early", "small"] if options.small else options.sizes or ["124m", "1b"]
    if unknown := set(sizes) - set(SIZES):
        parser.error(f"no size called {', '.join(unknown)}")
    if options.child:
        print("\n" + json.dumps(child_figures(options, sizes[0])))
        return
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers"))
    print(f"{date.today()}, {device()}, Python {platform.python_version()}, {versions}", flush=True)
    found = {size: measure(options, size) for size in sizes}
    if options.json:
        options.json.write_text(json.dumps({"device": device(), "sizes": found}, indent=1) + "\n", encoding="utf-8")


def measure(options: argparse.Namespace, size: str) -> dict[str, dict[str, Any]]:
    """Print the table of one size; its figures by side."""
    given = SIZES[size]
    columns = ("s/iteration", *PHASES, "samples/s", "peak GiB", "planned", "first, s", "TRL / this")
    print(
        f"{size}: {given['prompts']} prompts x {given['prompt_tokens']} tokens, {given['new_tokens']} new tokens, "
        f"{EPOCHS} epochs, microbatch {given['microbatch'] or 'all'}, of ours {options.settings}\n{'':14}"
        + "".join(f"{column:>12}" for column in columns),
        flush=True,
    )
    sides = [*([TRL] if options.trl112 else []), *options.layouts]
    with tempfile.TemporaryDirectory() as name:
        make_world(Path(name), size)
        runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        figures: dict[str, dict[str, Any]] = {}
        for number in range(options.rounds):
            for side in sides:
                runs[side].append(child(options, size, side, name))
                if number == options.rounds - 1:
                    figures[side] = summed_up(runs[side], given["prompts"])
                    print(line(side, figures[side], figures.get(TRL)), flush=True)
        if size == "small" and options.trl112:
            child(options, size, TRL, name, "--learning-rate", "0", "--iterations", "1")
            difference = child(options, size, "compare", name)
            print(f"largest difference of a log-probability at learning rate 0: {difference:.1e} nats")
    return figures


def summed_up(runs: list[dict[str, Any]], num_prompts: int) -> dict[str, Any]:
    """Medians over the iterations of all runs, the highest peak, the median of the first iterations; or the error."""
    if failed := [run["error"] for run in runs if "error" in run]:
        return {"error": failed[0]}
    rows = [row for run in runs for row in run["iterations"]]
    medians = {name: statistics.median(row[name] for row in rows) for name in ("seconds", *PHASES)}
    first = statistics.median(run["first"] for run in runs)
    peak = max(run["gib"] for run in runs)
    return {**medians, "samples_per_second": num_prompts / medians["seconds"], "gib": peak, "first": first,
            "planned": runs[0].get("planned"), "runs": runs}  # fmt: skip


def line(side: str, found: dict[str, Any], peer: dict[str, Any] | None) -> str:
    if "error" in found:
        return f"{side:14} failed: {found['error']}"
    ratio = f"{peer['seconds'] / found['seconds']:.2f}" if peer and "error" not in peer and side != TRL else "–"
    phases = "".join(f"{found[name]:12.2f}" for name in PHASES)
    plan = "–" if found["planned"] is None else f"{found['planned']:.2f}"
    return (
        f"{side:14}{found['seconds']:12.2f}{phases}{found['samples_per_second']:12.1f}{found['gib']:12.2f}{plan:>12}"
        f"{found['first']:12.1f}{ratio:>12}"
    )


def child(options: argparse.Namespace, size: str, side: str, world: str, *more: str) -> Any:
    """What a process of its own prints last; a side that fails gives its error."""
    words = [sys.executable, __file__, size, "--child", side, world, "--iterations", str(options.iterations)]
    paths = [str(options.trl112.resolve())] if side == TRL else []
    paths += filter(None, [os.environ.get("PYTHONPATH")])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TRL_EXPERIMENTAL_SILENCE": "1"}
    answer = subprocess.run(
        [*words, "--settings", options.settings, *more], capture_output=True, text=True, check=False, env=environment
    )
    if answer.returncode:
        print(answer.stderr[-3000:], file=sys.stderr)
        return {"error": (answer.stderr.strip().splitlines() or ["no word"])[-1]}
    return json.loads(answer.stdout.splitlines()[-1])


def child_figures(options: argparse.Namespace, size: str) -> Any:
    side, world = options.child[0], Path(options.child[1])
    if side == "compare":
        return logprob_difference(world)
    if side == TRL:
        return run_trl(world, SIZES[size], options.iterations, options.learning_rate)
    return run_ours(world, SIZES[size], side, options.iterations, json.loads(options.settings))


def device() -> str:
    """What the figures belong to."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"{platform.machine()}, {os.cpu_count()} cores"


def make_world(folder: Path, size: str) -> None:
    """Models and prompts, made by a process that gives its memory back."""
    builder = multiprocessing.get_context("spawn").Process(target=build, args=(folder, size))
    builder.start()
    builder.join()
    if builder.exitcode:
        sys.exit("no world to measure in")


def build(folder: Path, size: str) -> None:
    """The reward model once whole, and once as an adapter of the policy's start, which `layout: adapters` takes; or the
    one of both that the size names."""
    import torch

    from rlhf.stages import adapters
    from rlhf.stages.artifact import model_digest
    from rlhf.stages.models import ScalarModel, load_policy, load_tokenizer
    from rlhf.stages.settings import LoraSettings

    given = SIZES[size]
    build_world(
        folder, given["shape"], 2 * given["prompts"], given["prompt_tokens"], given.get("mean_length"),
        half=given.get("half", False), whole_reward=given.get("reward") != "adapter",
    )  # fmt: skip
    if given.get("reward") == "whole":
        return
    base = load_policy(str(folder / "policy"), load_tokenizer(str(folder / "policy")), torch.bfloat16)
    classifier = adapters.classifier_on(base)
    adapters.add_lora(classifier, LoraSettings())
    digest = model_digest(str(folder / "policy"), "policy")
    adapters.save_scalar(folder / "reward" / "adapter", ScalarModel(classifier), digest)


def run_ours(world: Path, given: dict[str, Any], layout: str, iterations: int, more: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each iteration but the first, of its phases and of the first; peak memory in GiB."""
    import torch

    from rlhf.stages import logs
    from rlhf.stages.ppo import train as ppo
    from rlhf.stages.ppo.config import PPOSettings
    from rlhf.stages.settings_file import write_settings

    settings = {
        "model": str(world / "policy"), "reward_model": str(world / "reward"), "data": str(world / "prompts.jsonl"),
        "num_iterations": iterations + 1, "rollout_batch_size": given["prompts"], "num_epochs": EPOCHS,
        "max_prompt_length": given["prompt_tokens"], "max_new_tokens": given["new_tokens"],
        "microbatch_size": given["microbatch"], "learning_rate": 1e-6, "critic_learning_rate": 1e-6,
        "eval_every": 1000, "save_every": 1000, "eval_share": 0.2, "layout": layout, "report_to": [], **more,
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    moments: list[float] = []
    before = 0 if torch.cuda.is_available() else logs.peak_memory(torch.device("cpu"))
    selection = ppo.Selection

    def begin(*arguments: Any, **named: Any) -> Any:
        moments.append(time.perf_counter())  # models are loaded; the first thing is an evaluation
        return selection(*arguments, **named)

    class EnoughError(Exception):
        """Saving is not part of what is measured."""

    def take(_folder: Path, row: dict[str, Any]) -> None:
        moments.append(time.perf_counter())
        rows.append(row)
        if len(rows) == iterations:
            raise EnoughError

    ppo.Selection = begin  # type: ignore[assignment, misc]
    logs.write_row = take
    with tempfile.TemporaryDirectory() as folder:
        write_settings(Path(folder), PPOSettings.load(settings, "ppo"))
        with contextlib.suppress(EnoughError):
            ppo.train(folder)
    return {
        "iterations": [
            {"seconds": moments[number + 1] - moments[number]} | {name: row[f"seconds_{name}"] for name in PHASES}
            | {name: value for name, value in row.items() if "_per_second" in name or "_share_" in name}
            for number, row in enumerate(rows) if number
        ],
        "first": moments[1] - moments[0], "gib": rows[-1]["peak_gib"] - before / 2**30,
        "planned": planned("ppo", settings),
    }  # fmt: skip


def run_trl(world: Path, given: dict[str, Any], iterations: int, learning_rate: float) -> dict[str, Any]:
    """The same of TRL; at learning rate 0, what the last update saw goes to `logprobs.pt` too."""
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        TrainerCallback,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer

    from rlhf.stages.logs import peak_memory

    gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if gpu else torch.float32
    before = 0 if gpu else peak_memory(torch.device("cpu"))
    tokenizer = AutoTokenizer.from_pretrained(world / "policy", padding_side="left")
    texts = [json.loads(text) for text in (world / "prompts.jsonl").read_text().splitlines()]
    data = Dataset.from_list([{"input_ids": tokenizer(text["prompt"])["input_ids"]} for text in texts])
    policy, reference = (AutoModelForCausalLM.from_pretrained(world / "policy", dtype=dtype) for _ in range(2))
    reward, value = (
        AutoModelForSequenceClassification.from_pretrained(world / "reward", dtype=dtype) for _ in range(2)
    )
    seen = watch_update(ppo_trainer) if learning_rate == 0 else {}
    moments: list[tuple[str, float]] = []

    def note(what: str) -> None:
        if gpu:
            torch.cuda.synchronize()
        moments.append((what, time.perf_counter()))

    generate = ppo_trainer.batch_generation

    def timed_generation(*arguments: Any, **named: Any) -> Any:
        note("rollout")
        answers = generate(*arguments, **named)
        note("scoring")
        return answers

    ppo_trainer.batch_generation = timed_generation

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            note("end")

    size, microbatch = given["prompts"], given["microbatch"] or given["prompts"]
    with tempfile.TemporaryDirectory() as folder:
        config = PPOConfig(
            output_dir=folder, per_device_train_batch_size=microbatch, gradient_accumulation_steps=size // microbatch,
            num_mini_batches=1, num_ppo_epochs=EPOCHS, response_length=given["new_tokens"], stop_token="eos",
            temperature=1.0, learning_rate=learning_rate, total_episodes=size * iterations, num_sample_generations=0,
            report_to="none", use_cpu=not gpu, bf16=False, gradient_checkpointing=False, save_strategy="no",
        )  # fmt: skip
        trainer = PPOTrainer(
            args=config, processing_class=tokenizer, model=policy, ref_model=reference, reward_model=reward,
            value_model=value, train_dataset=data, callbacks=[Clock()],
        )  # fmt: skip
        accumulate = trainer.accelerator.accumulate

        def timed_accumulate(*models: Any) -> Any:
            if moments[-1][0] == "scoring":  # the first microbatch of an update
                note("update")
            return accumulate(*models)

        trainer.accelerator.accumulate = timed_accumulate
        note("end")
        trainer.train()
    if seen:
        torch.save({name: tensor.detach() for name, tensor in seen.items()}, world / "logprobs.pt")
    found = iterations_of(moments)
    gib = (peak_memory(trainer.accelerator.device) - before) / 2**30
    return {"iterations": found[1:], "first": found[0]["seconds"], "gib": gib}


def iterations_of(moments: list[tuple[str, float]]) -> list[dict[str, float]]:
    """Seconds of each iteration and of its phases, from (what begins, when); "end" ends one, and begins the first."""
    found: list[dict[str, float]] = []
    row: dict[str, float] = {}
    began = moments[0][1]
    for (what, since), (following, until) in pairwise(moments):
        if what in PHASES:
            row[what] = row.get(what, 0.0) + until - since
        if following == "end":
            found.append({"seconds": until - began, **row})
            row, began = {}, until
    return found


def watch_update(trainer_module: Any) -> dict[str, Any]:
    """Let TRL's trainer leave the ids and log-probabilities of its last update in what is returned."""
    seen: dict[str, Any] = {}
    forward, log_softmax = trainer_module.forward, trainer_module.selective_log_softmax

    def watched_forward(model: Any, ids: Any, *more: Any) -> Any:
        seen["input_ids"] = ids
        return forward(model, ids, *more)

    def watched_log_softmax(logits: Any, tokens: Any) -> Any:
        seen["logprobs"] = log_softmax(logits, tokens)
        return seen["logprobs"]

    trainer_module.forward, trainer_module.selective_log_softmax = watched_forward, watched_log_softmax
    return seen


def logprob_difference(world: Path) -> float:
    """Largest difference between TRL's log-probabilities and ours of the same responses, in nats."""
    import torch

    from rlhf.stages.models import PolicyModel, load_policy, load_tokenizer

    seen = torch.load(world / "logprobs.pt")
    ids, theirs = seen["input_ids"], seen["logprobs"]
    policy = PolicyModel(load_policy(str(world / "policy"), load_tokenizer(str(world / "policy")))).eval()
    with torch.no_grad():
        ours, _, _ = policy(ids, torch.ones_like(ids, dtype=torch.bool), theirs.shape[1], 1.0)
    return (ours - theirs).abs().max().item()


if __name__ == "__main__":
    main()
