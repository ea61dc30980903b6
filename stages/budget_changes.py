"""What to change in a stage that does not fit."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from rlhf.data.errors import RefusedError
from rlhf.stages.budget_recipe import Request, phases_of
from rlhf.stages.devices import Device


def changes(request: Request, stage: str, settings: Any, device: Device) -> list[dict[str, Any]]:
    """Settings that lower the peak, each by itself, those first that gain most. Where none is enough, the last entry
    is of several together: one after the other, until it fits or there are no more."""
    known: dict[str, float] = {}

    def peak_with(changed: dict[str, Any]) -> float:
        """The peak, which is traced once: alone, together and as microbatches the same settings come up again."""
        wanted = _with(settings, changed)
        key = wanted.model_dump_json()
        if key not in known:
            known[key] = max(phase.total for phase in phases_of(request, stage, wanted, device)[0])
        return known[key]

    now = peak_with({})

    def tried(changed: dict[str, Any]) -> dict[str, Any] | None:
        """What changes come to; None where they do not go with the other settings, or gain nothing."""
        peak = peak_with(changed)
        if peak >= 0.99 * now:
            return None
        named = {f"{stage}.{name}": value for name, value in changed.items() if getattr(settings, name) != value}
        return {"settings": named, "peak_gib": round(peak, 4), "fits": peak <= device.usable}

    alone = []
    for candidate in _candidates(stage, settings, device, request.processes_of(stage)):
        with suppress(ValidationError, RefusedError):
            changed = candidate
            if "microbatch_size" in candidate:
                changed = {"microbatch_size": _microbatch(request, stage, settings, device, peak_with)}
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


def _candidates(stage: str, settings: Any, device: Device, num_processes: int) -> Iterator[dict[str, Any]]:
    """Changes to try. How small the microbatch has to be is found out."""
    if settings.microbatch_size != 1:
        yield {"microbatch_size": 1}
    if device.precision("auto", stage) != device.precision(settings.precision, stage):
        yield {"precision": "auto"}
    if device.is_gpu and not settings.compile:
        yield {"compile": True}
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
            share = settings.generation_batch_size or settings.rollout_batch_size // num_processes
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


def _microbatch(
    request: Request, stage: str, settings: Any, device: Device, peak_with: Callable[[dict[str, Any]], float]
) -> int:
    """The largest power of two that fits; 1 where none does. Memory grows by about as much with every row."""
    name = "rollout_batch_size" if stage == "ppo" else "global_batch_size"
    rows = settings.microbatch_size or max(getattr(settings, name) // request.processes_of(stage), 1)
    now, least = peak_with({}), peak_with({"microbatch_size": 1})
    room = device.usable - least
    if room <= 0 or now <= least:
        return 1
    size = 1 << (max(int(1 + room / (now - least) * (rows - 1)), 1).bit_length() - 1)
    while size > 1 and peak_with({"microbatch_size": size}) > device.usable:
        size //= 2
    return size


def _with(settings: Any, changed: dict[str, Any]) -> Any:
    return type(settings).model_validate(settings.model_dump(mode="json", exclude_unset=True) | changed)
