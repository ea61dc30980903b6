"""Krippendorff's alpha for ordinal data: how far raters agree beyond chance, 1 for always, 0 for as by chance."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

NUM_SAMPLES = 500  # of the bootstrap
MIN_GROUPS = 10  # from fewer, samples say little of how far another set of prompts would be off


def ordinal_alpha(units: ArrayLike, values: ArrayLike) -> float | None:
    """Alpha of values, each of which some rater gave to a unit; below 0 where they disagree more than by chance.

    1 − observed / expected disagreement, where two values c < k differ by the square of how many of all values lie
    between them, c and k themselves counted half (Krippendorff 2011, Computing Krippendorff's Alpha-Reliability).
    Units with fewer than two values say nothing and are left out. None where nothing is left, or all values are equal.
    `units` and `values` are of equal length, in any order; who gave a value does not matter.
    """
    counts, _ = _counts(units, values)
    return _alpha(counts, np.ones(len(counts)))


def alpha_interval(units: ArrayLike, values: ArrayLike, group_of_unit: ArrayLike) -> tuple[float, float] | None:
    """The 95 % interval of `ordinal_alpha` by bootstrap (Efron 1979): of groups drawn anew with replacement.

    Groups are prompts: what is said of one answer hangs together with what is said of the others. The units are
    0, 1, 2 … here, and `group_of_unit` has for each of them its group. None from fewer than MIN_GROUPS groups.
    """
    counts, paired = _counts(units, values)
    known, group = np.unique(np.asarray(group_of_unit)[paired], return_inverse=True)
    if len(known) < MIN_GROUPS:
        return None
    kinds, kind = np.unique(counts, axis=0, return_inverse=True)  # of units: few, however many units there are
    chance = np.random.default_rng(0)
    found = []
    for _ in range(NUM_SAMPLES):
        times = np.bincount(chance.integers(len(known), size=len(known)), minlength=len(known))  # each group is drawn
        found.append(_alpha(kinds, np.bincount(kind.ravel(), weights=times[group], minlength=len(kinds))))
    told = [alpha for alpha in found if alpha is not None]
    if not told:
        return None
    low, high = np.quantile(told, (0.025, 0.975))
    return float(low), float(high)


def _counts(units: ArrayLike, values: ArrayLike) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """How often each unit that has several values got each value [units, values], and these units."""
    known, unit, sizes = np.unique(np.asarray(units, dtype=np.int64), return_inverse=True, return_counts=True)
    different, value = np.unique(np.asarray(values), return_inverse=True)
    counts = np.zeros((len(known), len(different)))
    np.add.at(counts, (unit, value), 1)
    return counts[sizes > 1], known[sizes > 1]


def _alpha(counts: NDArray[np.float64], times: NDArray[Any]) -> float | None:
    """Alpha of units of these counts [units, values], each of which is there so many times [units]."""
    weights = times / np.maximum(counts.sum(axis=1) - 1, 1)  # each value is paired with the others of its unit
    pairs = (counts * weights[:, None]).T @ counts - np.diag(weights @ counts)  # [values, values]
    totals = pairs.sum(axis=0)  # of each value
    if np.count_nonzero(totals) < 2:
        return None
    upto = np.cumsum(totals) - totals / 2
    differences = (upto[:, None] - upto[None, :]) ** 2
    expected = (np.outer(totals, totals) * differences).sum() / (totals.sum() - 1)
    return float(1 - (pairs * differences).sum() / expected)
