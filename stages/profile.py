"""Where a stage's time goes: seconds of its phases, what they reach of the device's bounds, and a trace on request.

Set RLHF_PROFILE for a stage that is run by hand, which is what `rlhf STAGE --profile` does.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import PreTrainedConfig, PreTrainedModel

from rlhf.stages import devices

PHASES = {
    "sampling": "rollout", "the rollout": "scoring", "scoring": "scoring", "the update": "update",
    "evaluation": "evaluation", "saving": "checkpoint",
}  # fmt: skip
"""The phase to which belongs what a stage says that it is doing."""
COUNTED = ("rollout", "scoring", "update")
"""Phases whose tokens are counted."""


@dataclass(frozen=True)
class Limits:
    """What a device can do at most; None where it is not known."""

    flops: float | None = None
    """Floating-point operations per second, dense, in the precision of the run."""
    bandwidth: float | None = None
    """Bytes per second from its memory."""


def limits(device_name: str, precision: str) -> Limits:
    """Of the device that its driver calls so, for products in a precision."""
    device = devices.known(device_name)
    return Limits() if device is None else Limits(device.flops.get(precision), device.bandwidth)


class Phases:
    """A clock that belongs to one phase at a time, so that the phases together are the whole time.

    A CUDA device is waited for where one phase ends and the next begins, and nowhere else.
    """

    _range: record_function
    """What a trace shows of the phase."""

    def __init__(self, device: torch.device, limits: Limits) -> None:
        self.device, self.limits = device, limits
        self._now: str | None = None
        self._since, self._kept = 0.0, False
        self.forget()

    def forget(self) -> None:
        """Start at zero: what came before does not count."""
        self.end()
        self._seconds: dict[str, float] = defaultdict(float)
        self._tokens: dict[str, float] = defaultdict(float)
        self._at_best: dict[str, float] = defaultdict(float)

    def begin(self, doing: str) -> None:
        """Something begins, by the names of `PHASES`; what has another name belongs to the phase it falls into."""
        phase = PHASES.get(doing)
        if phase is None or phase == self._now or self._kept:
            return
        self.end()
        self._now, self._since = phase, time.perf_counter()
        self._range = record_function(phase)
        self._range.__enter__()

    def end(self) -> None:
        """The phase is over, and until the next one no time is counted."""
        if self._now is None:
            return
        self._settle()
        self._range.__exit__(None, None, None)
        self._now = None

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """All that is done inside, sampling and saving too, is part of an evaluation."""
        self.begin("evaluation")
        self._kept = True
        try:
            yield
        finally:
            self._kept = False

    def count(self, phase: str, tokens: float, num_bytes: float = 0.0, flops: float = 0.0) -> None:
        """What a phase got through, and what it had to read from memory or to calculate for it at least."""
        self._tokens[phase] += tokens
        if num_bytes and self.limits.bandwidth:
            self._at_best[f"bandwidth_share_{phase}"] += num_bytes / self.limits.bandwidth
        if flops and self.limits.flops:
            self._at_best[f"flops_share_{phase}"] += flops / self.limits.flops

    def row(self, num_steps: int, total: Callable[[Tensor], Tensor]) -> dict[str, float]:
        """Of the steps since the last row: seconds per step, tokens per second, shares of the bounds.

        Tokens are those of all processes, which `total` sums up; the rest is of this one.
        """
        self._settle()
        tokens = total(torch.tensor([self._tokens[phase] for phase in COUNTED], dtype=torch.float64)).tolist()
        found = {
            f"seconds_{phase}": round(self._seconds[phase] / num_steps, 4)
            for phase in dict.fromkeys(PHASES.values())
            if phase in self._seconds
        }
        for phase, number in zip(COUNTED, tokens, strict=True):
            if number and (spent := self._seconds.get(phase)):
                found[f"tokens_per_second_{phase}"] = round(number / spent, 1)
        for name, seconds in self._at_best.items():
            if spent := self._seconds.get(name.rpartition("_")[2]):
                found[name] = round(seconds / spent, 4)
        for counts in (self._seconds, self._tokens, self._at_best):
            counts.clear()
        return found

    def _settle(self) -> None:
        """Write the time so far down to the phase that it belongs to."""
        if self._now is None:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        self._seconds[self._now] += now - self._since
        self._since = now


@dataclass(frozen=True)
class Cost:
    """What a dense model must at least read and calculate. A sliding window is not taken into account."""

    trunk: int
    """Weights that every token is multiplied with."""
    head: int
    """Those that make logits."""
    attention: int
    """Operations per pair of tokens of a text, in all layers."""
    weight_bytes: float
    cache_bytes: float
    """Keys and values of a token."""
    trained: float
    """Share of the weights that are trained."""

    def reading(self, prompts: Tensor, responses: Tensor) -> float:
        """Operations of a forward pass over texts, from lengths [B] in tokens; logits are made for responses alone.

        Attention counts as if every token saw the whole text (Chowdhery et al. 2022, appendix B).
        """
        texts = prompts + responses
        weights = 2 * (self.trunk * texts.sum() + self.head * responses.sum())
        return float(weights + self.attention * texts.square().sum())

    def learning(self, prompts: Tensor, responses: Tensor) -> float:
        """The same of forward and backward pass: gradients of activations always, of weights where they are trained."""
        return (2 + self.trained) * self.reading(prompts, responses)

    def decoding(self, prompts: Tensor, responses: Tensor) -> float:
        """Bytes that decoding reads: all weights for each token of the longest response, and each row's cache."""
        cached = responses * prompts + responses * (responses - 1) / 2  # before token t it holds prompt + t tokens
        return float(responses.max() * self.weight_bytes + cached.sum() * self.cache_bytes)


def cost_of(model: PreTrainedModel, num_bytes: int) -> Cost:
    """The cost of a model whose numbers are multiplied and cached in `num_bytes` each."""
    config = model.config.get_text_config()
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    output = model.get_output_embeddings()
    head = [] if output is None else [output.weight]
    trunk = [p for p in model.parameters() if id(p) not in embeddings and not any(p is weight for weight in head)]
    size = sum(p.numel() for p in trunk)
    return Cost(
        trunk=size,
        head=sum(weight.numel() for weight in head),
        attention=4 * config.num_hidden_layers * config.num_attention_heads * _head_width(config),
        weight_bytes=sum(min(p.nbytes, p.numel() * num_bytes) for p in [*trunk, *head]),  # quantised ones are smaller
        cache_bytes=cache_bytes_per_token(config, num_bytes),
        trained=sum(p.numel() for p in trunk if p.requires_grad) / size,
    )


def cache_bytes_per_token(config: PreTrainedConfig, num_bytes: int) -> int:
    """Keys and values of a token in all layers of a decoder, whose numbers take `num_bytes` each."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * _head_width(text) * num_bytes)


def _head_width(text: PreTrainedConfig) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


class Trace:
    """torch's profiler over a few steps: one iteration of PPO, three steps of another stage.

    The first two steps, which compile and warm up, are left out where the stage has others.
    """

    def __init__(self, folder: Path, stage: str, phases: Phases, say: Callable[[str], None]) -> None:
        self.folder, self._phases, self._say = folder / "profile", phases, say
        self._length = 1 if stage == "ppo" else 3
        self._first, self._behind = 0, 0
        self._profiler: profile | None = None
        self._written = False

    def begin(self, step: int, num_steps: int) -> None:
        """Training begins with `step` steps behind."""
        self._first = step + min(2, max(num_steps - step - self._length, 0))
        self.at(step)

    def at(self, step: int) -> None:
        """`step` steps are behind."""
        self._behind = step
        if self._profiler is not None:
            if step >= self._first + self._length:
                self.write()
        elif step >= self._first and not self._written:
            self._phases.end()  # a phase that began before would not be in the trace
            on_device = [ProfilerActivity.CUDA] if self._phases.device.type == "cuda" else []
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # read now; below it says on stderr that it starts and stops
            self._profiler = profile(activities=[ProfilerActivity.CPU, *on_device], acc_events=True)
            self._profiler.start()

    def write(self) -> None:
        """End the recording, if there is one, and write it."""
        if self._profiler is None:
            return
        self._phases.end()
        self._profiler.stop()
        self.folder.mkdir(exist_ok=True)
        self._profiler.export_chrome_trace(str(self.folder / "trace.json.gz"))
        order = "self_device_time_total" if self._phases.device.type == "cuda" else "self_cpu_time_total"
        table = self._profiler.key_averages().table(sort_by=order, row_limit=40, max_name_column_width=80)
        (self.folder / "kernels.txt").write_text(table, encoding="utf-8")
        self._profiler, self._written = None, True
        steps = f"steps {self._first + 1} to {self._behind}" if self._length > 1 else f"iteration {self._first + 1}"
        self._say(f"profile of {steps}: {self.folder}/trace.json.gz (for ui.perfetto.dev) and kernels.txt")
