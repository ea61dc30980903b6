"""GiB and seconds of a recipe's stages on a device, before anything is run; and what to change where it does not fit.

Run by `rlhf estimate`, which has read the recipe: it writes a request to the standard input, as JSON, and is told the
same way. `budget` says what a stage holds and does, this module what that comes to on a device.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import ValidationError
from transformers import AutoConfig, PreTrainedConfig

from rlhf.data.errors import RefusedError, SettingsError, first_line
from rlhf.stages.budget import GIB, Case, Phase
from rlhf.stages.budget_ppo import is_adapter, ppo
from rlhf.stages.budget_stages import pretrain, reward, sft
from rlhf.stages.devices import Device, known, named
from rlhf.stages.models import load_tokenizer
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.pretrain.model import model_config
from rlhf.stages.pretrain.tokenizer import is_trained_here
from rlhf.stages.reward.config import RewardSettings
from rlhf.stages.runtime import be_quiet
from rlhf.stages.settings import StageSettings
from rlhf.stages.sft.config import SFTSettings

SECTIONS: dict[str, type[StageSettings]] = {
    "pretrain": PretrainSettings, "sft": SFTSettings, "reward": RewardSettings, "ppo": PPOSettings,
}  # fmt: skip
BUDGETS: dict[str, Callable[[Any, Case], list[Phase]]] = {
    "pretrain": pretrain, "sft": sft, "reward": reward, "ppo": ppo,
}  # fmt: skip
USABLE = 0.92
"""Of a device's memory. The rest is for CUDA itself and for gaps between tensors."""
COMPILED, PLAIN, ON_CPU = 0.43, 0.30, 0.5
"""Share of a device's FLOP/s that products reach with what stands between them: compiled, not compiled, on a CPU."""
PROCESS = 0.15
"""GiB that a process on a CPU takes beside its tensors."""
BANDWIDTH = 0.45
"""Share of a device's bandwidth that decoding reaches."""
LAYER, DECODED = 3e-4, 8e-4
"""Seconds that a layer takes however small it is, for Python and the launching of kernels: in a pass, and for a token
that is decoded."""
CHARACTERS = 256
"""Taken for the vocabulary of `tokenizer: characters`, which depends on the text."""


@dataclass(frozen=True)
class Request:
    """What is asked: the sections of a recipe, their rows where they were counted, and for which device."""

    stages: dict[str, Any]
    rows: dict[str, dict[str, int]]
    num_processes: int
    device: str | None

    def section(self, stage: str) -> Any:
        """Settings of a stage, None where there is none."""
        return SECTIONS[stage].model_validate(self.stages[stage]) if stage in self.stages else None


def main() -> None:
    """Read a request, write the answer."""
    be_quiet()
    request = Request(**json.load(sys.stdin))
    print(json.dumps(answer(request)))


def answer(request: Request) -> dict[str, Any]:
    """Of every stage: its phases, whether they fit, and if not, what to change."""
    device = chosen(request.device)
    stages = {}
    for stage in request.stages:
        settings = request.section(stage)
        phases, precision = phases_of(request, stage, settings, device)
        stages[stage] = _told(phases, device, precision)
        if not stages[stage]["fits"]:
            stages[stage]["changes"] = changes(request, stage, settings, device)
    return {
        "device": {"name": device.name, "gib": round(device.gib, 2), "usable_gib": round(device.gib * USABLE, 2)},
        "num_processes": request.num_processes,
        "fits": all(found["fits"] for found in stages.values()),
        "stages": stages,
    }


def _told(phases: list[Phase], device: Device, precision: str) -> dict[str, Any]:
    found = [
        {
            "name": phase.name, "gib": {kind: round(size, 4) for kind, size in phase.gib.items()},
            "total_gib": round(phase.total, 4), "seconds": seconds(phase, device, precision), "times": phase.times,
        }
        for phase in phases
    ]  # fmt: skip
    peak = max(phase.total for phase in phases)
    known_times = all(phase.times is not None for phase in phases)
    total = sum(seconds(phase, device, precision) * (phase.times or 0) for phase in phases)
    return {
        "precision": precision, "peak_gib": round(peak, 4), "fits": _fits(peak, device),
        "seconds": total if known_times else None, "phases": found, "changes": [],
    }  # fmt: skip


def phases_of(request: Request, stage: str, settings: Any, device: Device) -> tuple[list[Phase], str]:
    """The phases of a stage on a device, and the precision that it multiplies in."""
    precision = device.precision(settings.precision, stage)
    if precision not in device.flops:
        raise RefusedError(f"{stage}.precision: {precision} is not supported by {device.name}; use auto or fp32")
    rows = request.rows.get(stage, {})
    case = Case(
        precision, device.is_gpu, request.num_processes, config_of(request, stage, settings.model),
        num_rows=rows.get("rows"), num_answers=rows.get("answers", 2),
    )  # fmt: skip
    if isinstance(settings, PPOSettings):
        case = _with_rewards(request, settings, case)
    phases = BUDGETS[stage](settings, case)
    if not device.is_gpu:
        for phase in phases:
            phase.gib["process"] = PROCESS
    return phases, precision


def _with_rewards(request: Request, settings: PPOSettings, case: Case) -> Case:
    section = request.section("reward")
    others = [read_config(spec.model, "ppo.rewards") for spec in settings.rewards if spec.model is not None]
    if settings.reward_model is not None:
        lora = settings.lora if is_adapter(settings.reward_model) else None
        of_reward = read_config(settings.reward_model, "ppo.reward_model")
    elif section is not None:
        lora, of_reward = section.lora, config_of(request, "reward", section.model)
    elif settings.rewards:
        return replace(case, other_rewards=others)
    else:
        raise SettingsError("ppo.reward_model: not set, and the recipe has no reward section; name a folder or hub id")
    return replace(case, reward_config=of_reward, reward_lora=lora, other_rewards=others)


def config_of(request: Request, stage: str, reference: str | None) -> PreTrainedConfig:
    """The config of a stage's model: of the one that it names, or of what the stages before it will have made."""
    if reference is not None:
        return read_config(reference, f"{stage}.model")
    if stage == "pretrain":
        settings = request.section(stage)
        assert isinstance(settings, PretrainSettings)
        tokenizer: Any = _Vocabulary(_vocabulary_size(settings))
        return model_config(settings, tokenizer)
    before = "pretrain" if stage == "sft" else "sft"
    section = request.section(before)
    if section is None:
        raise SettingsError(
            f"{stage}.model: not set, and the recipe has no {before} section; name a model folder or hub id"
        )
    return config_of(request, before, section.model)


@dataclass(frozen=True)
class _Vocabulary:
    """What `model_config` wants to know of a tokenizer."""

    size: int
    eos_token_id: int = 0
    pad_token_id: int = 0

    def get_vocab(self) -> dict[str, int]:
        return {"": self.size - 1}


def _vocabulary_size(settings: PretrainSettings) -> int:
    if not is_trained_here(settings):
        return max(load_tokenizer(settings.tokenizer).get_vocab().values()) + 1
    return settings.vocab_size if settings.tokenizer == "bpe" else CHARACTERS


def read_config(reference: str, where: str) -> PreTrainedConfig:
    """The config of a model folder or hub id. Raises SettingsError naming the setting `where`."""
    try:
        return AutoConfig.from_pretrained(reference, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{where}: no config of a model in '{reference}': {first_line(error)}") from error


# --- time


def seconds(phase: Phase, device: Device, precision: str) -> float:
    """Of one time of a phase: what takes longest of products, memory and the launching of kernels."""
    reached = (COMPILED if phase.compiled else PLAIN) if device.is_gpu else ON_CPU
    products = phase.flops / (device.flops[precision] * reached)
    launching = 0.0 if phase.compiled else phase.passes * LAYER
    decoding = max(phase.num_bytes / (device.bandwidth * BANDWIDTH), phase.steps * DECODED)
    return max(products, launching) + decoding


# --- devices


def chosen(name: str | None) -> Device:
    """The device that is named, or the one that torch sees here."""
    if name == "cpu" or (name is None and not torch.cuda.is_available()):
        return _this_machine()
    if name is not None:
        return named(name)
    driver_name = torch.cuda.get_device_name()
    gib = torch.cuda.get_device_properties(0).total_memory / GIB
    if (found := known(driver_name)) is not None:
        return replace(found, name=driver_name, gib=gib)
    flops = {"fp32": _measured_flops("cuda", torch.float32)}
    flops |= {"fp16": _measured_flops("cuda", torch.float16)}
    if torch.cuda.is_bf16_supported(including_emulation=False):
        flops |= {"bf16": flops["fp16"], "tf32": flops["fp32"]}
    return Device(driver_name, gib, flops, _measured_bandwidth("cuda"))


def _this_machine() -> Device:
    """Its memory, and what it does in a quarter of a second."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    fp32 = _measured_flops("cpu", torch.float32)
    return Device("cpu", gib, {"fp32": fp32}, _measured_bandwidth("cpu"), is_gpu=False)


def _measured_flops(device: str, dtype: torch.dtype) -> float:
    """Of products of square matrices, the best of some."""
    size = 1024 if device == "cpu" else 8192
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    return 2 * size**3 / _least_seconds(device, lambda: matrix @ matrix)


def _measured_bandwidth(device: str) -> float:
    """Of a copy, which reads and writes."""
    source = torch.ones(2**25, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _least_seconds(device, lambda: target.copy_(source))


def _least_seconds(device: str, action: Callable[[], Any]) -> float:
    found = []
    for _ in range(4):
        began = time.perf_counter()
        action()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return min(found)


# --- what to change


def changes(request: Request, stage: str, settings: Any, device: Device) -> list[dict[str, Any]]:
    """Settings that lower the peak, each by itself, those first that gain most. Where none is enough, the last entry
    is of several together: one after the other, until it fits or there are no more."""
    now = _peak(request, stage, settings, device)

    def tried(changed: dict[str, Any]) -> dict[str, Any] | None:
        """What changes come to; None where they do not go with the other settings, or gain nothing."""
        peak = _peak(request, stage, _with(settings, changed), device)
        if peak >= 0.99 * now:
            return None
        named = {f"{stage}.{name}": value for name, value in changed.items() if getattr(settings, name) != value}
        return {"settings": named, "peak_gib": round(peak, 4), "fits": _fits(peak, device)}

    alone = []
    for candidate in _candidates(stage, settings, device):
        with suppress(ValidationError, RefusedError):
            changed = candidate
            if "microbatch_size" in candidate:
                changed = {"microbatch_size": _microbatch(request, stage, settings, device, now)}
            if (found := tried(changed)) is not None:
                alone.append((found, changed))
    alone.sort(key=lambda pair: pair[0]["peak_gib"])
    found_all = [found for found, _ in alone]
    if any(found["fits"] for found in found_all) or len(alone) < 2:
        return found_all
    together: dict[str, Any] = {}
    best: dict[str, Any] | None = None
    for _, changed in alone:
        with suppress(ValidationError, RefusedError):
            found = tried(changed | together)
            if found is not None and (best is None or found["peak_gib"] < 0.99 * best["peak_gib"]):
                together, best = changed | together, found
            if best is not None and best["fits"]:
                break
    return [*found_all, *([best] if best is not None and len(best["settings"]) > 1 else [])]


def _candidates(stage: str, settings: Any, device: Device) -> Iterator[dict[str, Any]]:
    """Changes to try. How small the microbatch has to be is found out."""
    if settings.microbatch_size != 1:
        yield {"microbatch_size": 1}
    if device.precision("auto", stage) != device.precision(settings.precision, stage):
        yield {"precision": "auto"}
    if stage in ("pretrain", "ppo") and not settings.gradient_checkpointing:
        yield {"gradient_checkpointing": True}
    if stage == "sft":
        yield {"args": settings.args | {"activation_checkpointing": True}}
    if stage in ("sft", "reward"):
        if settings.lora is None:
            yield {"lora": {}}
        yield {"max_length": settings.max_length // 2}
    if stage == "ppo":
        if settings.generation_batch_size != 1:
            share = settings.generation_batch_size or settings.rollout_batch_size
            yield {"generation_batch_size": max(share // 4, 1)}
        if settings.layout == "separate":
            yield {"layout": "shared_trunk"}
        if settings.layout != "adapters":
            yield {"offload": True}
            yield {"layout": "adapters", "offload": False, "weights": "fp32"}
        if settings.weights == "fp32" and settings.layout != "adapters" and device.precision("auto", stage) == "bf16":
            yield {"weights": "bf16"}
        if settings.quantization is None:
            yield {"layout": "adapters", "offload": False, "weights": "fp32", "quantization": "4bit"}


def _microbatch(request: Request, stage: str, settings: Any, device: Device, now: float) -> int:
    """The largest power of two that fits; 1 where none does. Memory grows by about as much with every row."""
    name = "rollout_batch_size" if stage == "ppo" else "global_batch_size"
    rows = settings.microbatch_size or max(getattr(settings, name) // request.num_processes, 1)
    least = _peak(request, stage, _with(settings, {"microbatch_size": 1}), device)
    room = device.gib * USABLE - least
    if room <= 0 or now <= least:
        return 1
    size = 1 << (max(int(1 + room / (now - least) * (rows - 1)), 1).bit_length() - 1)
    while size > 1 and not _fits(_peak(request, stage, _with(settings, {"microbatch_size": size}), device), device):
        size //= 2
    return size


def _with(settings: Any, changed: dict[str, Any]) -> Any:
    return type(settings).model_validate(settings.model_dump(mode="json", exclude_unset=True) | changed)


def _peak(request: Request, stage: str, settings: Any, device: Device) -> float:
    return max(phase.total for phase in phases_of(request, stage, settings, device)[0])


def _fits(peak: float, device: Device) -> bool:
    return peak <= device.gib * USABLE


if __name__ == "__main__":
    try:
        main()
    except RefusedError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
