"""Steps that would do harm: which ones are skipped, and when the stage goes back to its last checkpoint.

The remedy of the OPT logbook (Zhang et al. 2022, section 2.5) and of PaLM (Chowdhery et al. 2022, section 5.1): a run
whose loss has spiked is started again from a checkpoint before, with other data.
"""

import math
import statistics
from typing import Any

from torch import Tensor

from rlhf.stages.pretrain.config import PretrainSettings

WINDOW = 100
"""Losses of the steps before, which a new one is compared with."""
_ENOUGH = 20
_LEAST_DEVIATION = 0.01  # of the mean: a loss that hardly varies has no spike in its last digits


class Health:
    """Judges the steps. `state` is kept in checkpoints, as part of the training state.

    Whether a step is taken is decided on the device, by `limit`, so that the loop need not wait for it; what became
    of it is read a step later, or at once where the loop has to know.
    """

    def __init__(self, settings: PretrainSettings, state: dict[str, Any]) -> None:
        self.settings, self.state = settings, state
        self.loss = self.grad_norm = math.nan
        """Of the last step that was read."""
        self._unread: list[Tensor] = []  # of steps, each [3]: loss, gradient norm, and 1 if it was skipped
        state.setdefault("losses", [])  # of the last good steps
        state.setdefault("skipped_in_a_row", 0)
        state.setdefault("num_skipped", 0)
        state.setdefault("rollbacks", [])
        state.setdefault("data_offset", 0)  # steps by which the order of the data has moved on

    @property
    def limit(self) -> float:
        """A loss above it is a spike."""
        losses = self.state["losses"]
        if len(losses) < _ENOUGH:
            return math.inf
        mean = statistics.fmean(losses)
        return mean + self.settings.max_spike * max(statistics.pstdev(losses), _LEAST_DEVIATION * abs(mean))

    def add(self, stats: Tensor) -> None:
        """A step was made: its loss, gradient norm, and 1 if it was skipped."""
        self._unread.append(stats)

    def read(self, all_steps: bool) -> list[str]:
        """What was wrong with the steps read now: all, or all but the last, which the device may be at still."""
        faults = []
        while len(self._unread) > (0 if all_steps else 1):
            self.loss, self.grad_norm, skipped = self._unread.pop(0).tolist()
            if skipped:
                self.state["num_skipped"] += 1
                self.state["skipped_in_a_row"] += 1
                faults.append(f"loss {self.loss:.4g}, gradient norm {self.grad_norm:.4g}")
            else:
                self.state["losses"] = [*self.state["losses"], self.loss][-WINDOW:]
                self.state["skipped_in_a_row"] = 0
        return faults

    @property
    def is_lost(self) -> bool:
        """Whether so many steps in a row were skipped that the stage has to go back."""
        return bool(self.state["skipped_in_a_row"] >= self.settings.max_skipped)

    def went_back(self, from_step: int, to_step: int, lost: dict[str, Any], fault: str) -> None:
        """The state is that of `to_step` again; what happened since, `lost`, is kept in mind, its data passed over."""
        self._unread.clear()
        self.state |= {
            "num_skipped": lost["num_skipped"],
            "rollbacks": [*lost["rollbacks"], {"from_step": from_step, "to_step": to_step, "because": fault}],
            "data_offset": lost["data_offset"] + from_step - to_step,
        }
