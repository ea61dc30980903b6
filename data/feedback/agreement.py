"""How good the labels of a feedback store are: how far raters agree, and what their rankings depend on besides.

Two rankings of the same answers agree on a pair of answers if they order it alike or both tie it, half if one ties what
the other orders, and not if they order it the opposite ways; the share of pairs that they agree on is their agreement.
Alpha takes an answer as the unit and as the value its place among the answers of its prompt, from 0 (best) to 1
(worst), tied answers at the mean of their places: ranks alone would not compare between prompts of 2 and of 9 answers.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

from rlhf.data.feedback.alpha import alpha_interval, ordinal_alpha
from rlhf.data.feedback.bias import Biases
from rlhf.data.feedback.records import Judged, Rater, Vote
from rlhf.data.feedback.resolve import places


@dataclass
class Share:
    """How much of so many."""

    part: float = 0.0
    num: int = 0

    def add(self, part: float, num: int = 1) -> None:
        """Count more."""
        self.part += part
        self.num += num

    @property
    def value(self) -> float | None:
        """The share; None of nothing."""
        return self.part / self.num if self.num else None


def agreement(rankings: Iterable[Judged]) -> dict[str, Any]:
    """Counts and shares for what `Store.rankings` gives, as JSON; a share of nothing is null.

    `alpha` and `agreement` are of `all` raters, of `people` and of `judges` among themselves, `agreement` also of
    `people_and_judges`; `alpha_interval` is alpha's. `pairs` has every two raters with prompts in common, `raters` each
    one against the rest, and how they did on gold questions. `position` and `time` are what `rlhf.data.feedback.bias`
    finds. `num_pairs` counts pairs of answers, once for every two rankings of them.
    """
    tally = Tally()
    for judged in rankings:
        tally.add(judged)
    return tally.as_json()


def agreed(one: Sequence[int], other: Sequence[int]) -> tuple[float, int]:
    """On how many pairs of answers two rankings of these agree, and how many pairs there are."""
    return _agreed(tuple(one), tuple(other))


@lru_cache(maxsize=65536)
def _agreed(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[float, int]:
    pairs = list(combinations(range(len(one)), 2))
    orders = [(_order(one[a] - one[b]), _order(other[a] - other[b])) for a, b in pairs]
    return sum(1 - abs(mine - theirs) / 2 for mine, theirs in orders), len(pairs)


def _order(difference: int) -> int:
    return (difference > 0) - (difference < 0)


class Tally:
    """What is counted over the prompts of a store."""

    def __init__(self) -> None:
        self._num_prompts = self._num_shared = self._num_rankings = 0
        self._units: dict[str, list[int]] = {"all": [], "people": [], "judges": []}
        self._values: dict[str, list[float]] = {"all": [], "people": [], "judges": []}
        self._prompt_of_unit: list[int] = []
        self._raters: dict[str, Rater] = {}
        self._ranked: dict[str, int] = defaultdict(int)
        self._pairs: dict[tuple[str, str], Share] = defaultdict(Share)
        self._shared: dict[tuple[str, str], int] = defaultdict(int)
        self._gold: dict[str, Share] = defaultdict(Share)
        self._gold_pairs: dict[str, Share] = defaultdict(Share)
        self._biases = Biases()

    def add(self, judged: Judged) -> None:
        """Count a prompt."""
        votes = judged.votes
        self._num_prompts += bool(votes)
        self._num_shared += len(votes) > 1
        self._num_rankings += len(votes)
        rest = [Share() for _ in votes]  # the agreement of each vote with the others
        for (a, one), (b, other) in combinations(enumerate(votes), 2):
            found = agreed(one.ranks, other.ranks)
            first, second = sorted((one.rater.name, other.rater.name))
            self._pairs[first, second].add(*found)
            self._shared[first, second] += 1
            rest[a].add(*found)
            rest[b].add(*found)
        for vote, share in zip(votes, rest, strict=True):
            name = vote.rater.name
            self._raters[name] = vote.rater
            self._ranked[name] += 1
            self._biases.add(vote, share.value)
            if judged.gold is not None:
                self._add_gold(name, vote.ranks, judged.gold)
        if len(votes) > 1:
            self._add_values(judged.prompt_id, votes)

    def _add_values(self, prompt_id: int, votes: list[Vote]) -> None:
        num = len(votes[0].ranks)
        units = range(len(self._prompt_of_unit), len(self._prompt_of_unit) + num)
        self._prompt_of_unit += [prompt_id] * num  # whichever round it is of
        for vote in votes:
            values = [(place - 1) / (num - 1) for place in places(vote.ranks)]
            for who in ("all", _who(vote.rater)):
                self._units[who].extend(units)
                self._values[who].extend(values)

    def _add_gold(self, name: str, ranks: list[int], gold: list[int | None]) -> None:
        known = [(rank, right) for rank, right in zip(ranks, gold, strict=True) if right is not None]
        ordered = [(a, b) for a, b in combinations(known, 2) if a[1] != b[1]]
        right = sum(_order(a[0] - b[0]) == _order(a[1] - b[1]) for a, b in ordered)
        if ordered:
            self._gold[name].add(right == len(ordered))
            self._gold_pairs[name].add(right, len(ordered))

    def as_json(self) -> dict[str, Any]:
        """All that was counted."""
        among: dict[str, Share] = {name: Share() for name in ("all", "people", "judges", "people_and_judges")}
        with_all: dict[str, Share] = defaultdict(Share)
        with_who: dict[tuple[str, str], Share] = defaultdict(Share)
        for (one, other), share in self._pairs.items():
            kinds = {_who(self._raters[one]), _who(self._raters[other])}
            for name in ("all", kinds.pop() if len(kinds) == 1 else "people_and_judges"):
                among[name].add(share.part, share.num)
            for rater, partner in ((one, other), (other, one)):
                with_all[rater].add(share.part, share.num)
                with_who[rater, _who(self._raters[partner])].add(share.part, share.num)
        names = sorted(self._raters, key=lambda name: self._raters[name].id)
        return {
            "num_prompts": self._num_prompts,
            "num_shared_prompts": self._num_shared,
            "num_rankings": self._num_rankings,
            "alpha": {who: ordinal_alpha(self._units[who], self._values[who]) for who in self._units},
            "alpha_interval": {
                who: alpha_interval(self._units[who], self._values[who], self._prompt_of_unit) for who in self._units
            },
            "agreement": {name: _share(share, "num_pairs") for name, share in among.items()},
            "pairs": [
                {"raters": list(two), "num_prompts": self._shared[two]} | _share(share, "num_pairs")
                for two, share in sorted(self._pairs.items())
            ],
            "raters": [
                {
                    "rater": name,
                    "kind": self._raters[name].kind,
                    "num_rankings": self._ranked[name],
                    "with_rest": _share(with_all[name], "num_pairs"),
                    "with_people": _share(with_who[name, "people"], "num_pairs"),
                    "with_judges": _share(with_who[name, "judges"], "num_pairs"),
                    "gold": _share(self._gold[name], "num_questions")
                    | {"pairs": _share(self._gold_pairs[name], "num_pairs")},
                }
                | self._biases.of_rater(name)
                for name in names
            ],
        } | self._biases.as_json()


def _who(rater: Rater) -> str:
    return "people" if rater.kind == "person" else "judges"


def _share(share: Share, name: str) -> dict[str, Any]:
    return {"share": share.value, name: share.num}
