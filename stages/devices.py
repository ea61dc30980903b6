"""What devices can do, from their makers' data sheets. No torch here: the command line names them."""

import math
import re
from dataclasses import dataclass

from rlhf.data.errors import SettingsError

USABLE = 0.92
"""Of a device's memory. The rest is for CUDA itself and for gaps between tensors."""
PER_MACHINE = 8
"""Cards in a machine, as in NVIDIA's DGX and HGX."""


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
    link: float = math.inf
    """Bytes per second that it can send to others in its machine; without end where that is not known."""
    network: float = math.inf
    """Bytes per second that it can send into other machines."""

    @property
    def usable(self) -> float:
        """GiB that are counted on."""
        return self.gib * USABLE

    def between(self, num: int) -> float:
        """Bytes per second that each of `num` can send on around them all.

        Within a machine over its links. Around several machines NCCL lays a ring through every card's network port, so
        that the ports of a machine share the load.
        """
        return self.link if num <= PER_MACHINE else min(self.link, PER_MACHINE * self.network)

    def precision(self, setting: str, stage: str) -> str:
        """What `precision` comes to on it, as the stages choose."""
        if setting != "auto":
            return setting
        if "bf16" in self.flops:
            return "bf16"
        return "fp16" if stage == "pretrain" and self.is_gpu else "fp32"


_PCIE3, _PCIE4, _PCIE5 = 32, 64, 128  # GB/s of sixteen lanes, both directions together


def _gpu(
    name: str, gib: float, bandwidth: float, fp32: float, *, link: float, network: float = 400, **faster: float
) -> Device:
    """From GB/s, TFLOP/s, GB/s of the link in both directions together, and Gb/s of a card's network port."""
    flops = {"fp32": fp32, **faster} | ({"fp16": faster["bf16"]} if "bf16" in faster else {})
    at_most = {kind: tera * 1e12 for kind, tera in flops.items()}
    return Device(name, gib, at_most, bandwidth * 1e9, link=link / 2 * 1e9, network=network / 8 * 1e9)


# Links are the data sheets' too: "NVLink: 900 GB/s" (H100, H200), 1.8 TB/s (B200), 600 GB/s (A100), 300 GB/s (V100),
# and PCIe for the others. Network ports are those of NVIDIA's own machines: DGX H100, H200 and B200 have InfiniBand of
# 400 Gb/s (NDR) for each card, DGX A100 of 200 Gb/s (HDR), DGX-1 four ports of 100 Gb/s (EDR) for its eight V100s.
# Cards that stand in no such machine are taken to have 400 Gb/s.
_ALL = (
    _gpu("B200", 178, 8000, 75, tf32=1100, bf16=2250, link=1800),
    _gpu("H200", 139.8, 4800, 67, tf32=494, bf16=989, link=900),
    _gpu("H100 PCIe", 79.1, 2000, 51, tf32=378, bf16=756, link=_PCIE5),
    _gpu("H100 80GB", 79.1, 3350, 67, tf32=494, bf16=989, link=900),
    _gpu("A100 80GB", 79.1, 2039, 19.5, tf32=156, bf16=312, link=600, network=200),
    _gpu("A100 40GB", 39.4, 1555, 19.5, tf32=156, bf16=312, link=600, network=200),
    _gpu("L40S", 44.4, 864, 91.6, tf32=183, bf16=362, link=_PCIE4),
    _gpu("L4", 22.0, 300, 30.3, tf32=60, bf16=121, link=_PCIE4),
    _gpu("RTX 4090", 23.5, 1008, 82.6, tf32=82.6, bf16=165, link=_PCIE4),
    _gpu("RTX 3090", 23.6, 936, 35.6, tf32=35.6, bf16=71, link=_PCIE4),
    _gpu("V100 32GB", 31.7, 900, 15.7, fp16=125, link=300, network=50),
    _gpu("V100 16GB", 15.8, 900, 15.7, fp16=125, link=300, network=50),
    _gpu("T4", 14.6, 320, 8.1, fp16=65, link=_PCIE3),
)
DEVICES = {device.name: device for device in _ALL}
"""By name. H100, H200 and B200 are of the SXM kind where nothing else is said, V100 and A100 too."""


def several(text: str) -> tuple[int, Device]:
    """(number, device) of 64xH100 or 8xA100-80GB."""
    found = re.fullmatch(r"(\d+)[xX×](.+)", text)
    number = int(found[1]) if found else 0
    if found is None or number < 1:
        raise SettingsError(f"--devices {text}: write how many of which, such as 64xH100 or 8xA100-80GB")
    if number > PER_MACHINE and number % PER_MACHINE:
        raise SettingsError(f"--devices {text}: machines have {PER_MACHINE} each; use a multiple")
    return number, named(found[2], "--devices")


def named(name: str, option: str = "--device") -> Device:
    """A device by its name, or by so much of it as tells it apart from others, in any case (h100, a100-40gb)."""
    if option == "--device" and re.fullmatch(r"\d+[xX×].+", name):
        raise SettingsError(f"--device {name}: is one; for so many of a kind give --devices {name}")
    words = _words(name)
    found = [device for device in DEVICES.values() if words == _words(device.name)] or [
        device for device in DEVICES.values() if words and words <= _words(device.name)
    ]
    if name.lower() == "h100":
        found = [DEVICES["H100 80GB"]]
    if len(found) == 1:
        return found[0]
    what = f"may be {' or '.join(device.name for device in found)}" if found else "no such device"
    here = ", or cpu for this machine's" if option == "--device" else ""
    raise SettingsError(f"{option} {name}: {what}; give one of {', '.join(DEVICES)}{here}")


def known(driver_name: str) -> Device | None:
    """The device that a driver calls so ("NVIDIA H100 80GB HBM3"), None where there is no data sheet of it here."""
    words = _words(driver_name)
    return next((device for device in DEVICES.values() if _words(device.name) <= words), None)


def _words(name: str) -> set[str]:
    """In any case and order; RTX4090 and rtx-4090 are the same."""
    return set(re.findall(r"[a-z]*\d+[a-z]*|[a-z]+", name.lower().replace("rtx", "rtx ")))
