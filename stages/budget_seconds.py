"""How long a phase takes on a device, and how fast the one that is here is."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rlhf.stages.budget import GIB, Phase
from rlhf.stages.devices import Device, known, named
from rlhf.stages.footprint import Fused

COMPILED, PLAIN, ON_CPU = 0.43, 0.30, 0.5
"""Share of a device's FLOP/s that products reach with what stands between them: compiled, not compiled, on a CPU."""
BANDWIDTH = 0.45
"""Share of a device's bandwidth that decoding reaches."""
LINKS = 0.7
"""Share of the bandwidth between devices that is reached."""
LAYER: dict[Fused, float] = {None: 1.5e-3, "layers": 8e-4, "all": 8e-4, "whole": 0.0}
"""Seconds that a pass through a layer takes on a GPU however small it is, for Python and the launching of kernels, by
what is compiled."""
LAYER_ON_CPU = 3e-4
"""The same on a CPU."""
DECODED, RECORDED = 8e-4, 5e-5
"""The same for a token that is decoded, and in a CUDA graph."""


def seconds(phase: Phase, device: Device, precision: str, num_processes: int = 1) -> float:
    """Of one time of a phase: what takes longest of products, memory and the launching of kernels, and of what is sent
    so much as is not hidden behind it."""
    reached = (COMPILED if phase.fused else PLAIN) if device.is_gpu else ON_CPU
    products = phase.flops / (device.flops[precision] * reached)
    launching = phase.passes * (LAYER[phase.fused] if device.is_gpu else LAYER_ON_CPU)
    each = (RECORDED if phase.recorded else DECODED) if device.is_gpu else LAYER_ON_CPU
    decoding = max(phase.num_bytes / (device.bandwidth * BANDWIDTH), phase.steps * each)
    work = max(products, launching) + decoding
    return work + max(sending(phase, device, num_processes) - phase.hidden * work, 0.0)


def sending(phase: Phase, device: Device, num_processes: int) -> float:
    """Seconds that a process takes to send what it has to, by itself."""
    return phase.sent / (device.between(num_processes) * LINKS)


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
