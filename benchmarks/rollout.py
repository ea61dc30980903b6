"""Rollouts: new tokens per second of our engine and of transformers' `generate`, in one run on one device.

    python benchmarks/rollout.py                 124M and 1B in bfloat16, 64 and 256 prompts; needs a GPU
    python benchmarks/rollout.py --only 124M     or: "1B B64", …
    python benchmarks/rollout.py --small         a model of the demo's size in float32, for a CPU
    python benchmarks/rollout.py --run RUN       the SFT and PPO models of a finished run, `rlhf run demo` say
    python benchmarks/rollout.py --json FILE     the rows of the table, for machines

Prompts of 128 random tokens, 256 new ones, no early stop; models are random. Seconds are of the whole call, the least
of six; `first` is the first call, with what is compiled and captured in it. `bound` is what reading the weights and
the keys and values of a mean step takes at the bandwidth that copying has here, measured in the same run. `ragged`:
each answer ends at a length between 16 and 256 that is drawn for it, four times as many prompts as slots (and as rows
of a batch of `generate`); useful tokens per second, the better of two calls (one of `generate`), and their share of
the fixed-length figure. `of many`: that share with sixteen times as many prompts, where the last answers, which leave
slots empty, weigh less. `logprobs`: mean and largest distance of the engine's log-probabilities from those of a
teacher-forced forward pass; `from float32`, of a pass in float32, and `forced from float32`, of the one pass from the
other. `chi2`: distance of 4,096 second tokens from their law, in standard deviations of the chi-squared distribution,
at temperatures 1 and 0.7 (below 4 is as it should be).

`--run`: a rollout of the run's PPO stage, its prompts and its limits, by its own two models, which end their answers;
seconds are medians of eleven turns.
"""

import argparse
import copy
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, StoppingCriteriaList

from rlhf.data.collate import pad_left
from rlhf.stages.engines import Responses, static
from rlhf.stages.engines.static import StaticEngine
from rlhf.stages.packing import sent

PROMPT, NEW, PAD = 128, 256, 0
SHAPES: dict[str, dict[str, Any]] = {
    "124M": {
        "vocab_size": 50304, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 12, "num_key_value_heads": 12,
    },
    "1B": {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    },
    "small": {
        "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4,
    },
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--only", default="", help="only those whose names hold this")
    parser.add_argument("--small", action="store_true", help="a model of the demo's size, for a CPU")
    parser.add_argument("--run", type=Path, help="the models and prompts of a finished run")
    parser.add_argument("--no-peer", action="store_true", help="ours alone")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    bandwidth = measured_bandwidth(device)
    print(f"{date.today()}, {name}, torch {torch.__version__}, copying {bandwidth / 1e9:,.0f} GB/s", flush=True)
    if options.run:
        of_run(options.run, device)
        return
    shapes = [("small", 64), ("small", 128)] if options.small else [(n, b) for n in ("124M", "1B") for b in (64, 256)]
    rows = []
    for shape, size in shapes:
        if options.only not in f"{shape} B{size}":
            continue
        row = {"card": name, "date": str(date.today()), **measure(shape, size, device, bandwidth, options.no_peer)}
        rows.append(row)
        print(
            "  ".join(f"{key} {show(value)}" for key, value in row.items() if key not in ("card", "date")), flush=True
        )
        gc.collect()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


@torch.no_grad()
def measure(shape: str, size: int, device: torch.device, bandwidth: float, no_peer: bool) -> dict[str, Any]:
    """One row of the table."""
    prompt, new = (PROMPT, NEW) if shape != "small" else (16, 48)
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPES[shape], max_position_embeddings=prompt + new, tie_word_embeddings=True)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    prompts = torch.randint(5, 500, (size, prompt)).tolist()
    engine = StaticEngine(model, compiled=True)
    found: dict[str, Any] = {"shape": f"{shape} B{size}"}

    def ours() -> Responses:
        return engine.generate(prompts, new, 1.0, [-1], PAD)

    found["first"] = seconds(ours, 1)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found["tokens/s"] = size * new / seconds(ours)
    if device.type == "cuda":
        found["GiB"] = torch.cuda.max_memory_allocated() / 2**30
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim  # numbers of a cache
    weights = sum(p.numel() for p in model.parameters())
    step = (weights + size * (prompt + new / 2) * per_token) * model.dtype.itemsize
    found["of bound"] = found["tokens/s"] / (size * bandwidth / step)
    for key, value in peers(model, prompts, new, dynamic_only=shape == "small").items() if not no_peer else ():
        found[key] = value
        found[f"× {key}"] = found["tokens/s"] / value
    found["ragged"], peer = ragged(model, size, prompt, new, 4, with_peer=not no_peer)
    found["ragged share"] = found["ragged"] / found["tokens/s"]
    found["of many"] = ragged(model, size, prompt, new, 16, with_peer=False)[0] / found["tokens/s"]
    if not no_peer:
        found["× ragged generate"] = found["ragged"] / peer
    found |= distances(model, prompts, ours())
    found["chi2"] = [chi_squared(engine, model, temperature) for temperature in (1.0, 0.7)]
    return found


def peers(model: PreTrainedModel, prompts: list[list[int]], new: int, dynamic_only: bool) -> dict[str, float]:
    """Tokens per second of `generate` with its usual cache, and with a static one, which it compiles."""
    ids = torch.tensor(prompts, device=model.device)
    settings = usual_settings(ids, new)
    found = {}
    torch.backends.cuda.enable_cudnn_sdp(False)  # it would plan for every new length, for 15 s at first
    for name, more in (("generate", {}), ("static generate", {"cache_implementation": "static"})):
        if more and dynamic_only:
            continue
        call = lambda more=more: model.generate(ids, **settings, **more)  # noqa: E731
        call()
        found[name] = len(prompts) * new / seconds(call)
    return found


@torch.no_grad()
def of_run(run: Path, device: torch.device) -> None:
    """The table of a run: seconds of a rollout of its SFT and of its PPO model, ours and `generate`."""
    from rlhf.data.rows import read_prompts
    from rlhf.data.tokens import encode_prompt
    from rlhf.stages.models import load_policy, load_tokenizer
    from rlhf.stages.ppo.config import PPOSettings
    from rlhf.stages.settings_file import read_settings

    stages = sorted(run.glob("ppo-*/manifest.json"), key=lambda path: path.stat().st_mtime)
    if not stages:
        sys.exit(f"{run}: no finished ppo stage")
    stage = stages[-1].parent
    settings = read_settings(stage, PPOSettings)
    print(f"{'':6}{'rows':>6}{'tokens, mean':>14}{'longest':>9}{'ours, s':>10}{'generate, s':>13}{'ratio':>8}")
    for name, folder in (("SFT", str(settings.model)), ("PPO", str(stage / "model"))):
        tokenizer = load_tokenizer(folder)
        model = load_policy(folder, tokenizer).to(device).eval()
        rows = read_prompts(settings.data, settings.max_dropped).rows
        encoded = [encode_prompt(tokenizer, row.messages) for row in rows]
        prompts = [row for row in encoded if len(row) <= settings.max_prompt_length][: settings.rollout_batch_size]
        law = settings.max_new_tokens, settings.temperature, [tokenizer.eos_token_id], tokenizer.pad_token_id
        engine, padded = StaticEngine(model, compiled=True), pad_left(prompts, tokenizer.pad_token_id)
        ids, mask = (x.to(device) for x in padded)
        given = usual_settings(ids, law[0]) | {"attention_mask": mask, "eos_token_id": law[2], "pad_token_id": law[3]}
        turns = []
        found = engine.generate(prompts, *law)
        model.generate(ids, temperature=law[1], **given)
        for _ in range(11):
            ours = seconds(lambda: engine.generate(prompts, *law), 1)  # noqa: B023
            turns.append((ours, seconds(lambda: model.generate(ids, temperature=law[1], **given), 1)))  # noqa: B023
        ours, theirs = (statistics.median(times) for times in zip(*turns, strict=True))
        lengths = found.mask.sum(-1)
        print(
            f"{name:6}{len(prompts):6}{lengths.float().mean():14.1f}{lengths.max():9}{ours:10.3f}{theirs:13.3f}"
            f"{theirs / ours:8.2f}", flush=True,
        )  # fmt: skip


def usual_settings(ids: torch.Tensor, new: int) -> dict[str, Any]:
    """Of a call of `generate` that draws from the model's own law."""
    return {
        "attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": True, "top_k": 0, "top_p": 1.0,
        "pad_token_id": PAD, "eos_token_id": -1,
    }  # fmt: skip


def ragged(
    model: PreTrainedModel, size: int, prompt: int, new: int, times: int, with_peer: bool
) -> tuple[float, float]:
    """Useful tokens per second, of ours and of `generate`, of answers that end after a number of tokens of their own,
    to `times` as many prompts as there are slots.

    A random model draws stop tokens too seldom, so rows are told that they have made some tokens already.
    """
    draw = random.Random(0)
    lengths = {
        tuple(draw.randrange(5, 500) for _ in range(prompt)): draw.randint(new // 16, new) for _ in range(times * size)
    }

    class Ending(static._Writing):
        def begin(self, slots: list[int], prompts: list[list[int]]) -> None:
            super().begin(slots, prompts)
            ahead = [1 + new - lengths[tuple(prompt)] for prompt in prompts]
            rows, made = sent(self.made.device, torch.tensor(slots), torch.tensor(ahead))
            self.made[rows] = made

    engine, usual = StaticEngine(model, batch_size=size, compiled=True), static._Writing
    static._Writing = Ending  # type: ignore[misc]
    try:
        prompts = [list(prompt) for prompt in lengths]
        engine.generate(prompts, new, 1.0, [-1], PAD)
        rate = sum(lengths.values()) / seconds(lambda: engine.generate(prompts, new, 1.0, [-1], PAD), 2)
    finally:
        static._Writing = usual  # type: ignore[misc]
    if not with_peer:
        return rate, 0.0
    ids = torch.tensor(prompts, device=model.device)
    limits = torch.tensor(list(lengths.values()), device=model.device)

    def answer() -> None:
        for rows, ends in zip(ids.split(size), limits.split(size), strict=True):
            ended = lambda so_far, _, ends=ends: so_far.shape[1] - prompt >= ends  # noqa: E731
            model.generate(rows, **usual_settings(rows, new), stopping_criteria=StoppingCriteriaList([ended]))

    answer()
    return rate, sum(lengths.values()) / seconds(answer, 1)


def distances(model: PreTrainedModel, prompts: list[list[int]], found: Responses) -> dict[str, list[float]]:
    """Mean and largest |difference| of log-probabilities over the first eight rows: from a teacher-forced pass; of a
    model in 16 bits also from one in float32, and how far the teacher-forced pass itself is from that."""
    ids = torch.cat([torch.tensor(prompts[:8], device=model.device), found.tokens[:8]], dim=1)

    def read(reader: PreTrainedModel) -> torch.Tensor:
        logits = reader(ids, use_cache=False).logits[:, len(prompts[0]) - 1 : -1].float()
        return logits.log_softmax(-1).gather(-1, found.tokens[:8, :, None])[..., 0]

    def apart(some: torch.Tensor, others: torch.Tensor) -> list[float]:
        gaps = (some - others).abs()
        return [gaps.mean().item(), gaps.max().item()]

    ours, forced = found.logprobs[:8], read(model)
    told = {"logprobs": apart(ours, forced)}
    if model.dtype != torch.float32:
        exact = read(copy.deepcopy(model).float())
        told |= {"from float32": apart(ours, exact), "forced from float32": apart(forced, exact)}
    return told


def chi_squared(engine: StaticEngine, model: PreTrainedModel, temperature: float) -> float:
    """How far the second of two new tokens lies from its law, given the first, pooled over rows, in deviations.

    Cells are the eight groups of tokens of about equal mass, for each row in its own order.
    """
    prompts = [[7, 8, 9]] * 4096
    found = engine.generate(prompts, 2, temperature, [-1], PAD)
    counts, expected = torch.zeros(8, dtype=torch.double), torch.zeros(8, dtype=torch.double)
    for start in range(0, len(prompts), 64):
        rows = found.tokens[start : start + 64]
        ids = torch.cat([torch.tensor(prompts[start : start + 64], device=rows.device), rows[:, :1]], dim=1)
        law = (model(ids, use_cache=False).logits[:, -1].float() / temperature).softmax(-1).double()
        group = ((law.cumsum(-1) - law / 2) * 8).long().clamp(0, 7)
        counts += torch.bincount(group.gather(-1, rows[:, 1:])[:, 0], minlength=8).cpu()
        expected += (
            torch.zeros(len(rows), 8, dtype=torch.double, device=rows.device).scatter_add(1, group, law).sum(0).cpu()
        )
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    return (statistic - 7) / 14**0.5


def measured_bandwidth(device: torch.device) -> float:
    """Bytes per second that copying reads and writes."""
    source = torch.empty(2**28 if device.type == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / seconds(lambda: target.copy_(source), 5)


def seconds(call: Callable[[], Any], times: int = 6) -> float:
    """The least of so many calls."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return min(found)


def show(value: Any) -> str:
    if isinstance(value, list):
        return "/".join(show(part) for part in value)
    return (
        f"{value:,.0f}"
        if isinstance(value, float) and abs(value) >= 100
        else f"{value:.3g}"
        if isinstance(value, float)
        else str(value)
    )


if __name__ == "__main__":
    main()
