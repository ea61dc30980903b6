"""Reading prompts into their slots, in forward passes of a bounded size.

Python takes about a millisecond to launch a layer, a GPU far less to work it off where prompts are few. Those that
take the place of others come a few at a time, so their passes are recorded, for rows and tokens of some numbers.
"""

from collections.abc import Callable, Hashable

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf.data.collate import pad_right
from rlhf.stages.engines.graphs import Graphs
from rlhf.stages.engines.slots import FEWEST_ROWS, Slots
from rlhf.stages.engines.twin import Twin
from rlhf.stages.packing import sent

PREFILL_TOKENS = 2**15  # that a forward pass reads, which bounds its activations
_RECORDED_TOKENS = 2**13  # with more, the GPU works for longer than Python takes


class Prefill:
    """Reads prompts with `twin` into `slots`."""

    def __init__(self, twin: Twin, slots: Slots, graphs: Graphs | None, pad_token_id: int) -> None:
        self.twin, self.slots, self.graphs, self.pad_token_id = twin, slots, graphs, pad_token_id
        self._recorded: dict[tuple[int, int], _Pass] = {}  # by rows and tokens of a row

    def read(self, rows: list[int], prompts: list[list[int]], go_on: Callable[[], None] | None = None) -> Tensor:
        """Last states [n,d] of n prompts, whose keys and values go into the slots `rows`.

        `go_on`, where prompts take the place of others, gives the GPU something to do while a pass is recorded.
        """
        longest = max(map(len, prompts))
        records = go_on is not None and self.graphs is not None and FEWEST_ROWS * longest <= _RECORDED_TOKENS
        most = max((_RECORDED_TOKENS if records else PREFILL_TOKENS) // longest, 1)
        states, start = [], 0
        while start < len(rows):
            num = min(most, len(rows) - start)
            if records and num > FEWEST_ROWS:
                num = 1 << (num.bit_length() - 1)  # so that few numbers of rows are recorded
            some = rows[start : start + num], prompts[start : start + num]
            states.append(self._replay(*some, go_on) if records and go_on else self._pass(*some))
            start += num
        return torch.cat(states)

    def _pass(self, rows: list[int], prompts: list[list[int]]) -> Tensor:
        """Last states [n,d], from one forward pass."""
        num, least = len(rows), 1 if self.graphs is None else 2  # what is compiled for one row is good for no other
        return self.forward(*self._laid_out(rows, prompts, least))[:num]

    def _replay(self, rows: list[int], prompts: list[list[int]], go_on: Callable[[], None]) -> Tensor:
        """Last states [n,d], from a pass that is recorded when it is first asked for."""
        assert self.graphs is not None
        given = self._laid_out(rows, prompts, FEWEST_ROWS, _recorded_width(max(map(len, prompts)), self.slots.shape[1]))
        shape = given[0].shape[0], given[0].shape[1]
        if shape not in self._recorded:
            go_on()
            self._recorded[shape] = _Pass(self.forward, given, self.graphs, ("prefill", shape, self.slots.shape))
        return self._recorded[shape].replay(given)[: len(rows)]

    def forward(self, ids: Tensor, lengths: Tensor, rows: Tensor) -> Tensor:
        """Last states [n,d] of prompts [n,P] of these lengths [n], which go into these slots [n]."""
        self.slots.beginning = rows
        hidden = self.twin.states(ids, torch.arange(ids.shape[1], device=ids.device).repeat(len(ids), 1))
        self.slots.lengths[rows] = lengths
        return hidden[torch.arange(len(rows), device=ids.device), lengths - 1]

    def _laid_out(self, rows: list[int], prompts: list[list[int]], least: int, width: int = 0) -> list[Tensor]:
        """What `forward` takes, of at least so many rows, which the last one fills up, and tokens of a row."""
        more = max(least - len(rows), 0)
        rows, prompts = rows + rows[-1:] * more, prompts + prompts[-1:] * more
        ids, _ = pad_right(prompts, self.pad_token_id)
        ids = pad(ids, (0, max(width - ids.shape[1], 0)), value=self.pad_token_id)
        return sent(self.slots.lengths.device, ids, torch.tensor([*map(len, prompts)]), torch.tensor(rows))


class _Pass:
    """A forward pass that is recorded. The function is not kept: with it the slots would outlive their rollout."""

    def __init__(self, forward: Callable[..., Tensor], given: list[Tensor], graphs: Graphs, shapes: Hashable) -> None:
        def run() -> None:
            self._states = forward(*given)

        self._given = given
        self._graph = graphs.capture(run, shapes)

    def replay(self, given: list[Tensor]) -> Tensor:
        """What `forward` gives for other prompts of the same shape."""
        for old, new in zip(self._given, given, strict=True):
            old.copy_(new)
        self._graph.replay()
        return self._states.clone()  # other graphs may use its memory


def _recorded_width(longest: int, most: int) -> int:
    """Tokens of a recorded row: a quarter more than are needed at most, so that few widths are recorded."""
    step = max(1 << longest.bit_length() >> 3, 32)
    return min(-(-longest // step) * step, most)
