"""Rows of several sources, each with its share of the training tokens."""

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

import torch
from torch import Tensor

from rlhf.data.collate import Blocks


class Mixture:
    """Blocks of several sources of one length, drawn in exact proportion to their weights.

    After any number of rows each source has had its share of them to within one row. Each source goes round in
    shuffled epochs of its own, as `batch_indices` has it: one with a small share may not be seen whole, another many
    times over. Rows are a function of step, batch size and seed alone.
    """

    def __init__(self, sources: Sequence[Blocks], weights: Sequence[float]) -> None:
        self.sources = sources
        self._turns = Turns(weights)

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    @property
    def num_tokens(self) -> int:
        """Tokens of all sources."""
        return sum(source.num_tokens for source in self.sources)

    def batch(self, step: int, batch_size: int, seed: int) -> Tensor:
        """Ids [B, length + 1] of optimiser step `step`, from 0."""
        rows = []
        for place in range(step * batch_size, (step + 1) * batch_size):
            number, turn = self._turns[place]
            rows.append(self.sources[number].at([turn], seed))
        return torch.cat(rows)


class Turns:
    """Whose turn it is at each place, and for which time.

    The source with the nearest deadline goes next, of those that have had less than their share up to and with this
    place; its deadline is the last place at which its next turn keeps it within one of its share (Tijdeman 1980; in
    this form Steiner and Yeomans 1993). With whole-number weights the order repeats after as many places as they sum
    up to. Only the last place is remembered: to go back to an earlier one of a round is to begin it anew.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        shares = [Fraction(str(weight)) for weight in weights]
        scale = lcm(*(share.denominator for share in shares))
        numbers = [int(share * scale) for share in shares]
        self._weights = [number // gcd(*numbers) for number in numbers]
        self._period = sum(self._weights)
        self._restart()

    def __getitem__(self, place: int) -> tuple[int, int]:
        """(number of the source, how often it had its turn before)."""
        rounds, place = divmod(place, self._period)
        if place < self._done - 1:
            self._restart()
        while self._done <= place:
            self._go_on()
        number = self._last
        return number, rounds * self._weights[number] + self._counts[number] - 1

    def _restart(self) -> None:
        self._counts = [0] * len(self._weights)
        self._done = self._last = 0

    def _go_on(self) -> None:
        self._done += 1
        waiting = [
            (-(-(count + 1) * self._period // weight), number)
            for number, (count, weight) in enumerate(zip(self._counts, self._weights, strict=True))
            if count * self._period < weight * self._done
        ]
        _, self._last = min(waiting)
        self._counts[self._last] += 1
