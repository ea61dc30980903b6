"""What to change in a stage that does not fit."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from rlhf.data.errors import RefusedError
from rlhf.stages.budget_recipe import Request, phases_of
from rlhf.stages.devices import Device

SIZES = ("microbatch_size", "generation_batch_size")
"""Settings of which it is found out how small they have to be."""
SERVER = {"engine": "vllm", "server_url": "http://127.0.0.1:8000"}
"""Where nothing in the process samples, which for that would gather the whole model."""
LEAST = 0.05
"""GiB that a change has to bring to be one of several."""
Changed = dict[str, Any]


def changes(request: Request, stage: str, settings: Any, device: Device) -> list[dict[str, Any]]:
    """Settings that lower the peak, each by itself, those first that gain most. Where none is enough, the last entry
    is of several together: as few as fit, or all that help."""
    tried = _Tried(request, stage, settings, device)
    now, alone = tried.peak({}), []
    for candidate in tried.candidates():
        with suppress(ValidationError, RefusedError):
            changed = {name: tried.largest(name, {}) if value and name in SIZES else value
                       for name, value in candidate.items()}  # fmt: skip
            if tried.peak(changed) < 0.99 * now:
                alone.append(tried.told(changed))
    alone.sort(key=lambda found: found["peak_gib"])
    if any(found["fits"] for found in alone):
        return alone
    together = tried.told(tried.together())
    return [*alone, *([together] if len(together["settings"]) > 1 else [])]


class _Tried:
    """A stage with changed settings. Alone, together and as sizes the same ones come up again; each is traced once."""

    def __init__(self, request: Request, stage: str, settings: Any, device: Device) -> None:
        self._request, self._stage, self._settings, self._device = request, stage, settings, device
        self._known: dict[str, dict[str, float]] = {}

    def phases(self, changed: Changed) -> dict[str, float]:
        """GiB of each phase. Raises ValidationError or RefusedError where changes do not go with other settings."""
        given = self._settings.model_dump(mode="json", exclude_unset=True)
        wanted = type(self._settings).model_validate(given | changed)
        key = wanted.model_dump_json()
        if key not in self._known:
            phases = phases_of(self._request, self._stage, wanted, self._device)[0]
            self._known[key] = {phase.name: phase.total for phase in phases}
        return self._known[key]

    def peak(self, changed: Changed) -> float:
        return max(self.phases(changed).values())

    def excess(self, changed: Changed) -> float:
        """GiB that are lacking, of all phases together: what mends one that is not the largest counts, too."""
        return sum(max(total - self._device.usable, 0.0) for total in self.phases(changed).values())

    def told(self, changed: Changed) -> dict[str, Any]:
        """What changes come to."""
        named = {f"{self._stage}.{k}": v for k, v in changed.items() if getattr(self._settings, k) != v}
        peak = self.peak(changed)
        return {"settings": named, "peak_gib": round(peak, 4), "fits": peak <= self._device.usable}

    def together(self) -> Changed:
        """Changes that go together: as few as fit, found by leaving out again what the later ones made unnecessary; or
        all that help, where they do not fit."""
        chosen: Changed = {}
        lacking = self.excess({})
        for candidate in self.candidates():
            with suppress(ValidationError, RefusedError):
                if (left := self.excess(chosen | candidate)) < lacking - LEAST:
                    chosen, lacking = chosen | candidate, left
            if not lacking:
                break
        if lacking:
            return chosen
        for name in reversed(list(chosen)):
            without = {other: value for other, value in chosen.items() if other != name}
            with suppress(ValidationError, RefusedError):
                chosen = chosen if self.excess(without) else without
        for name in SIZES:
            if name in chosen:
                chosen[name] = self.largest(name, chosen)
        return chosen

    def largest(self, name: str, beside: Changed) -> int:
        """The largest power of two that fits as one of SIZES, beside other changes; 1 where none does. The memory of a
        phase grows by about as much with every row."""
        batch = "rollout_batch_size" if self._stage == "ppo" else "global_batch_size"
        share = getattr(self._settings, batch) // self._request.processes_of(self._stage)
        rows = getattr(self._settings, name) or max(share, 1)
        whole = self.phases({other: value for other, value in beside.items() if other != name})
        least = self.phases(beside | {name: 1})
        most = rows
        for phase, total in whole.items():
            if (room := self._device.usable - least[phase]) < 0:
                return 1
            if total > self._device.usable:
                most = min(most, int(1 + room / (total - least[phase]) * (rows - 1)))
        size = 1 << (max(most, 1).bit_length() - 1)
        while size > 1 and self.excess(beside | {name: size}):
            size //= 2
        return size

    def candidates(self) -> Iterator[Changed]:
        """Changes to try, those first that change the result least."""
        stage, settings, device = self._stage, self._settings, self._device
        if settings.microbatch_size != 1:
            yield {"microbatch_size": 1}
        if stage == "ppo" and settings.generation_batch_size != 1:
            yield {"generation_batch_size": 1}
        if device.precision("auto", stage) != device.precision(settings.precision, stage):
            yield {"precision": "auto"}
        elif stage != "ppo" and "fp16" in device.flops and device.precision("auto", stage) == "fp32":
            yield {"precision": "fp16"}  # of cards without bf16
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
            if settings.layout != "adapters":
                yield {"offload": True}
                if settings.weights == "fp32" and device.precision("auto", stage) == "bf16":
                    yield {"weights": "bf16"}
            if settings.layout == "separate":
                yield {"layout": "shared_trunk"}
            if settings.layout != "adapters":
                yield {"layout": "adapters", "offload": False, "weights": "fp32"}
            if settings.quantization is None:
                yield {"layout": "adapters", "offload": False, "weights": "fp32", "quantization": "4bit"}
            in_parts = self._request.layouts.get(stage, "ddp") != "ddp" and self._request.processes_of(stage) > 1
            if in_parts and settings.rollout.engine != "vllm" and not settings.rollout.one_step_off:
                yield {"rollout": SERVER, "generation_batch_size": None}
