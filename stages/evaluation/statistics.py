"""The figures of an evaluation as functions of numbers and texts: numpy alone, no torch.

Axes: P prompts, m answers to each, N answers for a best-of-n curve. Intervals are of 95 %, by bootstrap over prompts:
the answers to a prompt are drawn together, since they are no independent observations (a cluster bootstrap, Davison and
Hinkley 1997, section 3.8).
"""

import math
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rlhf.data.feedback.bias import wilson

Floats = NDArray[np.float64]
Interval = tuple[float, float]

OUTSIDE = 0.05
"""The chance that an interval misses the truth."""
NUM_RESAMPLES = 1000
MIN_PROMPTS = 10
"""Of fewer a bootstrap hardly varies, and a regression on lengths says what the ridge and one or two answers say."""
RIDGE = 0.1
"""Weight of the squared coefficients beside the log-likelihood of all answers: separable data keep finite ones."""
REFUSALS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"\bI(?:'|’)?m (?:very |really )?sorry,? but\b",
        r"\bI am (?:very |really )?sorry,? but\b",
        r"\bI (?:can(?:'|’)t|cannot|can not|won(?:'|’)t|will not|am unable to|(?:'|’)m unable to|am not able to) "
        r"(?:help|assist|answer|provide|do that|discuss|comply|fulfil|fulfill|support|engage)",
        r"\bI(?:'|’)?m (?:unable|not able) to (?:help|assist|answer|provide|do that|discuss|comply|fulfil|fulfill)",
        r"\bas an AI(?: language model| assistant)?\b",
        r"\bI must (?:respectfully )?decline\b",
        r"\bI (?:don(?:'|’)t|do not) feel comfortable\b",
    )
)
"""English phrases by which an answer counts as a refusal, looked for in its first 200 characters."""


@lru_cache(maxsize=8)
def resampled(num_prompts: int, seed: int = 0) -> Floats:
    """How often each prompt is drawn in each resample [NUM_RESAMPLES,P]."""
    chance = np.random.default_rng(seed)
    drawn: Floats = chance.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), NUM_RESAMPLES).astype(float)
    drawn.flags.writeable = False
    return drawn


def _interval(figures: Floats, num_prompts: int) -> Interval:
    """Percentiles of resampled figures, a little further out than 2.5 and 97.5: those of few prompts vary too little.

    The expanded percentile interval of Hesterberg 2015 ("What teachers should know about the bootstrap", section 5.3),
    with the quantile of Student's t by the first term of its expansion in the degrees of freedom.
    """
    outside = OUTSIDE / 2
    if num_prompts > 1:
        normal = NormalDist().inv_cdf(1 - outside)
        student = normal + (normal**3 + normal) / (4 * (num_prompts - 1))
        outside = NormalDist().cdf(-student * math.sqrt(num_prompts / (num_prompts - 1)))
    low, high = np.quantile(figures, [outside, 1 - outside])
    return float(low), float(high)


def mean(values: ArrayLike, seed: int = 0) -> tuple[float, Interval | None]:
    """Mean over prompts, and its interval, of values [P] or [P,m]; of one prompt there is none."""
    per_prompt = _by_prompt(values).mean(1)
    if len(per_prompt) == 1:
        return float(per_prompt[0]), None
    drawn = resampled(len(per_prompt), seed)
    return float(per_prompt.mean()), _interval(drawn @ per_prompt / len(per_prompt), len(per_prompt))


def win_rate(outcomes: ArrayLike, seed: int = 0) -> tuple[float, Interval]:
    """Share of wins, ties half, and its interval, from outcomes [P] or [P,m]: 1 a win, 0.5 a tie, 0 a loss.

    Where all prompts came out alike, a bootstrap has no width. The interval then leaves room for as large a share of
    other prompts as could have stayed unseen with a chance of 2.5 % (Clopper and Pearson 1934). From fewer than
    MIN_PROMPTS prompts otherwise it is Wilson's, which ties make too wide, never too narrow.
    """
    per_prompt = _by_prompt(outcomes).mean(1)
    rate, interval = mean(per_prompt, seed)
    if interval is None or per_prompt.min() == per_prompt.max():
        unseen = 1 - (OUTSIDE / 2) ** (1 / len(per_prompt))
        interval = rate * (1 - unseen), rate * (1 - unseen) + unseen
    elif len(per_prompt) < MIN_PROMPTS:
        interval = wilson(rate * len(per_prompt), len(per_prompt))
    return rate, interval


def length_controlled(outcomes: ArrayLike, longer_by: ArrayLike, seed: int = 0) -> tuple[float, Interval] | None:
    """The win rate that answers of equal length would have, and its interval; None where lengths cannot tell, and from
    fewer than MIN_PROMPTS prompts.

    From outcomes [P] or [P,m] as in `win_rate` and, alike, how much longer the first answer is. A logistic regression
    of the outcome on an intercept and tanh(difference / its standard deviation), read at a difference of zero (Dubois
    et al. 2024, AlpacaEval-LC, without its term for a prompt's difficulty). It is an extrapolation where one of two
    models writes longer answers nearly always, and None where all differences are the same but not zero.
    """
    won, difference = _by_prompt(outcomes), _by_prompt(longer_by)
    if len(won) < MIN_PROMPTS:
        return None
    if not difference.any() or won.min() == won.max():  # there is nothing that lengths could explain
        return win_rate(won, seed)
    spread = difference.std()
    if spread == 0:
        return None
    drawn = np.concatenate([np.ones((1, len(won))), resampled(len(won), seed)])  # [S,P]
    # Lengths are whole numbers, so that many answers are alike: they are counted, and each kind is looked at once.
    kinds, which = np.unique(np.stack([difference.ravel(), won.ravel()]), axis=1, return_inverse=True)
    counts = np.zeros((len(won), kinds.shape[1]))
    np.add.at(counts, (np.repeat(np.arange(len(won)), won.shape[1]), which.ravel()), 1)
    intercepts = logistic(np.tanh(kinds[0] / spread), kinds[1], drawn @ counts)[:, 0]
    rates = 1 / (1 + np.exp(-intercepts))
    return float(rates[0]), _interval(rates[1:], len(won))


def logistic(inputs: Floats, outcomes: Floats, weights: Floats) -> Floats:
    """(intercept, slope) [S,2] of a logistic regression per row of weights [S,n], on inputs [n] and outcomes [n].

    By Newton's method with a small RIDGE, in steps that are bounded, since without data in the middle a whole one may
    go too far.
    """
    found = np.zeros((len(weights), 2))
    squares = inputs**2
    for _ in range(50):
        chances = 1 / (1 + np.exp(-(found[:, :1] + found[:, 1:] * inputs)))  # [S,n]
        missed, weighed = weights * (outcomes - chances), weights * chances * (1 - chances)
        a, b = missed.sum(1) - RIDGE * found[:, 0], missed @ inputs - RIDGE * found[:, 1]
        aa, ab, bb = weighed.sum(1) + RIDGE, weighed @ inputs, weighed @ squares + RIDGE
        step = np.stack([bb * a - ab * b, aa * b - ab * a], axis=1) / (aa * bb - ab**2)[:, None]
        found += np.clip(step, -1, 1)
        if np.abs(step).max() < 1e-6:
            break
    return found


def best_of_n(scores: ArrayLike, n: int, values: ArrayLike | None = None) -> Floats:
    """Expected score of the best of n answers to each prompt [P], from N ≥ n answers each: scores [P,N].

    The mean over all subsets of n: the answer with the i-th lowest score is best in C(i−1, n−1) of C(N, n) (Nakano et
    al. 2021, WebGPT, appendix I). With `values` [P,N] the expectation of those of the best answers; of answers with the
    same score each is as likely the chosen one.
    """
    found = np.asarray(scores, float)
    number = found.shape[1]
    if not 1 <= n <= number:
        raise ValueError(f"the best of {n} cannot be told from {number} answers")
    weights = np.array([math.comb(i, n - 1) / math.comb(number, n) for i in range(number)])
    order = np.argsort(found, axis=1)
    ascending = np.take_along_axis(found, order, 1)
    if values is None:
        return ascending @ weights
    chosen = np.take_along_axis(np.asarray(values, float), order, 1)
    best = np.empty(len(found))
    for prompt, (row, value) in enumerate(zip(ascending, chosen, strict=True)):
        _, groups = np.unique(row, return_inverse=True)
        best[prompt] = np.bincount(groups, weights) @ (np.bincount(groups, value) / np.bincount(groups))
    return best


def best_of_n_kl(n: int) -> float:
    """KL of the best of n from the model itself, in nats per response: log n − (n−1)/n (Stiennon et al. 2020, G.3).

    Exact where scores have no ties; with ties it is less.
    """
    return math.log(n) - (n - 1) / n


def best_of_n_curve(scores: ArrayLike, qualities: ArrayLike | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """A row per n = 1, 2, 4 … N of what best-of-n sampling gains, the yardstick for PPO (Gao et al. 2022)."""
    number = np.asarray(scores).shape[1]
    rows = []
    for n in (2**power for power in range(number.bit_length())):
        score, interval = mean(best_of_n(scores, n), seed)
        quality = None if qualities is None else float(best_of_n(scores, n, qualities).mean())
        rows.append({"n": n, "score": score, "score_interval": interval, "quality": quality, "kl": best_of_n_kl(n)})
    return rows


def distinct_n(texts: Iterable[str], n: int) -> float | None:
    """Different n-grams of words over all n-grams, of all texts together (Li et al. 2016); None without any."""
    grams = [gram for text in texts for gram in _grams(text, n)]
    return len(set(grams)) / len(grams) if grams else None


def repetition(texts: Iterable[str], n: int = 4) -> float | None:
    """Share of a text's n-grams of words that came before in it, a mean over the texts that have any.

    1 − different / all, seq-rep-n of Welleck et al. 2019; None where no text has n words.
    """
    shares = [1 - len(set(grams)) / len(grams) for text in texts if (grams := _grams(text, n))]
    return sum(shares) / len(shares) if shares else None


def refusal_share(texts: Sequence[str]) -> float:
    """Share of the texts in whose beginning one of REFUSALS is found."""
    return sum(any(pattern.search(text[:200]) for pattern in REFUSALS) for text in texts) / len(texts)


def _grams(text: str, n: int) -> list[tuple[str, ...]]:
    words = text.split()
    return [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]


def _by_prompt(values: ArrayLike) -> Floats:
    """[P,m] of what may be [P]."""
    found = np.asarray(values, float)
    return found.reshape(len(found), -1)
