"""Several raters' rankings of the same answers become one, by a stated rule.

- `majority`: an answer beats another if more raters put it above than put it below, and more than tied the two. Its
  rank is one more than the longest chain of such wins that leads down to it, so that answers between which the raters
  are split are tied where no third one tells them apart. Answers that beat each other in a circle (a over b, b over c,
  c over a) are tied.
- `mean_rank`: by the mean of the ranks, where tied answers share the mean of their places. Equal means are ties.
- `bradley_terry`: by the strengths of a Bradley–Terry model (Bradley and Terry 1952), a tie counting as half a win for
  either, fitted to the prompt's own rankings and to one more that ties all answers, without which a unanimous winner
  would be infinitely strong. Since every rater ranks all answers, it orders them as mean ranks do; what it adds is the
  strengths, in log-odds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal, get_args

from rlhf.data.errors import SettingsError
from rlhf.data.feedback.records import Judged, Vote

Rule = Literal["majority", "mean_rank", "bradley_terry"]
Who = Literal["people-first", "people", "judges", "all"]
RULES: tuple[str, ...] = get_args(Rule)
WHO: tuple[str, ...] = get_args(Who)
"""Whose votes count: people's and where there are none the judges'; people's alone; judges' alone; everybody's."""

Ranks = tuple[int, ...]


@dataclass(frozen=True)
class Resolved:
    """One ranking of a prompt's answers."""

    ranks: list[int]
    """1 is best, equal ranks are ties, without gaps."""
    strengths: list[float] | None = None
    """Higher is better, in the order of `ranks`; None where nobody said how much better the better answers are."""
    disagreed: bool = False
    """Two votes ordered some pair of answers the opposite ways, or one tied what another ordered."""
    circle: bool = False
    """The majority went round in a circle, which is tied."""


def votes_of(judged: Judged, who: Who) -> list[Vote]:
    """The votes that count."""
    people = [vote for vote in judged.votes if vote.rater.kind == "person"]
    judges = [vote for vote in judged.votes if vote.rater.kind != "person"]
    return {"people-first": people or judges, "people": people, "judges": judges, "all": judged.votes}[who]


def resolve(votes: Sequence[Vote], rule: Rule) -> Resolved:
    """One ranking of one or more votes on the same answers.

    Strengths are those of the model (`bradley_terry`); else the scores, where there is one vote and it has some; else
    the mean of the raters' strengths, which the best answer gets, the worst 0 and the others in equal steps between.
    Raises SettingsError where evalica, which `bradley_terry` needs, is not installed.
    """
    rankings = tuple(sorted(tuple(vote.ranks) for vote in votes))  # sorted: their order is not in the cache's key
    disagreed = len(set(rankings)) > 1
    if rule == "bradley_terry":
        ranks, model = _bradley_terry(rankings)
        return Resolved(list(ranks), list(model), disagreed)
    circle = False
    if rule == "majority":
        ranks, circle = _majority(rankings)
    else:
        ranks = _mean_ranks(rankings)
    return Resolved(list(ranks), _strengths(votes, ranks), disagreed, circle)


def places(ranks: Sequence[float]) -> list[float]:
    """Ranks with ties sharing the mean of their places: 1, 1, 2 are the places 1.5, 1.5, 3."""
    return [sum(other < rank for other in ranks) + (1 + sum(other == rank for other in ranks)) / 2 for rank in ranks]


def dense(values: Sequence[float]) -> Ranks:
    """Ranks without gaps of numbers of which the lowest is best."""
    place = {value: place for place, value in enumerate(sorted(set(values)), 1)}
    return tuple(place[value] for value in values)


@lru_cache(maxsize=4096)  # four answers have 75 rankings: most prompts have been seen
def _majority(rankings: tuple[Ranks, ...]) -> tuple[Ranks, bool]:
    num = len(rankings[0])
    beats = [[_beats([ranks[a] - ranks[b] for ranks in rankings]) for b in range(num)] for a in range(num)]
    reaches = [row[:] for row in beats]
    for middle in range(num):  # chains of wins (Warshall)
        for a in range(num):
            for b in range(num):
                reaches[a][b] |= reaches[a][middle] and reaches[middle][b]
    circles = [frozenset({a, *(b for b in range(num) if reaches[a][b] and reaches[b][a])}) for a in range(num)]

    @cache  # else each chain would be walked anew, and of twenty answers there are a million
    def rank(circle: frozenset[int]) -> int:
        above = {circles[a] for b in circle for a in range(num) if beats[a][b] and a not in circle}
        return 1 + max(map(rank, above), default=0)

    return dense([rank(circle) for circle in circles]), any(len(circle) > 1 for circle in circles)


def _beats(leads: list[int]) -> bool:
    """Whether most raters put one answer above another; a lead is negative where it is above."""
    return sum(lead < 0 for lead in leads) > max(sum(lead > 0 for lead in leads), leads.count(0))


@lru_cache(maxsize=4096)
def _mean_ranks(rankings: tuple[Ranks, ...]) -> Ranks:
    return dense([sum(column) for column in zip(*map(places, rankings), strict=True)])  # halves: sums are exact


@lru_cache(maxsize=4096)
def _bradley_terry(rankings: tuple[Ranks, ...]) -> tuple[Ranks, tuple[float, ...]]:
    try:
        from evalica import Winner, bradley_terry
    except ImportError:
        cure = "pip install 'rlhf-toolkit[feedback]', or use mean_rank, which orders alike"
        raise SettingsError(f"bradley_terry needs evalica, which is not installed; {cure}") from None
    num = len(rankings[0])
    firsts, seconds, winners = [], [], []
    for ranks in (*rankings, (1,) * num):
        for first in range(num):
            for second in range(first + 1, num):
                firsts.append(first)
                seconds.append(second)
                better = ranks[first] - ranks[second]
                winners.append(Winner.X if better < 0 else Winner.Y if better > 0 else Winner.Draw)
    scores = bradley_terry(firsts, seconds, winners, tie_weight=0.5, tolerance=1e-9, limit=10_000).scores
    logs = [math.log(scores[place]) for place in range(num)]
    mean = sum(logs) / num
    strengths = tuple(round(log - mean, 4) + 0.0 for log in logs)  # + 0.0: no negative zero
    return dense([-strength for strength in strengths]), strengths


def _strengths(votes: Sequence[Vote], ranks: Ranks) -> list[float] | None:
    if len(votes) == 1 and votes[0].scores is not None:
        return list(votes[0].scores)
    given = [vote.strength for vote in votes if vote.strength is not None]
    if not given or max(ranks) == 1:
        return None
    step = sum(given) / len(given) / (max(ranks) - 1)
    return [step * (max(ranks) - rank) for rank in ranks]
