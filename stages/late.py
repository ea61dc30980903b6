"""Numbers of steps that are read late, so that the loop need not wait for the device after each of them.

Whether a signal asked a process to end is one of them: all processes read it after the same step, and end together.
"""

from collections.abc import Iterator, Mapping, Sequence
from time import monotonic
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor

from rlhf.stages.bad_numbers import take_step
from rlhf.stages.runtime import Runtime
from rlhf.stages.stopping import SHARE_TO_FINISH

STEPS_TO_END = 4
"""That pass at most from a signal to one of several processes until all have read of it: the step on the device, one
that waits for it, the first that tells the others, and one more that is begun before that is read."""


class Late:
    """The numbers of steps, in the order in which they were made, until they are read."""

    def __init__(self, run: Runtime[Any]) -> None:
        self.run = run
        self.must_end = False
        """Whether a signal asked any process to end, as all of them know after the step that was read last."""
        self._slow = False  # steps take so long that nothing is gained by reading late, and the time to end is short
        self._since = monotonic()
        self._unread: list[tuple[int, list[str], Tensor, torch.cuda.Event | None]] = []

    def add(self, step: int, numbers: Mapping[str, Tensor]) -> None:
        """A step was made; its numbers may still be in the making. All processes call it together."""
        together, done = _together(numbers), None
        together = torch.cat([together, self.run.sum(self._flags())])
        copy = together.to("cpu", non_blocking=True)
        if together.is_cuda:  # the copy waits its turn here, not behind the next step
            done = torch.cuda.Event()
            done.record()
        self._unread.append((step, list(numbers), copy, done))

    def read(self, all_steps: bool) -> Iterator[tuple[int, dict[str, float]]]:
        """Steps and their numbers: of all steps, or of all but the last, which the device may be at still. Of all
        too where the stage must end, and where a step takes long."""
        if self.run.num_processes == 1:
            self.must_end = self.run.stopping.code > 0
        while len(self._unread) > (0 if all_steps or self.must_end or self._slow else 1):
            step, names, copy, done = self._unread.pop(0)
            if done is not None:
                done.synchronize()
            *found, asked, slow = copy.tolist()
            if self.run.num_processes > 1:
                self.must_end, self._slow = self.must_end or asked > 0, slow > 0
            yield step, dict(zip(names, found, strict=True))

    def _flags(self) -> Tensor:
        """Of this process: whether it was asked to end, and whether its last step took long."""
        now = monotonic()
        slow = STEPS_TO_END * (now - self._since) > SHARE_TO_FINISH * self.run.settings.stop_within
        self._since = now
        flags = (self.run.stopping.code > 0, slow)
        return torch.stack([torch.full((), float(flag), device=self.run.device) for flag in flags])  # a copy would wait


def decides_on_device(optimizer: Any) -> bool:
    """Whether the optimizer reads on the device whether its step is to be taken, as torch's fused ones do."""
    return getattr(getattr(optimizer, "optimizer", optimizer), "_step_supports_amp_scaling", False)


def leave_out_if_bad(optimizers: Sequence[Any], numbers: Mapping[str, Tensor]) -> None:
    """Let the next steps of optimizers that decide on the device change nothing if a number is not finite."""
    found_inf = (~are_finite(numbers)).float()
    for optimizer in optimizers:
        getattr(optimizer, "optimizer", optimizer).found_inf = found_inf


def are_finite(numbers: Mapping[str, Tensor]) -> Tensor:
    """Whether all of a step's numbers are finite: a bool on the device."""
    return torch.isfinite(_together(numbers)).all()


def _together(numbers: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([number.detach().float() for number in numbers.values()])


def step_if_fine(
    run: Runtime[Any], optimizers: Sequence[AcceleratedOptimizer], numbers: dict[str, Tensor]
) -> dict[str, Tensor]:
    """Let the optimizers step unless one of the `numbers`, those of all processes together, is not finite.

    Returns those that count: not a norm that is none while a scaler of float16 looks for its scale. The gradients are
    gone in any case.
    """
    if run.accelerator.scaler is None and all(map(decides_on_device, optimizers)):
        leave_out_if_bad(optimizers, numbers)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return numbers
    read = dict(zip(numbers, _together(numbers).tolist(), strict=True))
    take_step(run, optimizers, read)
    return {name: numbers[name] for name in read}
