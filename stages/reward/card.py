"""The reward model's report card: what its scores on held-out rankings say about it. Lists in, dicts out.

A pair is two answers to one prompt of different rank; answers of equal rank make no pair. A pair is right where the
better answer has the higher score, and half right where both have the same. Confidence is σ(|Δ|), Δ being the
difference of the two scores on the scale that the loss saw (Bradley–Terry's probability of the answer preferred).

Sources: Huang et al. 2024, "The N+ implementation details of RLHF with PPO" (calibration by Δ); Guo et al. 2017
(expected calibration error, temperature).
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

NUM_BINS = 10  # of confidence, from one half to one
NUM_BARS = 24  # of the histograms
NUM_WORST = 10
MAX_CHARACTERS = 500  # of each text of a worst pair
ABOUT_EQUAL = 0.1  # two lengths that differ by no more than this share of the longer are about equal
MAX_MARGINS = 4  # with more different margins, thirds
TEMPERATURES = (0.01, 100.0)
"""Bounds of the fit. Where every pair is right there is no lowest temperature, and where scores are no better than
chance no highest."""


@dataclass(frozen=True)
class Scored:
    """One held-out ranking of K answers: rank 1 is best, lengths count tokens, higher strengths are better."""

    scores: Sequence[float]
    ranks: Sequence[float]
    lengths: Sequence[int]
    strengths: Sequence[float] | None = None
    source: str = ""
    prompt: str = ""
    responses: Sequence[str] = field(default_factory=list)
    key: str = field(kw_only=True)
    """Equal for rankings of the same prompt."""


class Pair(NamedTuple):
    """A better and a worse answer of the ranking `row`; `lead` is by how much the better one's score is higher."""

    row: int
    better: int
    worse: int
    lead: float
    key: str
    """Of its prompt."""

    @property
    def right(self) -> float:
        return 0.5 if self.lead == 0 else float(self.lead > 0)


def ordered_pairs(rows: Sequence[Scored]) -> list[Pair]:
    """All pairs, ranking by ranking."""
    return [
        Pair(number, i, j, row.scores[i] - row.scores[j], row.key)
        for number, row in enumerate(rows)
        for i in range(len(row.ranks))
        for j in range(len(row.ranks))
        if row.ranks[i] < row.ranks[j]
    ]


def report_card(rows: Sequence[Scored], scale: float = 1.0) -> tuple[dict[str, Any], dict[str, Any]]:
    """(figures for the final metrics, the rest: groups, bins and bars).

    `scale` is what a difference of scores is multiplied with to get Δ: the standard deviation by which the scores
    were divided. Raises ValueError where there is no pair.
    """
    pairs = ordered_pairs(rows)
    if not pairs:
        raise ValueError("no two answers of different rank to the same prompt: there is nothing to measure")
    deltas = torch.tensor([pair.lead for pair in pairs], dtype=torch.float64) * scale
    temperature, before = fit_temperature(deltas), reliability(deltas)
    after = [] if temperature is None else reliability(deltas / temperature)
    calibrated = {} if temperature is None else {
        "temperature": temperature, "ece_after_temperature": expected_calibration_error(after)
    }  # fmt: skip
    chosen, rejected = best_and_worst(rows)
    figures = {
        "accuracy": accuracy_of(pairs),
        "prompt_accuracy": prompt_accuracy(pairs),
        "num_eval_prompts": num_prompts(pairs),
        "num_eval_pairs": len(pairs),
        "ece": expected_calibration_error(before),
        **calibrated,
        "chosen_mean": chosen.mean().item(),
        "chosen_std": chosen.std(correction=0).item(),
        "rejected_mean": rejected.mean().item(),
        "rejected_std": rejected.std(correction=0).item(),
    }
    return figures, {
        "num_pairs": len(pairs),
        "num_prompts": num_prompts(pairs),
        "by_length": by_length(rows, pairs),
        "by_margin": by_margin(rows, pairs),
        "by_source": by_source(rows, pairs),
        "reliability": before,
        "reliability_after_temperature": after,
        "histogram": histogram(chosen, rejected),
    }


def accuracy_of(pairs: Sequence[Pair]) -> float:
    """Share of the pairs that are right."""
    return fmean(pair.right for pair in pairs)


def prompt_accuracy(pairs: Sequence[Pair]) -> float:
    """Mean over the prompts of the share of their pairs that are right: each prompt weighs the same, however many
    rankings and answers it has."""
    found: dict[str, list[float]] = {}
    for pair in pairs:
        found.setdefault(pair.key, []).append(pair.right)
    return fmean(map(fmean, found.values()))


def num_prompts(pairs: Sequence[Pair]) -> int:
    """Different prompts that the pairs are of. Those of one prompt hang together, so an interval goes by prompts."""
    return len({pair.key for pair in pairs})


def by_length(rows: Sequence[Scored], pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Accuracy where the better answer is the longer one, the shorter one, or neither."""

    def side(pair: Pair) -> str:
        better, worse = rows[pair.row].lengths[pair.better], rows[pair.row].lengths[pair.worse]
        if abs(better - worse) <= ABOUT_EQUAL * max(better, worse):
            return "about equal"
        return "better answer longer" if better > worse else "better answer shorter"

    return _groups(pairs, side, ["better answer longer", "about equal", "better answer shorter"])


def by_margin(rows: Sequence[Scored], pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Accuracy by how much people (or a judge) preferred the better answer, where strengths are known."""
    margins = {}
    for pair in pairs:
        strengths = rows[pair.row].strengths
        if strengths is not None:
            margins[pair] = round(strengths[pair.better] - strengths[pair.worse], 6)
    values = sorted(margins.values())
    distinct = sorted(set(values))
    if len(distinct) <= MAX_MARGINS:
        names = {value: f"{value:g}" for value in distinct}
        return _groups(list(margins), lambda pair: names[margins[pair]], list(names.values()))
    # Equal margins stay together: each cut is where the number of smaller ones comes nearest to a third.
    low, high = (
        min(distinct[1:], key=lambda value: abs(bisect_left(values, value) - len(values) * third / 3))
        for third in (1, 2)
    )
    names = dict(enumerate([f"small, below {low:g}", f"medium, below {high:g}", f"large, from {high:g}"]))
    return _groups(
        list(margins), lambda pair: names[(margins[pair] >= low) + (margins[pair] >= high)], list(names.values())
    )


def by_source(rows: Sequence[Scored], pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    """Accuracy by where the rankings come from, if they come from several places; the largest first."""
    found = [rows[pair.row].source for pair in pairs]
    names = sorted(set(found), key=lambda name: (-found.count(name), name))
    if len(names) < 2:
        return []
    return _groups(pairs, lambda pair: rows[pair.row].source or "not said", [name or "not said" for name in names])


def _groups(pairs: Sequence[Pair], group: Callable[[Pair], str], names: Sequence[str]) -> list[dict[str, Any]]:
    """Pairs and accuracy of each group that has any, in the order of `names`; and both by prompts, for an interval."""
    found: dict[str, list[Pair]] = {}
    for pair in pairs:
        found.setdefault(group(pair), []).append(pair)
    return [
        {
            "name": name, "pairs": len(found[name]), "accuracy": accuracy_of(found[name]),
            "prompts": num_prompts(found[name]), "prompt_accuracy": prompt_accuracy(found[name]),
        }
        for name in names
        if name in found
    ]  # fmt: skip


def reliability(deltas: Tensor) -> list[dict[str, Any]]:
    """How often the model is right where it is so sure: ten bins of confidence, those that hold pairs.

    `deltas` [M] are positive where the model orders a pair rightly.
    """
    confidence = deltas.abs().sigmoid()
    right = (deltas > 0).double() + (deltas == 0).double() / 2
    place = ((confidence - 0.5) * 2 * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    bins = []
    for number in range(NUM_BINS):
        inside = place == number
        if count := int(inside.sum()):
            bins.append({
                "confidence": confidence[inside].mean().item(),
                "accuracy": right[inside].mean().item(),
                "pairs": count,
            })  # fmt: skip
    return bins


def expected_calibration_error(bins: Sequence[dict[str, Any]]) -> float:
    """Mean distance of confidence and accuracy over `reliability`'s bins, weighted by their pairs."""
    total = sum(found["pairs"] for found in bins)
    gaps = sum(found["pairs"] * abs(found["confidence"] - found["accuracy"]) for found in bins)
    return float(gaps / total)


def fit_temperature(deltas: Tensor) -> float | None:
    """The temperature T for which σ(Δ/T) explains the pairs best; above 1 the model is too sure of itself. None where
    there is none within TEMPERATURES.

    The likelihood is concave in 1/T, so its slope is brought to 0 by bisection, within TEMPERATURES.
    """
    lowest, highest = low, high = torch.tensor(TEMPERATURES, dtype=torch.float64).log().unbind()
    for _ in range(50):
        middle = (low + high) / 2
        slope = (deltas * (-deltas / middle.exp()).sigmoid()).mean()  # of the log-likelihood, along 1/T
        low, high = (low, middle) if slope > 0 else (middle, high)
    return None if low == lowest or high == highest else float(high.exp())


def best_and_worst(rows: Sequence[Scored]) -> tuple[Tensor, Tensor]:
    """Scores of the best and of the worst answers of all prompts that have both."""
    chosen, rejected = [], []
    for row in rows:
        best, worst = min(row.ranks), max(row.ranks)
        if best < worst:
            chosen += [score for score, rank in zip(row.scores, row.ranks, strict=True) if rank == best]
            rejected += [score for score, rank in zip(row.scores, row.ranks, strict=True) if rank == worst]
    return torch.tensor(chosen, dtype=torch.float64), torch.tensor(rejected, dtype=torch.float64)


def histogram(chosen: Tensor, rejected: Tensor) -> dict[str, list[float]]:
    """How many chosen and rejected answers have which score: counts between shared `edges`."""
    both = torch.cat([chosen, rejected])
    low, high = both.min().item(), both.max().item()
    if low == high:
        low, high = low - 0.5, high + 0.5
    edges = torch.linspace(low, high, NUM_BARS + 1, dtype=torch.float64)
    return {
        "edges": edges.tolist(),
        "chosen": chosen.histc(NUM_BARS, low, high).tolist(),
        "rejected": rejected.histc(NUM_BARS, low, high).tolist(),
    }


def worst_pairs(rows: Sequence[Scored]) -> list[dict[str, Any]]:
    """The pairs that the model is most wrong about, the worst first, with their texts cut short."""
    wrong = sorted((pair for pair in ordered_pairs(rows) if pair.lead < 0), key=lambda pair: pair.lead)
    found = []
    for pair in wrong[:NUM_WORST]:
        row = rows[pair.row]
        line: dict[str, Any] = {"prompt": row.prompt[:MAX_CHARACTERS]}
        for name, place in (("better", pair.better), ("worse", pair.worse)):
            line |= {
                name: row.responses[place][:MAX_CHARACTERS],
                f"{name}_score": row.scores[place],
                f"{name}_rank": row.ranks[place],
            }
        found.append(line)
    return found


def agreement(models: Sequence[Sequence[Sequence[float]]], pairs: Sequence[Pair]) -> dict[str, float]:
    """How far several reward models agree, from each one's scores of the same rows.

    `all_agree`: share of the pairs that all order alike; `mean_pairwise`: the same for two models, averaged over
    all twos; `score_std`: by how much the scores of an answer vary between models, each model's scores brought to
    mean 0 and standard deviation 1 first, averaged over the answers.
    """
    order = [
        [_sign(scores[pair.row][pair.better] - scores[pair.row][pair.worse]) for pair in pairs] for scores in models
    ]
    twos = [fmean(a == b for a, b in zip(one, other, strict=True)) for one, other in combinations(order, 2)]
    scores = torch.tensor([[score for row in rows for score in row] for rows in models], dtype=torch.float64)
    scores = (scores - scores.mean(1, keepdim=True)) / scores.std(1, correction=0, keepdim=True).clamp(min=1e-12)
    return {
        "all_agree": fmean(len(set(found)) == 1 for found in zip(*order, strict=True)),
        "mean_pairwise": fmean(twos),
        "score_std": scores.std(0, correction=0).mean().item(),
    }


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)
