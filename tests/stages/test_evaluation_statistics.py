"""Win rates, length control, best-of-n and what texts are like: worked numbers, and intervals that keep their word."""

import math

import numpy as np
import pytest

from rlhf.stages.evaluation import statistics
from rlhf.stages.evaluation.statistics import (
    best_of_n,
    best_of_n_curve,
    best_of_n_kl,
    distinct_n,
    length_controlled,
    logistic,
    mean,
    refusal_share,
    repetition,
    resampled,
    win_rate,
)

NUM_DATA_SETS = 400
COVERED = range(368, 391)
"""How many of 400 intervals of 95 % hold the truth, in all but 1 of 100 simulations (Binomial(400, 0.95))."""


def test_ties_count_half_and_every_prompt_as_much() -> None:
    rate, (low, high) = win_rate([1.0, 1.0, 0.5, 0.0])
    assert rate == 0.625
    assert 0 <= low < rate < high <= 1
    assert win_rate([[1.0, 1.0, 0.0, 0.0], [1.0, 0.5, 0.5, 1.0]])[0] == 0.625


def test_answers_to_a_prompt_are_drawn_together() -> None:
    """Four equal answers to each of 50 prompts say no more than one does; four of 200 prompts do."""
    alike = [1.0] * 30 + [0.0] * 20
    once, often = win_rate(alike)[1], win_rate([[outcome] * 4 for outcome in alike])[1]
    assert once == often
    many = win_rate(np.repeat(alike, 4))[1]
    assert many[1] - many[0] == pytest.approx((once[1] - once[0]) / 2, rel=0.15)


def test_a_bootstrap_of_fewer_than_ten_prompts_is_not_believed() -> None:
    """Four answers to each, nearly alike: 2.75 of 4 by Wilson (0.6875 + 0.4802 ± 0.6610) / 1.9604 by hand."""
    alike = [[1.0, 1.0, 1.0, 0.0]] * 3 + [[1.0, 1.0, 0.0, 0.0]]
    assert win_rate(alike) == (0.6875, pytest.approx((0.2585, 0.9328), abs=1e-4))
    low, high = win_rate(alike[:2] * 4 + alike[2:])[1]  # ten prompts
    assert high - low < 0.2


def test_an_interval_is_the_same_whenever_it_is_taken() -> None:
    outcomes = [1.0] * 7 + [0.0] * 5
    assert win_rate(outcomes) == win_rate(outcomes)
    assert win_rate(outcomes, seed=1)[1] != win_rate(outcomes)[1] or resampled(12, 1).tolist() != resampled(12).tolist()
    assert resampled(12).sum(1).tolist() == [12.0] * statistics.NUM_RESAMPLES


@pytest.mark.parametrize(
    ("outcome", "interval"), [(1.0, (0.025 ** (1 / 20), 1.0)), (0.0, (0.0, 1 - 0.025 ** (1 / 20)))]
)
def test_twenty_wins_do_not_make_a_loss_impossible(outcome: float, interval: tuple[float, float]) -> None:
    """0.025^(1/20) = 0.8316, the bound of Clopper and Pearson."""
    rate, found = win_rate([outcome] * 20)
    assert rate == outcome
    assert found == pytest.approx(interval)
    assert win_rate([0.5] * 20)[1] == pytest.approx((0.5 * 0.025 ** (1 / 20), 1 - 0.5 * 0.025 ** (1 / 20)))


@pytest.mark.parametrize("num_answers", [1, 4])
@pytest.mark.parametrize("num_prompts", [64, 150])
def test_win_rate_intervals_cover_the_true_rate(num_prompts: int, num_answers: int) -> None:
    """A judge on a scale, for whom answers that are less than 0.2 apart are tied; some prompts suit one model more.

    The difference of two answers is N(0.3, 1 + 1): P(win) = P(N > 0.2), P(tie) = P(−0.2 < N < 0.2).
    """

    def below(x: float) -> float:
        return 0.5 * (1 + math.erf((x - 0.3) / math.sqrt(2) / math.sqrt(2)))

    truth = 1 - below(0.2) + (below(0.2) - below(-0.2)) / 2
    chance = np.random.default_rng(num_prompts + num_answers)
    covered = 0
    for _ in range(NUM_DATA_SETS):
        gaps = chance.normal(0.3, 1, (num_prompts, 1)) + chance.normal(0, 1, (num_prompts, num_answers))
        low, high = win_rate(np.where(np.abs(gaps) < 0.2, 0.5, gaps > 0))[1]
        covered += low <= truth <= high
    assert covered in COVERED


def test_an_interval_that_takes_each_answer_for_a_prompt_would_not() -> None:
    """The simulation can tell: without the clusters far fewer intervals hold the truth."""
    chance = np.random.default_rng(0)
    covered = 0
    for _ in range(NUM_DATA_SETS):
        outcomes = chance.normal(0, 1, (64, 1)) + chance.normal(0, 1, (64, 4)) > 0
        low, high = win_rate(outcomes.ravel().astype(float))[1]
        covered += low <= 0.5 <= high
    assert covered < COVERED[0]


@pytest.mark.parametrize("quality", [0.0, 1.0])
def test_length_control_finds_what_is_not_length(quality: float) -> None:
    """A judge that likes longer answers, of a model that writes them: half of the wins at equal length, σ(quality) if
    its answers are better too."""
    chance = np.random.default_rng(3)
    longer = chance.normal(10, 20, (1000, 2))
    likes = quality + 2 * np.tanh(longer / longer.std())
    outcomes = (chance.random(longer.shape) < 1 / (1 + np.exp(-likes))).astype(float)
    truth = 1 / (1 + math.exp(-quality))
    _, interval = win_rate(outcomes)
    found = length_controlled(outcomes, longer)
    assert found is not None
    assert interval[0] > truth + 0.02  # as it is, the win rate is another
    assert found[0] == pytest.approx(truth, abs=0.03)
    assert found[1][0] < truth < found[1][1]


def test_a_judge_that_always_takes_the_longer_answer_prefers_nobody_at_equal_length() -> None:
    """Separable data, whose slope has no end without the ridge."""
    longer = np.random.default_rng(4).normal(10, 20, 500)
    outcomes = (longer > 0).astype(float)
    found = length_controlled(outcomes, longer)
    assert found is not None
    assert win_rate(outcomes)[0] > 0.65
    assert found[0] == pytest.approx(0.5, abs=0.05)
    assert found[1][0] < 0.5 < found[1][1]


def test_length_controlled_intervals_cover_the_true_rate() -> None:
    chance = np.random.default_rng(5)
    covered = 0
    for _ in range(60):
        longer = chance.normal(5, 10, 80)
        likes = 0.5 + np.tanh(longer / longer.std())
        found = length_controlled((chance.random(80) < 1 / (1 + np.exp(-likes))).astype(float), longer)
        assert found is not None
        covered += found[1][0] <= 1 / (1 + math.exp(-0.5)) <= found[1][1]
    assert covered in range(52, 61)  # Binomial(60, 0.95), all but 1 of 100


def test_lengths_that_cannot_tell() -> None:
    outcomes = [1.0, 0.0, 1.0, 1.0, 0.5] * 2
    assert length_controlled(outcomes, [0] * 10) == win_rate(outcomes)
    assert length_controlled(outcomes, [3] * 10) is None
    assert length_controlled([1.0] * 10, range(10)) == win_rate([1.0] * 10)


def test_fewer_than_ten_prompts_tell_nothing_of_lengths() -> None:
    """However many answers there are to each."""
    outcomes, longer = [[1.0, 0.0, 1.0, 0.5]] * 10, [[2, -1, 3, 1]] * 10
    assert length_controlled(outcomes, longer) is not None
    assert length_controlled(outcomes[1:], longer[1:]) is None


def test_the_regression_is_at_its_optimum() -> None:
    """Where the gradient of log-likelihood and ridge is zero, for each row of weights."""
    chance = np.random.default_rng(6)
    inputs, outcomes = chance.normal(size=40), (chance.random(40) < 0.7).astype(float)
    weights = chance.integers(0, 3, (5, 40)).astype(float)
    found = logistic(inputs, outcomes, weights)
    missed = weights * (outcomes - 1 / (1 + np.exp(-(found[:, :1] + found[:, 1:] * inputs))))
    gradient = np.stack([missed.sum(1), missed @ inputs], 1) - statistics.RIDGE * found
    assert np.abs(gradient).max() < 1e-4


def test_best_of_n_is_a_mean_over_all_subsets() -> None:
    """Of 1, 2, 3, 6 the pairs have the best 2, 3, 6, 3, 6, 6: 26/6; the triples 3, 6, 6, 6: 21/4."""
    scores = [[3.0, 1.0, 6.0, 2.0]]
    assert [best_of_n(scores, n)[0] for n in (1, 2, 3, 4)] == pytest.approx([3.0, 26 / 6, 21 / 4, 6.0])
    with pytest.raises(ValueError, match="the best of 5 cannot be told from 4 answers"):
        best_of_n(scores, 5)


def test_best_of_n_takes_other_values_along() -> None:
    """The best of two by score has the quality 10·score; of equal scores each is as likely the chosen one."""
    scores = np.array([[3.0, 1.0, 6.0, 2.0]])
    assert best_of_n(scores, 2, 10 * scores)[0] == pytest.approx(260 / 6)
    for quality in ([5.0, 0.0, 1.0], [0.0, 5.0, 1.0]):  # pairs: (tie) 2.5, 5 or 0 and 0 or 5 against the lower one
        assert best_of_n([[2.0, 2.0, 1.0]], 2, [quality])[0] == pytest.approx(2.5)


def test_the_curve_doubles_n_and_knows_its_kl() -> None:
    """log 4 − 3/4 = 0.636."""
    chance = np.random.default_rng(7)
    scores = chance.normal(size=(200, 6))
    scores -= scores.mean()
    rows = best_of_n_curve(scores, -scores)
    assert [row["n"] for row in rows] == [1, 2, 4]
    assert rows[0]["kl"] == 0
    assert rows[2]["kl"] == best_of_n_kl(4) == pytest.approx(math.log(4) - 0.75)
    # The expected largest of 1, 2 and 4 standard normals.
    for row, truth in zip(rows, (0.0, 0.5642, 1.0294), strict=True):
        assert row["score"] == pytest.approx(truth, abs=0.1)
        assert row["score_interval"][0] < row["score"] < row["score_interval"][1]
        assert row["quality"] == pytest.approx(-row["score"])


def test_one_prompt_has_no_interval() -> None:
    """Of itself it says nothing of how far others lie from it."""
    assert mean([3.0]) == (3.0, None)
    assert win_rate([[1.0, 0.5]]) == (0.75, pytest.approx((0.75 * 0.025, 0.75 * 0.025 + 0.975)))


def test_a_mean_has_the_interval_of_its_prompts() -> None:
    value, (low, high) = mean([[1.0, 3.0], [4.0, 8.0]] * 50)
    assert value == 4.0
    assert (low, high) == pytest.approx((4 - 1.96 * 0.2, 4 + 1.96 * 0.2), abs=0.05)  # means 2 and 6: 2/√100


def test_distinct_n_counts_words() -> None:
    texts = ["a b a b", "a b"]
    assert distinct_n(texts, 1) == 2 / 6
    assert distinct_n(texts, 2) == 2 / 4  # ab, ba, ab and ab
    assert distinct_n(["one", ""], 2) is None


def test_repetition_is_within_a_text() -> None:
    """ "a b a b a b" has the 4-grams abab, baba, abab: one of three came before."""
    assert repetition(["a b a b a b"]) == pytest.approx(1 / 3)
    assert repetition(["a b a b a b", "a b c d", "short"]) == pytest.approx(1 / 6)
    assert repetition(["a b a b a b"], n=1) == pytest.approx(4 / 6)
    assert repetition(["a b c"]) is None


@pytest.mark.parametrize(
    ("text", "refuses"),
    [
        ("I'm sorry, but I can't help with that.", True),
        ("I cannot provide instructions for this.", True),
        ("As an AI language model, I have no opinion.", True),
        ("I’m not able to assist with that request.", True),
        ("I am sorry to hear that! Try turning it off.", False),
        ("You cannot provide a key twice.", False),
        ("a fox " * 60 + "I'm sorry, but I can't help with that.", False),
    ],
)  # fmt: skip
def test_refusals_are_told_by_how_they_begin(text: str, refuses: bool) -> None:
    assert refusal_share([text, "Yes."]) == refuses / 2
