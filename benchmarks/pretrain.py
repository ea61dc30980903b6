"""Pretraining beside a bare loop on a CPU and beside nanoGPT on one GPU.

    python benchmarks/pretrain.py cpu
    python benchmarks/pretrain.py speed [--nanogpt DIR]
    python benchmarks/pretrain.py shakespeare TEXT [--nanogpt DIR]

cpu: the stage and a loop of PyTorch alone, in turn, on the same model and blocks of the same size; tokens per second of
each, as the median over its steps, and their ratio, for two sizes; then how long the stage takes from the start of its
process to the end of its first step.

speed and shakespeare are for a GPU. DIR is a checkout of nanoGPT; with it, its own model (speed) or its own training
(shakespeare) has its turn in the same run. speed: 12 layers, width 768, vocabulary 50304, 32 rows of 1024 random
tokens, bfloat16, each model in a process of its own. shakespeare: the recipes shakespeare and shakespeare_best on the
text, whose last tenth is held out; losses are in nats per character, once over the whole held-out text and once as
nanoGPT estimates them (200 batches of 64 windows at random places). Start and compilation count in `wall` alone: the
steps ahead of the first line of metrics are taken to last as long as the others. `steps` are seconds of training steps,
up to the best one; `seconds` have evaluations, samples and checkpoints in them. Each point of the curve is step: loss
(seconds of steps; nanoGPT's with evaluations).
"""

import argparse
import json
import math
import os
import pickle
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

SIZES, BLOCK, BATCH = {"1M": (128, 4), "5M": (256, 6)}, 128, 16
"""Width and layers of the models on a CPU, and the tokens and rows of a step."""
ROWS, LENGTH, VOCABULARY = 32, 1024, 50304
"""The same of `speed`, and its vocabulary."""
MODELS: dict[str, dict[str, Any]] = {
    "decoder, LLaMA's parts": {"preset": ["gpt3-125m", "llama"], "context_length": LENGTH},
    "decoder, GPT's parts": {"preset": "gpt3-125m", "context_length": LENGTH},
    "llama (transformers' own)": {"preset": "gpt3-125m", "architecture": "llama", "context_length": LENGTH},
}
RECIPES = ("shakespeare", "shakespeare_best")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    commands = parser.add_subparsers(dest="what", required=True)
    cpu = commands.add_parser("cpu", help="beside a loop of PyTorch alone, on a CPU")
    cpu.add_argument("--steps", type=int, default=15, help="of each run; the first five are not timed")
    cpu.add_argument("--rounds", type=int, default=2, help="how often each side has its turn")
    cpu.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    speeds = commands.add_parser("speed", help="a 124M model's tokens per second on one GPU")
    texts = commands.add_parser("shakespeare", help="how well a small model learns one text, and in how long")
    texts.add_argument("text", type=Path)
    for command in (speeds, texts):
        command.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
        command.add_argument("--only", default="", help="only those whose names hold this")
        command.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    (on_cpu if options.what == "cpu" else on_gpu)(options)


def on_cpu(options: argparse.Namespace) -> None:
    """The stage and a bare loop in turn, and how long a stage takes to start."""
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
                    words = [sys.executable, __file__, "cpu", "--child", side, size, str(folder)]
                    answer = subprocess.run(
                        [*words, "--steps", str(options.steps)], capture_output=True, text=True, check=False
                    )
                    if answer.returncode:
                        sys.exit(answer.stderr)
                    rates[side].append(json.loads(answer.stdout.splitlines()[-1]))
            ours, theirs = (statistics.median(rates[side]) for side in ("stage", "bare"))
            print(f"{size:6}{ours:16,.0f}{theirs:16,.0f}{ours / theirs:14.2f}")
        folder = Path(name) / "start"
        write_stage(folder, "1M", text, num_steps=1)
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


def write_stage(folder: Path, size: str, text: Path, num_steps: int) -> None:
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

    write_stage(folder / "stage", size, folder.parent / "text.txt", steps)
    train(folder / "stage")
    rows = Artifact(folder / "stage").metrics
    return statistics.median(row["tokens_per_second"] for row in rows[5:-1])  # the last one evaluates, too


def bare(folder: Path, size: str, steps: int) -> float:
    """Tokens per second of what one would write by hand."""
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


def on_gpu(options: argparse.Namespace) -> None:
    """Each model, or recipe, in a process of its own."""
    if options.child:
        print("\n" + json.dumps(CHILDREN[options.what](options)))
        return
    print(f"{date.today()}, {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    names = [*(MODELS if options.what == "speed" else reversed(RECIPES)), *(["nanoGPT"] if options.nanogpt else [])]
    names = [name for name in names if options.only in name]
    if options.what == "speed":
        print(f"{'':28}{'ms / step':>11}{'tokens / s':>12}{'MFU':>8}{'peak GiB':>10}", flush=True)
        for name in names:
            found = child(options, name)
            print(
                f"{name:28}{found['ms']:11.1f}{found['rate']:12,.0f}{found['mfu']:8.1%}{found['peak']:10.1f}",
                flush=True,
            )
        return
    columns = ("parameters", "best loss", "estimated", "at step", "steps", "seconds", "all seconds", "wall")
    print(f"{'':18}" + "".join(f"{column:>13}" for column in columns), flush=True)
    for name in names:
        found = child(options, name)
        print(f"{name:18}" + "".join(f"{found.get(column, ''):>13}" for column in columns), flush=True)
        points = [f"{step}: {loss:.4f} ({seconds:.1f} s)" for step, loss, seconds in found["curve"]]
        print("    " + "  ".join(points), flush=True)


def child(options: argparse.Namespace, name: str) -> Any:
    """What a process of its own prints last."""
    words = [sys.executable, __file__, options.what, "--child", name]
    words += [str(options.text)] if options.what == "shakespeare" else []
    words += ["--nanogpt", str(options.nanogpt)] if options.nanogpt else []
    began = time.monotonic()
    answer = subprocess.run(words, capture_output=True, text=True, check=False)
    if answer.returncode:
        sys.exit(f"{name}: {answer.stderr[-3000:]}")
    return json.loads(answer.stdout.splitlines()[-1]) | {"wall": round(time.monotonic() - began, 1)}


def speed(options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds per step and so on of one model."""
    if options.child == "nanoGPT":
        step, num_parameters = nanogpt_step(options.nanogpt)
        layers, width = 12, 768
    else:
        step, model = our_step(MODELS[options.child])
        num_parameters = model.num_parameters()
        layers, width = model.config.num_hidden_layers, model.config.hidden_size
    for _ in range(10):
        step()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(40):
        step()
    torch.cuda.synchronize()
    seconds = (time.perf_counter() - began) / 40
    rate = ROWS * LENGTH / seconds
    flops = 6 * num_parameters + 12 * layers * width * LENGTH
    peak = torch.cuda.max_memory_allocated() / 2**30
    return {"ms": seconds * 1e3, "rate": rate, "mfu": rate * flops / 989e12, "peak": peak}


def our_step(shape: dict[str, Any]) -> tuple[Callable[[], None], Any]:
    """A step of the stage's own loop on random tokens."""
    from worlds import numbered_words

    from rlhf.stages.pretrain.config import PretrainSettings
    from rlhf.stages.pretrain.health import Health
    from rlhf.stages.pretrain.model import make_model
    from rlhf.stages.pretrain.objective import NextTokenLoss
    from rlhf.stages.pretrain.train import make_optimizers, optimise, set_learning_rates
    from rlhf.stages.runtime import Runtime

    folder = Path(tempfile.mkdtemp())
    (folder / "text.txt").write_text("unread")
    fields = {"data": str(folder / "text.txt"), "global_batch_size": ROWS, "compile": True, "report_to": []}
    settings = PretrainSettings.load(shape | fields, "pretrain")
    run = Runtime(settings, folder)
    model = make_model(settings, numbered_words(VOCABULARY))
    prepared = run.accelerator.prepare(NextTokenLoss(model, compile=True), *make_optimizers(model, settings))
    loss_of, *optimizers = prepared
    health, data, count = Health(settings, run.state), tokens(), 0

    def step() -> None:
        nonlocal count
        set_learning_rates(optimizers, settings, model.config.hidden_size, count)
        health.add(count, optimise(run, loss_of, optimizers, data[count % len(data)], health.limit, 0))
        health.read(all_steps=False)
        count += 1

    return step, model


def nanogpt_step(checkout: Path) -> tuple[Callable[[], None], int]:
    """The same on nanoGPT's model, with the steps of its train.py."""
    sys.path.insert(0, str(checkout))
    from model import GPT, GPTConfig  # type: ignore[import-not-found]

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model = GPT(GPTConfig(block_size=LENGTH, vocab_size=VOCABULARY, dropout=0.0, bias=False)).cuda()
    optimizer = model.configure_optimizers(0.1, 6e-4, (0.9, 0.95), "cuda")
    compiled, data, count = torch.compile(model), tokens(), 0

    def step() -> None:
        nonlocal count
        batch = data[count % len(data)].pin_memory().cuda(non_blocking=True)
        with torch.autocast("cuda", torch.bfloat16):
            _, loss = compiled(batch[:, :-1].contiguous(), batch[:, 1:].contiguous())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        count += 1

    return step, model.get_num_params()


def tokens() -> torch.Tensor:
    """Eight batches [8, B, T + 1]."""
    return torch.randint(2, VOCABULARY, (8, ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(0))


def shakespeare(options: argparse.Namespace) -> dict[str, Any]:
    """One recipe's, or nanoGPT's, best loss and when it was reached."""
    if options.child == "nanoGPT":
        return nanogpt_training(options.nanogpt, options.text)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from rlhf.pipeline.recipe import load_recipe
    from rlhf.stages import logs
    from rlhf.stages.pretrain.train import train
    from rlhf.stages.settings_file import write_settings

    section = load_recipe(options.child, [f"pretrain.data={options.text}"]).pretrain
    assert section is not None
    folder = Path(tempfile.mkdtemp()) / "pretrain"
    write_settings(folder, section.model_copy(update={"report_to": []}))
    times: dict[int, float] = {}
    write = logs.write_row

    def timed(where: Path, row: dict[str, Any]) -> None:
        times[row["step"]] = time.monotonic()
        write(where, row)

    logs.write_row = timed
    metrics = train(folder)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    first = min(times)
    ahead = (max(times.values()) - times[first]) / (max(times) - first) * first  # of the steps before the first line
    spent, told, count = {first: 0.0}, first, 0.0
    for row in rows[1:]:
        tokens = section.global_batch_size * (section.block_size or section.context_length)
        count += (row["step"] - told) * tokens / row["tokens_per_second"]
        spent[row["step"]], told = count, row["step"]
    spent = {step: seconds + count / (told - first) * first for step, seconds in spent.items()}
    model = AutoModelForCausalLM.from_pretrained(folder / "model").cuda().eval()
    text = options.text.read_text()
    ids = AutoTokenizer.from_pretrained(folder / "model")(text[int(0.9 * len(text)) :])["input_ids"]
    return {
        "parameters": metrics["num_parameters"],
        "best loss": round(metrics["val_loss"], 4),
        "estimated": round(estimate(model, torch.tensor(ids)), 4),
        "at step": metrics["best_step"],
        "steps": round(spent[metrics["best_step"]], 1),
        "seconds": round(times[metrics["best_step"]] - times[first] + ahead, 1),
        "all seconds": round(max(times.values()) - times[first] + ahead, 1),
        "curve": [(row["step"], row["val_loss"], spent[row["step"]]) for row in rows if "val_loss" in row],
    }


@torch.no_grad()
def estimate(model: Any, ids: torch.Tensor) -> float:
    """Mean loss over 200 batches of 64 windows of 256 at random places."""
    places = torch.randint(len(ids) - 256, (200, 64), generator=torch.Generator().manual_seed(1337))
    total = 0.0
    for starts in places:
        windows = ids[starts[:, None] + torch.arange(257)].cuda()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(input_ids=windows[:, :-1], use_cache=False).logits
        total += cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten()).item()
    return total / len(places)


def nanogpt_training(checkout: Path, text: Path) -> dict[str, Any]:
    """nanoGPT's train.py with its configuration for this text; its losses are estimates already."""
    folder = Path(tempfile.mkdtemp()) / "nanogpt"
    shutil.copytree(checkout, folder)
    data = folder / "data" / "shakespeare_char"
    content = text.read_text()
    numbers = {character: number for number, character in enumerate(sorted(set(content)))}
    ids, cut = np.array([numbers[character] for character in content], np.uint16), int(0.9 * len(content))
    ids[:cut].tofile(data / "train.bin")
    ids[cut:].tofile(data / "val.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(numbers)}))
    words = [sys.executable, "-u", "train.py", "config/train_shakespeare_char.py"]
    process = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, text=True, env=os.environ)
    assert process.stdout is not None
    curve, times, number, began = [], [], "", math.nan
    for line in process.stdout:
        if found := re.match(r"step (\d+): .*val loss ([\d.]+)", line):
            curve.append((int(found[1]), float(found[2])))
            times.append(time.monotonic())
        elif found := re.match(r"iter (\d+):", line):
            began = time.monotonic() if found[1] == "0" else began  # the first step, with its compilation, is done
        elif found := re.match(r"number of parameters: ([\d.]+M)", line):
            number = found[1]
    if process.wait():
        sys.exit("nanoGPT's train.py failed")
    best = min(range(len(curve)), key=lambda place: curve[place][1])
    return {
        "parameters": number, "estimated": curve[best][1], "at step": curve[best][0],
        "seconds": round(times[best] - began, 1), "all seconds": round(times[-1] - began, 1),
        "curve": [(step, loss, max(when - began, 0.0)) for (step, loss), when in zip(curve, times, strict=True)],
    }  # fmt: skip


CHILDREN: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"speed": speed, "shakespeare": shakespeare}

if __name__ == "__main__":
    main()
