"""How sure one can be of a correlation."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

NORMAL_95 = 1.96  # standard deviations that hold 95 % of a normal distribution
Interval = tuple[float, float]


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
