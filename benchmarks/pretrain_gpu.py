"""Pretraining on one GPU: tokens per second of a 124M model, and how well a small one learns one text in how long.

    python benchmarks/pretrain_gpu.py speed [--nanogpt DIR]
    python benchmarks/pretrain_gpu.py shakespeare TEXT [--nanogpt DIR]

DIR is a checkout of nanoGPT; with it, its own model (speed) or its own training (shakespeare) has its turn in the same
run. speed: 12 layers, width 768, vocabulary 50304, 32 rows of 1024 random tokens, bfloat16, each model in a process of
its own. shakespeare: the recipes shakespeare and shakespeare_best on the text, whose last tenth is held out; losses are
in nats per character, once over the whole held-out text and once as nanoGPT estimates them (200 batches of 64 windows
at random places). Start and compilation count in `wall` alone: the steps ahead of the first line of metrics are taken
to last as long as the others. `steps` are seconds of training steps, up to the best one; `seconds` have evaluations,
samples and checkpoints in them. Each point of the curve is step: loss (seconds of steps; nanoGPT's with evaluations).
"""

import argparse
import json
import math
import os
import pickle
import re
import shutil
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

ROWS, LENGTH, VOCABULARY = 32, 1024, 50304
MODELS: dict[str, dict[str, Any]] = {
    "decoder, LLaMA's parts": {"preset": ["gpt3-125m", "llama"], "context_length": LENGTH},
    "decoder, GPT's parts": {"preset": "gpt3-125m", "context_length": LENGTH},
    "llama (transformers' own)": {"preset": "gpt3-125m", "architecture": "llama", "context_length": LENGTH},
}
RECIPES = ("shakespeare", "shakespeare_best")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("what", choices=("speed", "shakespeare"))
    parser.add_argument("text", nargs="?", type=Path)
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--only", default="", help="only those whose names hold this")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
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
    words = [sys.executable, __file__, options.what, *([str(options.text)] if options.text else []), "--child", name]
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
        total += torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten()).item()
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
