"""How sure one can be of a share or of a correlation."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlhf.data.feedback.bias import wilson
from rlhf.stages.metric_names import share

NORMAL_95 = 1.96  # standard deviations that hold 95 % of a normal distribution
Interval = tuple[float, float]


def between(interval: Interval) -> str:
    """An interval of shares in words."""
    return f"95\u00a0% interval {share(interval[0])} to {share(interval[1])}"


def of_share(right: float, num: int) -> Interval:
    """The 95 % interval of a share of `num` independent trials: Wilson's (1927), and where all came out alike the exact
    one (Clopper and Pearson 1934), as in an evaluation. Ties that count half make it too wide, never too narrow."""
    if num == 0:
        return 0.0, 1.0
    if right in (0.0, 1.0):
        unseen = 1 - 0.025 ** (1 / num)
        return (0.0, unseen) if right == 0.0 else (1 - unseen, 1.0)
    return wilson(right * num, num)


def rank_correlation(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, Interval] | None:
    """Spearman's, with Fisher's 95 % interval; None for fewer than four pairs, or where one side is all alike."""
    if len(ours) < 4 or len(set(ours)) == 1 or len(set(theirs)) == 1:
        return None
    found = float(np.corrcoef(_ranks(ours), _ranks(theirs))[0, 1])
    middle, half = math.atanh(max(min(found, 0.999999), -0.999999)), NORMAL_95 * math.sqrt(1.06 / (len(ours) - 3))
    return found, (math.tanh(middle - half), math.tanh(middle + half))


def _ranks(values: Sequence[float]) -> "np.ndarray[Any, Any]":
    """Places from 0; equal values share the mean of theirs."""
    _, place, counts = np.unique(np.asarray(values, dtype=float), return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    means: np.ndarray[Any, Any] = (ends - counts + ends - 1) / 2
    return means[place]
