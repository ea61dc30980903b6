"""The ranking loss and accuracy against numbers worked out by hand, in float64."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from rlhf.stages.reward.objective import comparable, ranking_accuracy, ranking_loss

LN2 = math.log(2)


def t(rows: list) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


SCORES, TIED_RANKS = t([[1.2, 0.3, 0.5, -0.7]]), torch.tensor([[1, 2, 2, 4]])
SORTED, RANKS = t([[1.2, 0.5, 0.3, -0.7]]), torch.tensor([[1, 2, 3, 4]])


def ragged() -> tuple[Tensor, Tensor, Tensor]:
    """Six prompts with 2 to 9 answers, some tied, junk in the empty slots."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(6, 9, dtype=torch.float64, generator=generator)
    ranks = torch.randint(1, 5, (6, 9), generator=generator)
    mask = torch.arange(9) < torch.tensor([[9], [2], [4], [7], [3], [5]])
    ranks[1, :2] = torch.tensor([2, 1])
    return torch.where(mask, scores, math.nan), torch.where(mask, ranks, -7), mask


def test_pairs_golden_with_ties_dropped() -> None:
    scores = SCORES.clone().requires_grad_()
    loss = ranking_loss(scores, TIED_RANKS)
    loss.backward()
    assert loss.item() == pytest.approx(0.29205417, abs=1e-7)
    expected = t([[-0.15019424, 0.00402182, 0.0200674, 0.12610502]])
    torch.testing.assert_close(scores.grad, expected, rtol=0, atol=1e-7)


def test_pairs_golden_with_soft_ties() -> None:
    assert ranking_loss(SCORES, TIED_RANKS, ties="soft").item() == pytest.approx(0.35973495, abs=1e-7)


@pytest.mark.parametrize(
    ("loss", "expected"), [("plackett_luce", 1.78380987), ("best_of_k", 0.71916749), ("pairs", 0.34306828)]
)
def test_golden_without_ties(loss: str, expected: float) -> None:
    assert ranking_loss(SORTED, RANKS, loss=loss).item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(("lead", "expected"), [(0, 0.693), (1, 0.813), (3, 1.549)])
@pytest.mark.parametrize("loss", ["pairs", "best_of_k"])
def test_a_soft_tie_pulls_the_two_scores_together(lead: float, expected: float, loss: str) -> None:
    actual = ranking_loss(t([[lead, 0]]), torch.tensor([[1, 1]]), loss=loss, ties="soft")
    assert actual.item() == pytest.approx(expected, abs=5e-4)


def test_pairs_equal_an_explicit_loop() -> None:
    scores, ranks, mask = ragged()
    means = []
    for row in range(6):
        slots = [i for i in range(9) if mask[row, i]]
        losses = [
            math.log1p(math.exp(scores[row, j] - scores[row, i]))
            for i, j in itertools.permutations(slots, 2)
            if ranks[row, i] < ranks[row, j]
        ]
        means.append(sum(losses) / len(losses))
    assert ranking_loss(scores, ranks, mask).item() == pytest.approx(sum(means) / 6, abs=1e-12)


@pytest.mark.parametrize("loss", ["pairs", "plackett_luce", "best_of_k"])
def test_the_order_in_which_answers_are_listed_does_not_matter(loss: str) -> None:
    scores, ranks, mask = ragged()
    order = torch.randperm(9, generator=torch.Generator().manual_seed(5))
    shuffled = ranking_loss(scores[:, order], ranks[:, order], mask[:, order], loss=loss)
    torch.testing.assert_close(shuffled, ranking_loss(scores, ranks, mask, loss=loss), rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", ["pairs", "plackett_luce", "best_of_k"])
def test_the_gradient_of_each_prompt_sums_to_zero_and_empty_slots_get_none(loss: str) -> None:
    scores, ranks, mask = ragged()
    scores.requires_grad_()
    ranking_loss(scores, ranks, mask, loss=loss).backward()
    assert scores.grad.abs().sum() > 0
    assert scores.grad.sum(dim=1).abs().max() < 1e-12
    assert not scores.grad[~mask].any()


@pytest.mark.parametrize(("loss", "expected"), [("pairs", 2), ("best_of_k", 4), ("plackett_luce", 24)])
def test_equal_scores_give_the_log_of_the_number_of_choices(loss: str, expected: int) -> None:
    assert ranking_loss(torch.zeros(3, 4), RANKS.expand(3, 4), loss=loss).item() == pytest.approx(
        math.log(expected), abs=1e-6
    )


@pytest.mark.parametrize("loss", ["pairs", "plackett_luce", "best_of_k"])
def test_two_answers_are_bradley_terry(loss: str) -> None:
    actual = ranking_loss(t([[0.3, 1.1]]), torch.tensor([[2, 1]]), loss=loss)
    assert actual.item() == pytest.approx(math.log1p(math.exp(-0.8)), abs=1e-12)


def test_prompts_weigh_the_same_however_many_answers_they_have() -> None:
    scores = torch.zeros(2, 9, dtype=torch.float64)
    scores[0, :2] = t([0, 3])  # two answers, in the wrong order
    mask = torch.arange(9) < torch.tensor([[2], [9]])
    loss = ranking_loss(scores, torch.arange(1, 10).expand(2, 9), mask)
    assert loss.item() == pytest.approx((math.log1p(math.exp(3)) + LN2) / 2, abs=1e-12)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("loss", ["pairs", "plackett_luce", "best_of_k"])
def test_microbatches_add_up_to_the_whole_batch(size: int, loss: str) -> None:
    scores, ranks, mask = ragged()
    ranks[4] = 1  # nothing to compare: not among the prompts
    total = comparable(ranks, mask).sum()
    assert total == 5
    parts = [
        ranking_loss(scores[i : i + size], ranks[i : i + size], mask[i : i + size], loss, num_prompts=total)
        for i in range(0, 6, size)
    ]
    torch.testing.assert_close(sum(parts), ranking_loss(scores, ranks, mask, loss), rtol=0, atol=1e-12)


@pytest.mark.parametrize("loss", ["pairs", "plackett_luce", "best_of_k"])
def test_a_batch_of_ties_and_lonely_answers_has_loss_and_gradient_zero(loss: str) -> None:
    scores = torch.tensor([[1.0, 2.0], [3.0, math.inf]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    actual = ranking_loss(scores, torch.ones(2, 2), mask, loss=loss, centering=0.1)
    actual.backward()
    assert actual.item() == 0
    assert scores.grad.tolist() == [[0, 0], [0, 0]]


def test_only_prompts_with_a_pair_are_comparable() -> None:
    ranks = torch.tensor([[1, 2], [1, 1], [1, 2]])
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    assert comparable(ranks, mask).tolist() == [True, False, False]
    assert comparable(ranks, mask, ties="soft").tolist() == [True, True, False]


@pytest.mark.parametrize("loss", ["pairs", "plackett_luce", "best_of_k"])
@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_scores_stay_finite_and_still_teach(loss: str, sign: int) -> None:
    scores = torch.tensor([[sign * 1e4, -sign * 1e4]], requires_grad=True)
    actual = ranking_loss(scores, torch.tensor([[1, 2]]), loss=loss)
    actual.backward()
    assert actual.item() == (0 if sign > 0 else 2e4)
    assert scores.grad.tolist() == ([[0, 0]] if sign > 0 else [[-1, 1]])


def test_a_margin_asks_for_a_lead_and_zero_asks_for_nothing() -> None:
    plain = ranking_loss(SCORES, TIED_RANKS)
    assert ranking_loss(SCORES, TIED_RANKS, margin=0.0).equal(plain)
    two, ranks = t([[0.4, 1.0]]), torch.tensor([[2, 1]])
    assert ranking_loss(two, ranks, margin=1.0).item() == pytest.approx(math.log1p(math.exp(0.4)), abs=1e-12)
    by_pair = torch.full((1, 2, 2), math.nan)
    by_pair[0, 1, 0] = 1.0  # answer 1 is the better one
    assert ranking_loss(two, ranks, margin=by_pair).item() == pytest.approx(math.log1p(math.exp(0.4)), abs=1e-12)


def test_label_smoothing_mixes_in_the_reversed_label() -> None:
    actual = ranking_loss(t([[3, 0]]), torch.tensor([[1, 2]]), label_smoothing=0.1)
    expected = 0.9 * math.log1p(math.exp(-3)) + 0.1 * math.log1p(math.exp(3))
    assert actual.item() == pytest.approx(expected, abs=1e-12)


def test_centering_adds_the_squared_sum_of_a_pair() -> None:
    actual = ranking_loss(t([[3, 1]]), torch.tensor([[1, 2]]), centering=0.01)
    assert actual.item() == pytest.approx(math.log1p(math.exp(-2)) + 0.01 * 16, abs=1e-12)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"loss": "pair"}, "'pair'"),
        ({"ties": "half"}, "'half'"),
        ({"loss": "plackett_luce", "ties": "soft"}, "drop"),
        ({"loss": "best_of_k", "margin": 1.0}, "best_of_k"),
        ({"loss": "plackett_luce", "label_smoothing": 0.1}, "plackett_luce"),
    ],
)
def test_options_that_do_not_exist_or_do_not_go_together_are_named(options: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ranking_loss(SCORES, TIED_RANKS, **options)


def test_accuracy_counts_pairs_and_gives_half_for_equal_scores() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0, 9.9], [0.0, 0.0, math.nan, math.nan]])
    ranks = torch.tensor([[1, 2, 3, 1], [1, 2, 1, 1]])
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    correct, pairs = ranking_accuracy(scores, ranks, mask)
    assert (correct.item(), pairs.item()) == (2.5, 4)  # 3>1, 3>2, not 1>2; one half


def test_reversed_labels_turn_accuracy_around() -> None:
    scores, ranks, mask = ragged()
    right, pairs = ranking_accuracy(scores, ranks, mask)
    wrong, same_pairs = ranking_accuracy(scores, -ranks, mask)
    assert pairs == same_pairs
    assert right + wrong == pairs


def test_scores_in_half_precision_are_compared_in_float32() -> None:
    assert ranking_loss(torch.zeros(1, 2).bfloat16(), torch.tensor([[1, 2]])).dtype == torch.float32
