"""Numbers of steps that are read late, so that the loop need not wait for the device after each of them."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor

from rlhf.stages.bad_numbers import take_step
from rlhf.stages.runtime import Runtime


class Late:
    """The numbers of steps, in the order in which they were made, until they are read."""

    def __init__(self) -> None:
        self._unread: list[tuple[int, list[str], Tensor, torch.cuda.Event | None]] = []

    def add(self, step: int, numbers: Mapping[str, Tensor]) -> None:
        """A step was made; its numbers may still be in the making."""
        together, done = torch.stack([number.detach().float() for number in numbers.values()]), None
        copy = together.to("cpu", non_blocking=True)
        if together.is_cuda:  # the copy waits its turn here, not behind the next step
            done = torch.cuda.Event()
            done.record()
        self._unread.append((step, list(numbers), copy, done))

    def read(self, all_steps: bool) -> Iterator[tuple[int, dict[str, float]]]:
        """Steps and their numbers: of all steps, or of all but the last, which the device may be at still."""
        while len(self._unread) > (0 if all_steps else 1):
            step, names, copy, done = self._unread.pop(0)
            if done is not None:
                done.synchronize()
            yield step, dict(zip(names, copy.tolist(), strict=True))


def decides_on_device(optimizer: Any) -> bool:
    """Whether the optimizer reads on the device whether its step is to be taken, as torch's fused ones do."""
    return getattr(getattr(optimizer, "optimizer", optimizer), "_step_supports_amp_scaling", False)


def leave_out_if_bad(optimizer: Any, numbers: Mapping[str, Tensor]) -> None:
    """Let the next step of an optimizer that decides on the device change nothing if a number is not finite."""
    bad = ~torch.isfinite(torch.stack([number.detach().float() for number in numbers.values()])).all()
    getattr(optimizer, "optimizer", optimizer).found_inf = bad.float()


def step_if_fine(run: Runtime[Any], optimizer: AcceleratedOptimizer, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Let the optimizer step unless one of the `numbers`, those of all processes together, is not finite.

    Returns those that count: not a norm that is none while a scaler of float16 looks for its scale. The gradients are
    gone in any case.
    """
    if run.accelerator.scaler is None and decides_on_device(optimizer):
        leave_out_if_bad(optimizer, numbers)
        optimizer.step()
        optimizer.zero_grad()
        return numbers
    read = {name: number.item() for name, number in numbers.items()}
    take_step(run, [optimizer], read)
    return {name: numbers[name] for name in read}
