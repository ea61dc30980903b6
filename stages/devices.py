"""What devices can do, from their makers' data sheets. No torch here: the command line names them."""

import re
from dataclasses import dataclass

from rlhf.data.errors import SettingsError


@dataclass(frozen=True)
class Device:
    """One device: memory as its driver shows it, and the most that it can do in a second."""

    name: str
    gib: float
    flops: dict[str, float]
    """Floating-point operations per second on dense matrices, by precision: bf16, fp16, tf32, fp32. What is not there
    the device cannot do."""
    bandwidth: float
    """Bytes per second from its memory."""
    is_gpu: bool = True

    def precision(self, setting: str, stage: str) -> str:
        """What `precision` comes to on it, as the stages choose."""
        if setting != "auto":
            return setting
        if "bf16" in self.flops:
            return "bf16"
        return "fp16" if stage == "pretrain" and self.is_gpu else "fp32"


def _gpu(name: str, gib: float, bandwidth: float, fp32: float, **faster: float) -> Device:
    """From GB/s and TFLOP/s."""
    flops = {"fp32": fp32, **faster} | ({"fp16": faster["bf16"]} if "bf16" in faster else {})
    return Device(name, gib, {kind: tera * 1e12 for kind, tera in flops.items()}, bandwidth * 1e9)


_ALL = (
    _gpu("B200", 178, 8000, 75, tf32=1100, bf16=2250),
    _gpu("H200", 139.8, 4800, 67, tf32=494, bf16=989),
    _gpu("H100 PCIe", 79.1, 2000, 51, tf32=378, bf16=756),
    _gpu("H100 80GB", 79.1, 3350, 67, tf32=494, bf16=989),
    _gpu("A100 80GB", 79.1, 2039, 19.5, tf32=156, bf16=312),
    _gpu("A100 40GB", 39.4, 1555, 19.5, tf32=156, bf16=312),
    _gpu("L40S", 44.4, 864, 91.6, tf32=183, bf16=362),
    _gpu("L4", 22.0, 300, 30.3, tf32=60, bf16=121),
    _gpu("RTX 4090", 23.5, 1008, 82.6, tf32=82.6, bf16=165),
    _gpu("RTX 3090", 23.6, 936, 35.6, tf32=35.6, bf16=71),
    _gpu("V100 32GB", 31.7, 900, 15.7, fp16=125),
    _gpu("V100 16GB", 15.8, 900, 15.7, fp16=125),
    _gpu("T4", 14.6, 320, 8.1, fp16=65),
)
DEVICES = {device.name: device for device in _ALL}
"""By name. H100, H200 and B200 are of the SXM kind where nothing else is said, V100 and A100 too."""


def named(name: str) -> Device:
    """A device by its name, or by so much of it as tells it apart from others, in any case (h100, a100-40gb)."""
    words = _words(name)
    found = [device for device in DEVICES.values() if words == _words(device.name)] or [
        device for device in DEVICES.values() if words and words <= _words(device.name)
    ]
    if name.lower() == "h100":
        found = [DEVICES["H100 80GB"]]
    if len(found) == 1:
        return found[0]
    what = f"may be {' or '.join(device.name for device in found)}" if found else "no such device"
    raise SettingsError(f"--device {name}: {what}; give one of {', '.join(DEVICES)}, or cpu for this machine's")


def known(driver_name: str) -> Device | None:
    """The device that a driver calls so ("NVIDIA H100 80GB HBM3"), None where there is no data sheet of it here."""
    words = _words(driver_name)
    return next((device for device in DEVICES.values() if _words(device.name) <= words), None)


def _words(name: str) -> set[str]:
    """In any case and order; RTX4090 and rtx-4090 are the same."""
    return set(re.findall(r"[a-z]*\d+[a-z]*|[a-z]+", name.lower().replace("rtx", "rtx ")))
