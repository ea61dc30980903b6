"""The table of devices: their names, and what they do at most."""

import pytest

from rlhf.data.errors import SettingsError
from rlhf.stages import devices
from rlhf.stages.devices import known, named, several


@pytest.mark.parametrize(("name", "found"), [
    ("h100", "H100 80GB"), ("H100 80GB", "H100 80GB"), ("h100-pcie", "H100 PCIe"), ("a100-40gb", "A100 40GB"),
    ("rtx4090", "RTX 4090"), ("3090", "RTX 3090"), ("L4", "L4"), ("l40s", "L40S"), ("v100 16gb", "V100 16GB"),
])  # fmt: skip
def test_a_device_is_named_by_so_much_as_tells_it_apart(name: str, found: str) -> None:
    assert named(name).name == found


def test_so_many_devices_are_asked_for_by_another_option() -> None:
    with pytest.raises(SettingsError, match="--device 8xH100: is one; for so many of a kind give --devices 8xH100"):
        named("8xH100")


@pytest.mark.parametrize(("name", "message"), [
    ("a100", "may be A100 80GB or A100 40GB"), ("h9000", "no such device"), ("", "no such device"),
])  # fmt: skip
def test_a_device_that_is_not_told_apart_is_refused_with_those_that_there_are(name: str, message: str) -> None:
    with pytest.raises(SettingsError, match=f"--device {name}: {message}; give one of B200, H200"):
        named(name)


@pytest.mark.parametrize(("driver", "found"), [
    ("NVIDIA H100 80GB HBM3", "H100 80GB"), ("NVIDIA H100 PCIe", "H100 PCIe"), ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
    ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("Tesla T4", "T4"), ("NVIDIA L4", "L4"), ("NVIDIA L40S", "L40S"),
    ("NVIDIA RTX A6000", None), ("NVIDIA GB200", None),
])  # fmt: skip
def test_drivers_names_are_known(driver: str, found: str | None) -> None:
    device = known(driver)
    assert (device and device.name) == found


def test_data_sheets_are_of_dense_matrices_and_bf16_is_the_fastest() -> None:
    assert named("h100").flops == {"fp32": 67e12, "tf32": 494e12, "bf16": 989e12, "fp16": 989e12}
    for device in devices.DEVICES.values():
        assert max(device.flops, key=lambda kind: (device.flops[kind], kind)) in ("bf16", "fp16")


@pytest.mark.parametrize(("text", "number", "name"), [
    ("64xH100", 64, "H100 80GB"), ("8xA100-80GB", 8, "A100 80GB"), ("1×l40s", 1, "L40S"), ("2XRTX4090", 2, "RTX 4090"),
])  # fmt: skip
def test_several_devices_are_a_number_and_a_name(text: str, number: int, name: str) -> None:
    found = several(text)
    assert (found[0], found[1].name) == (number, name)


@pytest.mark.parametrize(("text", "message"), [
    ("h100", "--devices h100: write how many of which, such as 64xH100 or 8xA100-80GB"),
    ("0xh100", "--devices 0xh100: write how many of which"),
    ("12xh100", "--devices 12xh100: machines have 8 each; use a multiple"),
    ("8xa100", "--devices a100: may be A100 80GB or A100 40GB; give one of B200, "),
    ("2xcpu", "--devices cpu: no such device; give one of B200, "),
])  # fmt: skip
def test_what_is_no_number_of_a_device_is_refused(text: str, message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        several(text)
    assert str(refused.value).startswith(message)


def test_cards_send_over_their_links_and_between_machines_over_all_ports_of_a_machine() -> None:
    h100, a100 = named("h100"), named("a100-80gb")
    assert (h100.between(8), h100.between(64)) == (450e9, 8 * 50e9)  # half of 900 GB/s; eight times 400 Gb/s
    assert (a100.between(2), a100.between(16)) == (300e9, 8 * 25e9)
    assert named("t4").between(16) == 16e9  # its link is the slower one
