"""Steps that would do harm: which ones are skipped, and when the stage goes back to its last checkpoint.

The remedy of the OPT logbook (Zhang et al. 2022, section 2.5) and of PaLM (Chowdhery et al. 2022, section 5.1): a run
whose loss has spiked is started again from a checkpoint before, with other data.
"""

import math
import statistics
from typing import Any

import torch
from torch import Tensor

from rlhf.stages.pretrain.config import PretrainSettings

WINDOW = 100
"""Losses of the steps before, which a new one is compared with."""
_ENOUGH = 20
_LEAST_DEVIATION = 0.01  # of the mean: a loss that hardly varies has no spike in its last digits


class Health:
    """Judges the steps. `state` is kept in checkpoints, as part of the training state.

    Whether a step is taken is decided on the device, by `limit`, so that the loop need not wait for it; what became
    of it is read a step later, or at once where the loop has to know. Which of the two changes nothing.
    """

    def __init__(self, settings: PretrainSettings, state: dict[str, Any]) -> None:
        self.settings, self.state = settings, state
        self.step, self.loss, self.grad_norm = 0, math.nan, math.nan
        """Of the last step that was read."""
        self._unread: list[tuple[int, Tensor, torch.cuda.Event | None]] = []
        state.setdefault("losses", [])  # of the last steps; None where one was skipped
        state.setdefault("skipped_in_a_row", 0)
        state.setdefault("num_skipped", 0)
        state.setdefault("rollbacks", [])
        state.setdefault("data_offset", 0)  # steps by which the order of the data has moved on

    @property
    def limit(self) -> float:
        """A loss above it is a spike. It follows from all steps but the last, which may still be unread."""
        losses = self.state["losses"][: None if self._unread else -1]
        taken = [loss for loss in losses[-WINDOW:] if loss is not None]
        if len(taken) < _ENOUGH:
            return math.inf
        mean = statistics.fmean(taken)
        return mean + self.settings.max_spike * max(statistics.pstdev(taken), _LEAST_DEVIATION * abs(mean))

    def add(self, step: int, stats: Tensor) -> None:
        """A step, from 1, was made: its loss, gradient norm, and 1 if it was skipped."""
        copy, done = stats.to("cpu", non_blocking=True), None
        if stats.is_cuda:  # the copy waits its turn here, not behind the next step
            done = torch.cuda.Event()
            done.record()
        self._unread.append((step, copy, done))

    def read(self, all_steps: bool) -> str | None:
        """Read all steps, or all but the last, which the device may be at still; what was wrong, if anything was.

        None is read beyond a step that makes the run lost.
        """
        fault = None
        while len(self._unread) > (0 if all_steps else 1) and not self.is_lost:
            self.step, stats, done = self._unread.pop(0)
            if done is not None:
                done.synchronize()
            self.loss, self.grad_norm, skipped = stats.tolist()
            self.state["losses"] = [*self.state["losses"], None if skipped else self.loss][-WINDOW - 1 :]
            self.state["skipped_in_a_row"] = self.state["skipped_in_a_row"] + 1 if skipped else 0
            if skipped:
                self.state["num_skipped"] += 1
                fault = f"step {self.step}: loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g}"
        return fault

    @property
    def is_well(self) -> bool:
        """Whether the last step that was read was taken."""
        return bool(self.state["skipped_in_a_row"] == 0)

    @property
    def is_lost(self) -> bool:
        """Whether so many steps in a row were skipped that the stage has to go back."""
        return bool(self.state["skipped_in_a_row"] >= self.settings.max_skipped)

    def went_back(self, to_step: int, lost: dict[str, Any], fault: str) -> None:
        """The state is that of `to_step` again; what happened since, `lost`, is kept in mind, its data passed over.

        The best checkpoint stays the best.
        """
        self._unread.clear()
        kept = ("num_skipped", "best_val_loss", "best_step", "num_tokens")
        self.state |= {name: lost[name] for name in kept if name in lost} | {
            "rollbacks": [*lost["rollbacks"], {"to_step": to_step, "because": fault}],
            "data_offset": lost["data_offset"] + self.step - to_step,
            "skipped_in_a_row": 0,
        }
