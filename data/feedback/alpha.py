"""Krippendorff's alpha for ordinal data: how far raters agree beyond chance, 1 for always, 0 for as by chance."""

import numpy as np
from numpy.typing import ArrayLike


def ordinal_alpha(units: ArrayLike, values: ArrayLike) -> float | None:
    """Alpha of values, each of which some rater gave to a unit; below 0 where they disagree more than by chance.

    1 − observed / expected disagreement, where two values c < k differ by the square of how many of all values lie
    between them, c and k themselves counted half (Krippendorff 2011, Computing Krippendorff's Alpha-Reliability).
    Units with fewer than two values say nothing and are left out. None where nothing is left, or all values are equal.
    `units` and `values` are of equal length, in any order; who gave a value does not matter.
    """
    _, unit, sizes = np.unique(np.asarray(units), return_inverse=True, return_counts=True)
    paired = sizes[unit] > 1
    known, value = np.unique(np.asarray(values)[paired], return_inverse=True)
    if len(known) < 2:
        return None
    counts = np.zeros((len(sizes), len(known)))  # [units, values]
    np.add.at(counts, (unit[paired], value), 1)
    weights = 1 / np.maximum(sizes - 1, 1)  # each value is paired with the others of its unit
    pairs = (counts * weights[:, None]).T @ counts - np.diag(weights @ counts)  # [values, values]
    totals = pairs.sum(axis=0)  # of each value
    upto = np.cumsum(totals) - totals / 2
    differences = (upto[:, None] - upto[None, :]) ** 2
    expected = (np.outer(totals, totals) * differences).sum() / (totals.sum() - 1)
    return float(1 - (pairs * differences).sum() / expected)
