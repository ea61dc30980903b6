"""What rankings should not depend on: how long a rater looked, and in which order the answers were shown."""

import math
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from rlhf.data.feedback.records import Vote

FAST = 1 / 3
"""A person is fast whose median time is less than this part of the median over all people."""
LEVEL = 1.96  # standard errors on either side: 95 %


@dataclass
class FirstShown:
    """How often the answer that was shown first came out best, against what chance would give."""

    num: int = 0
    best: float = 0.0
    expected: float = 0.0
    num_as_shown: int = 0
    """Rankings in the very order in which the answers were shown."""
    expected_as_shown: float = 0.0

    def add(self, ranks: list[int], shown: list[int]) -> None:
        """Count a ranking; a first answer that shares the best rank with others counts as a part."""
        self.num += 1
        self.best += (ranks[shown[0]] == 1) / ranks.count(1)
        self.expected += 1 / len(ranks)
        self.num_as_shown += all(ranks[one] < ranks[other] for one, other in pairwise(shown))
        self.expected_as_shown += (max(ranks) == len(ranks)) / math.factorial(len(ranks))

    def as_json(self) -> dict[str, Any]:
        """Shares of the rankings whose order of showing is known, with an interval for the first."""
        if not self.num:
            return {"num_rankings": 0, "first_is_best": None, "expected": None, "low": None, "high": None} | {
                "as_shown": None,
                "expected_as_shown": None,
            }
        low, high = wilson(self.best, self.num)
        return {
            "num_rankings": self.num,
            "first_is_best": self.best / self.num,
            "expected": self.expected / self.num,
            "low": low,
            "high": high,
            "as_shown": self.num_as_shown / self.num,
            "expected_as_shown": self.expected_as_shown / self.num,
        }


@dataclass
class Biases:
    """Time and order over many rankings."""

    _seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _people: set[str] = field(default_factory=set)
    _agreed: list[tuple[float, float]] = field(default_factory=list)
    _first: dict[str, FirstShown] = field(default_factory=lambda: defaultdict(FirstShown))
    _all: FirstShown = field(default_factory=FirstShown)

    def add(self, vote: Vote, agreement: float | None) -> None:
        """Count a ranking, and how far it agrees with those of others on the same answers, if there are any."""
        if vote.seconds is not None:
            self._seconds[vote.rater.name].append(vote.seconds)
            if vote.rater.kind == "person":
                self._people.add(vote.rater.name)
                if agreement is not None:
                    self._agreed.append((vote.seconds, agreement))
        if vote.shown is not None:
            self._all.add(vote.ranks, vote.shown)
            self._first[vote.rater.name].add(vote.ranks, vote.shown)

    def of_rater(self, name: str) -> dict[str, Any]:
        """One rater's time and order."""
        own = median(self._seconds[name]) if name in self._seconds else None
        usual = median(median(self._seconds[person]) for person in self._people or [name]) if own is not None else 0.0
        return {
            "seconds": own,
            "fast": name in self._people and own is not None and own < FAST * usual,
            "position": self._first.get(name, FirstShown()).as_json(),
        }

    def as_json(self) -> dict[str, Any]:
        """`position` over all rankings, and `time`: people's agreement with others by quarters, the quickest first."""
        ordered = sorted(self._agreed)
        bounds = [round(quarter * len(ordered) / 4) for quarter in range(5)]
        quarters = [ordered[start:end] for start, end in pairwise(bounds) if start < end]
        return {
            "position": self._all.as_json(),
            "time": [
                {
                    "up_to_seconds": quarter[-1][0],
                    "num_rankings": len(quarter),
                    "agreement": sum(agreement for _, agreement in quarter) / len(quarter),
                }
                for quarter in quarters
            ],
        }


def wilson(part: float, num: int) -> tuple[float, float]:
    """Wilson's 95 % interval for a share `part` of `num` (Wilson 1927)."""
    share, weight = part / num, LEVEL**2 / num
    middle = (share + weight / 2) / (1 + weight)
    half = LEVEL * math.sqrt(share * (1 - share) / num + weight / (4 * num)) / (1 + weight)
    return middle - half, middle + half
