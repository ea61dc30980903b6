"""Power laws between loss and parameters, data or compute: straight lines on log axes (Kaplan et al. 2020)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SAME_SIZE = 1.2
"""Variants are of one size while the largest has at most so many times the parameters of the smallest: parts of a
decoder change the count by a little, too."""
MIN_SIZES = 3
FLOPS_PER_TOKEN = 6
"""Operations per parameter and token of training: forward and backward pass (Kaplan et al. 2020, section 2.1)."""

Point = tuple[float, float]
"""Parameters, tokens or operations, and the held-out loss in nats per token."""


@dataclass(frozen=True)
class PowerLaw:
    """L(x) = (10^log10_constant / x)^exponent."""

    exponent: float
    log10_constant: float
    """The constant may be too large for a float."""
    r_squared: float
    """Share of the variance of log L that the line explains."""

    def __call__(self, x: float) -> float:
        """The loss at `x`."""
        return float(10 ** (self.exponent * (self.log10_constant - np.log10(x))))


@dataclass(frozen=True)
class Evaluation:
    """A held-out loss in the middle of training."""

    variant: str
    num_parameters: int
    num_tokens: int
    """Seen in training so far."""
    loss: float


def fit_power_law(points: Sequence[Point]) -> PowerLaw | None:
    """Least squares on log L against log x; None for fewer than 3 different x, or where the loss does not fall."""
    x, loss = np.log10(np.array(points, dtype=float).reshape(-1, 2)).T
    if len(np.unique(x)) < 3:
        return None
    slope, intercept = np.polyfit(x, loss, 1)
    if slope > -1e-12:  # flat, but for rounding
        return None
    spread = ((loss - loss.mean()) ** 2).sum()
    missed = ((loss - (slope * x + intercept)) ** 2).sum()
    return PowerLaw(float(-slope), float(intercept / -slope), float(1 - missed / spread))


def by_parameters(sizes: Iterable[Point]) -> list[Point]:
    """The lowest loss of each size, from parameters and final losses of all variants."""
    best: list[Point] = []
    smallest = 0.0
    for parameters, loss in sorted(sizes):
        if parameters > SAME_SIZE * smallest:
            smallest = parameters
            best.append((parameters, loss))
        elif loss < best[-1][1]:
            best[-1] = (parameters, loss)
    return best


def by_tokens(evaluations: Sequence[Evaluation], num_parameters: float) -> list[Point]:
    """Loss over the tokens seen, up to the lowest, of the variant with so many parameters that came lowest."""
    best = min((e for e in evaluations if e.num_parameters == num_parameters), key=lambda e: e.loss, default=None)
    if best is None:
        return []
    its = (e for e in evaluations if e.variant == best.variant and e.num_tokens <= best.num_tokens)
    return sorted((e.num_tokens, e.loss) for e in its)


def frontier(evaluations: Iterable[Evaluation]) -> list[Point]:
    """Loss over compute, 6 · parameters · tokens: the evaluations that no other reached with as little compute."""
    found: list[Point] = []
    for compute, loss in sorted((FLOPS_PER_TOKEN * e.num_parameters * e.num_tokens, e.loss) for e in evaluations):
        if not found or loss < found[-1][1]:
            found.append((compute, loss))
    return found


def study(sizes: Sequence[Point], evaluations: Sequence[Evaluation]) -> dict[str, dict[str, Any]] | None:
    """Points and fit for `parameters`, `tokens` and `compute`; None for fewer than 3 sizes.

    `sizes` are parameters without embeddings and final loss of each variant, `evaluations` those of all variants.
    """
    best = by_parameters(sizes)
    if len(best) < MIN_SIZES:
        return None
    points = {
        "parameters": best,
        "tokens": by_tokens(evaluations, best[-1][0]),
        "compute": frontier(evaluations),
    }
    return {name: {"points": found, "fit": fit_power_law(found)} for name, found in points.items()}
