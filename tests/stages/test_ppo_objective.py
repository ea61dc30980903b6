"""PPO's pure functions against numbers worked out by hand, in float64."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes_world import in_two_processes
from torch import Tensor

from rlhf.stages.ppo.objective import (
    AdaptiveKL,
    gae,
    kl_estimate,
    policy_loss,
    response_mask,
    token_rewards,
    truncated_importance_weights,
    value_loss,
    whiten,
)

NAN, INF = math.nan, math.inf


def t(rows: list) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def near(actual: Tensor, expected: Tensor | list, atol: float = 1e-7) -> None:
    expected = expected if isinstance(expected, Tensor) else t(expected)
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol, check_dtype=False)


# Two responses of 4 and 6 tokens; the slots after the first one's end hold junk.
LOGPROBS = t([[-1, -0.5, -2, -0.1, 9, 9], [-0.7, -0.3, -1.2, -0.4, -0.9, -0.2]])
REF_LOGPROBS = t([[-1.2, -0.5, -1.5, -0.3, 7, 7], [-0.6, -0.9, -1, -0.4, -1.1, -0.7]])
MASK = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
SCORES = t([1.5, -0.5])
VALUES = t([[0.2, 0.3, 0.1, 0.4, 55, 55], [0, -0.1, -0.2, -0.3, -0.2, -0.4]])
REWARDS = t([[-0.01, 0, 0.025, 1.49, 0, 0], [0.005, -0.03, 0.01, 0, -0.01, -0.525]])
ADVANTAGES = t(
    [
        [1.12785125, 1.092475, 1.3605, 1.09, 0, 0],
        [-0.48175643, -0.40711203, -0.29169687, -0.2123125, -0.32875, -0.125],
    ]
)
RETURNS = t(
    [
        [1.32785125, 1.392475, 1.4605, 1.49, 0, 0],
        [-0.48175643, -0.50711203, -0.49169687, -0.5123125, -0.52875, -0.525],
    ]
)


# --- which tokens count


def test_the_stop_token_counts_and_what_follows_does_not_even_if_pad_is_the_stop_token() -> None:
    assert response_mask(torch.tensor([[5, 6, 2, 2, 2]]), [2]).tolist() == [[True, True, True, False, False]]


def test_a_response_without_stop_token_counts_whole_and_so_does_one_that_stops_in_the_last_slot() -> None:
    assert response_mask(torch.tensor([[5, 6, 7], [5, 6, 2]]), [2]).all()


def test_any_of_several_stop_tokens_ends_the_response() -> None:
    responses = torch.tensor([[5, 7, 9, 0], [5, 9, 7, 0], [7, 5, 5, 0]])
    assert response_mask(responses, torch.tensor([7, 9])).sum(dim=1).tolist() == [2, 2, 1]


def test_without_stop_tokens_everything_counts() -> None:
    assert response_mask(torch.tensor([[1, 2, 0]]), []).all()


# --- rewards


def test_token_rewards_golden() -> None:
    rewards = token_rewards(SCORES, LOGPROBS, REF_LOGPROBS, MASK, kl_coef=0.05)
    near(rewards, REWARDS)
    kl = torch.where(MASK, LOGPROBS - REF_LOGPROBS, 0).sum(dim=1)
    near(kl, [-0.1, 1.0])
    near(rewards.sum(dim=1), SCORES - 0.05 * kl)


def test_score_lands_on_the_last_counted_token_also_after_a_hole() -> None:
    mask = torch.tensor([[True, False, True, False], [True, False, False, False], [False] * 4])
    rewards = token_rewards(t([1, 2, 3]), t([[0.0] * 4] * 3), t([[0.0] * 4] * 3), mask, kl_coef=0.1)
    near(rewards, [[0, 0, 1, 0], [2, 0, 0, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 9e9])
def test_junk_outside_the_mask_changes_no_reward_advantage_or_whitened_value(junk: float) -> None:
    spoiled = [torch.where(MASK, x, junk) for x in (LOGPROBS, REF_LOGPROBS, VALUES)]
    rewards = token_rewards(SCORES, spoiled[0], spoiled[1], MASK, kl_coef=0.05)
    near(rewards, REWARDS)
    advantages, returns = gae(torch.where(MASK, rewards, junk), spoiled[2], MASK)
    near(advantages, ADVANTAGES)
    near(returns, RETURNS)
    assert torch.equal(whiten(torch.where(MASK, ADVANTAGES, junk), MASK), whiten(ADVANTAGES, MASK))


# --- advantages


@pytest.mark.parametrize(
    ("gamma", "gae_lambda", "expected"),
    [
        (1.0, 0.95, ADVANTAGES),
        (1.0, 1.0, [[1.305, 1.215, 1.415, 1.09, 0, 0], [-0.55, -0.455, -0.325, -0.235, -0.335, -0.125]]),
        (
            0.99,
            0.9,
            [
                [0.93375409, 0.95034129, 1.29219, 1.09, 0, 0],
                [-0.40499081, -0.3490357, -0.24807598, -0.18078113, -0.317375, -0.125],
            ],
        ),
        (1.0, 0.0, [[0.09, -0.2, 0.325, 1.09, 0, 0], [-0.095, -0.13, -0.09, 0.1, -0.21, -0.125]]),
    ],
)
def test_gae_golden(gamma: float, gae_lambda: float, expected: Tensor | list) -> None:
    near(gae(REWARDS, VALUES, MASK, gamma, gae_lambda)[0], expected)


def test_returns_golden_and_from_unwhitened_advantages() -> None:
    advantages, returns = gae(REWARDS, VALUES, MASK)
    near(returns, RETURNS)
    near(returns - torch.where(MASK, VALUES, 0), advantages, atol=1e-15)


def test_gae_is_the_discounted_sum_of_all_later_errors() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(2, 3, 7, dtype=torch.float64, generator=generator)
    mask = torch.arange(7) < torch.tensor([[7], [1], [4]])
    advantages, _ = gae(rewards, values, mask, gamma=0.9, gae_lambda=0.8)
    for row, length in enumerate([7, 1, 4]):
        after = [*values[row, 1:length].tolist(), 0.0]
        deltas = [rewards[row, i] + 0.9 * after[i] - values[row, i] for i in range(length)]
        for i in range(7):
            expected = sum(0.72 ** (j - i) * deltas[j] for j in range(i, length)) if i < length else 0.0
            assert advantages[row, i].item() == pytest.approx(float(expected), abs=1e-12)


def test_lambda_one_is_reward_to_go_minus_value() -> None:
    advantages, returns = gae(REWARDS, VALUES, MASK, gae_lambda=1.0)
    near(returns, torch.where(MASK, REWARDS.flip(1).cumsum(1).flip(1), 0))
    near(advantages, returns - torch.where(MASK, VALUES, 0))


def test_score_on_the_stop_token_with_a_worthless_state_after_it() -> None:
    values, mask = t([[0.5, 0.5, 0.5, 5]]), torch.tensor([[True, True, True, False]])
    advantages, _ = gae(t([[0, 0, 1, 0]]), values, mask)
    near(advantages, [[0.45125, 0.475, 0.5, 0]])


def test_tokens_masked_inside_a_response_are_as_good_as_cut_out() -> None:
    keep = [0, 3, 4]
    mask = torch.tensor([[True, False, False, True, True]])
    rewards, values = t([[0.1, 7, 7, 0.2, 1]]), t([[0.3, 8, 8, 0.4, 0.5]])
    holed, _ = gae(rewards, values, mask)
    cut, _ = gae(rewards[:, keep], values[:, keep], mask[:, keep])
    near(holed[:, keep], cut)
    near(holed[:, 1:3], [[0, 0]])


# --- whitening


def test_whitening_golden() -> None:
    whitened = whiten(ADVANTAGES, MASK)
    near(
        whitened,
        [
            [1.15491186, 1.1065857, 1.47272451, 1.1032047, 0, 0],
            [-1.04391229, -0.9419434, -0.7842791, -0.67583513, -0.834896, -0.55656083],
        ],
    )


def test_padding_takes_no_part_in_whitening() -> None:
    values = t([[1, -1, 2, 0, 0, 0, 0, 0], [0.5, -0.5, 0, 0, 0, 0, 0, 0]])
    mask = torch.arange(8) < torch.tensor([[3], [2]])
    expected = t([[0.5620, -1.3112, 1.4985] + [0] * 5, [0.0937, -0.8429] + [0] * 6])
    near(whiten(values, mask), expected, atol=1e-4)


def test_whitening_without_shift_keeps_the_mean() -> None:
    kept = whiten(ADVANTAGES, MASK, shift_mean=False)
    near(kept[MASK].mean(), ADVANTAGES[MASK].mean())
    near(kept[MASK].var(unbiased=False), torch.tensor(1.0))
    assert not kept[~MASK].any()


def test_whitening_one_token_equal_values_or_nothing_is_finite_zero() -> None:
    one = torch.tensor([[True, False]])
    assert whiten(t([[3, 9]]), one).tolist() == [[0, 0]]
    assert whiten(t([[0.5, 0.5]]), one | True).tolist() == [[0, 0]]
    assert whiten(t([[3, 9]]), one & False).tolist() == [[0, 0]]


def whiten_half(rank: int) -> torch.Tensor:
    dist.init_process_group("gloo")
    return whiten(ADVANTAGES[rank : rank + 1], MASK[rank : rank + 1])


def test_two_ranks_whiten_like_one(tmp_path: Path) -> None:
    near(torch.cat(in_two_processes(tmp_path, whiten_half)), whiten(ADVANTAGES, MASK), atol=1e-12)


# --- another program's samples


def test_importance_weights_golden() -> None:
    """Trainer's over sampler's probability: 0.6/0.5, 0.2/0.4, 0.9/0.3 (at most 2), and what does not count."""
    logprobs = t([[0.6, 0.2, 0.9], [0.3, 0.5, 1]]).log()
    sampled = t([[0.5, 0.4, 0.3], [0.3, 0.1, 1]]).log()
    sampled[1, 1:], logprobs[1, 2] = t([NAN, INF]), -INF
    mask = torch.tensor([[True, True, True], [True, False, False]])
    near(truncated_importance_weights(logprobs, sampled, mask), [[1.2, 0.5, 2], [1, 1, 1]])
    near(truncated_importance_weights(logprobs, sampled, mask, cap=1.1), [[1.1, 0.5, 1.1], [1, 1, 1]])
    near(truncated_importance_weights(logprobs, sampled, mask, cap=0.4), [[0.4, 0.4, 0.4], [0.4, 1, 1]])


def test_importance_weights_make_a_mean_over_the_samplers_tokens_one_over_the_trainers() -> None:
    ours, theirs = t([0.5, 0.3, 0.2]), t([0.4, 0.35, 0.25])
    worth = t([1, -2, 4])
    weights = truncated_importance_weights(ours.log()[None], theirs.log()[None], torch.ones(1, 3).bool())[0]
    near((theirs * weights * worth).sum(), t([0.7])[0])  # 0.5 − 0.6 + 0.8


def test_importance_weights_have_no_gradient_and_no_overflow() -> None:
    logprobs = torch.tensor([[0.0, 0.0]], requires_grad=True)
    weights = truncated_importance_weights(logprobs, torch.tensor([[-9999.0, 9999.0]]), torch.ones(1, 2).bool())
    assert not weights.requires_grad
    assert weights.dtype == torch.float32
    assert weights.tolist() == [[2, 0]]


# --- policy loss


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "slope"),
    [
        (1, 0.5, -0.5, -0.5),
        (1, 0.8, -0.8, -0.8),
        (1, 1.1, -1.1, -1.1),
        (1, 1.2, -1.2, -1.2),
        (1, 1.5, -1.2, 0),
        (1, 4, -1.2, 0),
        (-1, 0.5, 0.8, 0),
        (-1, 0.8, 0.8, 0.8),
        (-1, 1.5, 1.5, 1.5),
        (-1, 4, 4, 4),
    ],
)
def test_clip_table(advantage: float, ratio: float, loss: float, slope: float) -> None:
    logprobs = t([[math.log(ratio)]]).requires_grad_()
    actual, _ = policy_loss(logprobs, t([[0]]), t([[advantage]]), torch.tensor([[True]]))
    actual.backward()
    near(actual.detach(), torch.tensor(loss))
    if abs(ratio - 1) != pytest.approx(0.2):  # on the very edge of the clip range there are two slopes
        near(logprobs.grad, [[slope]])


def test_dual_clip_bounds_the_loss_of_a_bad_token() -> None:
    logprobs = t([[4, 4, 1.5]]).log().requires_grad_()
    mask = torch.tensor([[True, True, True]])
    loss, stats = policy_loss(logprobs, t([[0, 0, 0]]), t([[-1, 1, -1]]), mask, dual_clip=3)
    loss.backward()
    near(loss.detach(), t([3 - 1.2 + 1.5]).sum() / 3)
    near(logprobs.grad, [[0, 0, 0.5]])
    assert stats["dual_clip_fraction"].item() == pytest.approx(1 / 3)


def test_the_first_update_has_ratio_one_and_loss_minus_the_mean_advantage() -> None:
    loss, stats = policy_loss(LOGPROBS, LOGPROBS, ADVANTAGES, MASK)
    near(loss, -ADVANTAGES[MASK].mean())
    assert {name: stats[name].item() for name in ("ratio", "approx_kl", "approx_kl_k3", "clip_fraction")} == {
        "ratio": 1,
        "approx_kl": 0,
        "approx_kl_k3": 0,
        "clip_fraction": 0,
    }


def test_policy_stats_are_true_means_over_counted_tokens() -> None:
    ratios = t([[2, 0.5, 1.1, 77]])
    mask = torch.tensor([[True, True, True, False]])
    _, stats = policy_loss(ratios.log(), t([[0, 0, 0, 0]]), t([[1, 1, 1, 1]]), mask)
    assert stats["ratio"].item() == pytest.approx(3.6 / 3)
    assert stats["clip_fraction"].item() == pytest.approx(1 / 3)  # at .5 the unclipped side is in force
    squares = [math.log(r) ** 2 / 2 for r in (2, 0.5, 1.1)]
    assert stats["approx_kl"].item() == pytest.approx(sum(squares) / 3)
    assert stats["approx_kl_k3"].item() == pytest.approx(sum(r - 1 - math.log(r) for r in (2, 0.5, 1.1)) / 3)
    assert not any(stat.requires_grad for stat in stats.values())


def test_the_token_mean_is_over_all_tokens_not_over_means_of_rows() -> None:
    # one token of loss +1 beside a row with four of −1: −.6, where a mean of means would say 0
    mask = torch.tensor([[True, False, False, False], [True] * 4])
    zeros = torch.zeros(2, 4, dtype=torch.float64)
    loss, _ = policy_loss(zeros, zeros, t([[-1, 5, 5, 5], [1, 1, 1, 1]]), mask)
    near(loss, torch.tensor(-0.6))


@pytest.mark.parametrize("log_ratio", [100.0, -100.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_extreme_log_ratios_stay_finite_in_float32(log_ratio: float, advantage: float) -> None:
    logprobs = torch.tensor([[log_ratio, 0.0]], requires_grad=True)
    mask = torch.tensor([[True, True]])
    loss, stats = policy_loss(logprobs, torch.zeros(1, 2), torch.full((1, 2), advantage), mask)
    loss.backward()
    assert loss.isfinite()
    assert logprobs.grad.isfinite().all()
    assert all(stat.isfinite() for stat in stats.values())


# --- value loss


@pytest.mark.parametrize(
    ("value", "loss", "slope"),
    [
        (0.5, 1.125, -1.5),
        (0.9, 0.605, -1.1),
        (1.0, 0.5, -1.0),
        (1.1, 0.405, -0.9),
        (1.3, 0.32, 0),
        (2.0, 0.32, 0),
        (2.5, 0.32, 0),
    ],
)
def test_value_clip_table(value: float, loss: float, slope: float) -> None:
    values = t([[value]]).requires_grad_()
    actual, stats = value_loss(values, t([[1]]), t([[2]]), torch.tensor([[True]]))
    actual.backward()
    near(actual.detach(), torch.tensor(loss))
    near(values.grad, [[slope]])
    assert stats["value_clip_fraction"].item() == (value > 1.2)


def test_an_infinite_value_clip_range_is_half_the_squared_error() -> None:
    loss, stats = value_loss(t([[5]]), t([[1]]), t([[2]]), torch.tensor([[True]]), clip_range=INF)
    near(loss, torch.tensor(4.5))
    assert stats["value_clip_fraction"].item() == 0


# --- both losses


def _policy_and_value(rows: slice, num_tokens: float | None = None, junk: float = 9.0, extra: int = 0) -> tuple:
    """Loss, gradients and stats of some rows of a ragged batch of eight, with `extra` columns of padding."""
    generator = torch.Generator().manual_seed(3)
    logprobs, old, advantages, values, returns = torch.randn(5, 8, 6, dtype=torch.float64, generator=generator)
    mask = torch.arange(6 + extra) < torch.tensor([[6], [1], [2], [5], [3], [1], [4], [6]])
    data = [
        torch.where(mask, torch.nn.functional.pad(x, (0, extra)), junk)[rows]
        for x in (logprobs, old, advantages, values, returns)
    ]
    data[0].requires_grad_()
    data[3].requires_grad_()
    p_loss, p_stats = policy_loss(*data[:3], mask[rows], num_tokens=num_tokens)
    v_loss, v_stats = value_loss(data[3], data[1], data[4], mask[rows], num_tokens=num_tokens)
    (p_loss + v_loss).backward()
    grads = torch.cat([data[0].grad[:, :6], data[3].grad[:, :6]], dim=1)
    return (p_loss + v_loss).detach(), grads, p_stats | v_stats


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_microbatches_add_up_to_the_whole_batch_in_loss_gradient_and_stats(size: int) -> None:
    whole_loss, whole_grads, whole_stats = _policy_and_value(slice(None))
    parts = [_policy_and_value(slice(i, i + size), num_tokens=torch.tensor(28.0)) for i in range(0, 8, size)]
    near(torch.stack([part[0] for part in parts]).sum(), whole_loss, atol=1e-12)
    near(torch.cat([part[1] for part in parts]), whole_grads, atol=1e-12)
    for name, stat in whole_stats.items():
        near(torch.stack([part[2][name] for part in parts]).sum(), stat, atol=1e-12)


@pytest.mark.parametrize("junk", [NAN, INF, -INF, 9e9])
def test_junk_and_more_padding_change_neither_loss_nor_gradient(junk: float) -> None:
    loss, grads, stats = _policy_and_value(slice(None))
    spoiled_loss, spoiled_grads, spoiled_stats = _policy_and_value(slice(None), junk=junk, extra=50)
    near(spoiled_loss, loss, atol=1e-12)
    near(spoiled_grads, grads, atol=1e-12)
    for name in stats:
        near(spoiled_stats[name], stats[name], atol=1e-12)


def test_a_batch_in_which_nothing_counts_has_loss_zero() -> None:
    x, mask = torch.full((2, 3), NAN, requires_grad=True), torch.zeros(2, 3, dtype=torch.bool)
    loss = policy_loss(x, x.detach(), x.detach(), mask)[0] + value_loss(x, x.detach(), x.detach(), mask)[0]
    loss.backward()
    assert loss.item() == 0
    assert x.grad.tolist() == [[0.0] * 3] * 2


def test_bfloat16_inputs_are_computed_in_float32() -> None:
    x, mask = torch.randn(2, 3).bfloat16(), torch.ones(2, 3, dtype=torch.bool)
    results = [token_rewards(x[:, 0], x, x, mask, 0.1), *gae(x, x, mask), whiten(x, mask)]
    results += [policy_loss(x, x, x, mask)[0], value_loss(x, x, x, mask)[0], kl_estimate(x, x, "k3")]
    assert {result.dtype for result in results} == {torch.float32}


# --- KL


def test_kl_estimators_by_enumeration() -> None:
    """Eight tokens, so that expectations are sums: means and gradients are exact."""
    logits = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    logits.requires_grad_()
    logp, ref = logits.log_softmax(dim=-1)
    p, q = logp.exp().detach(), ref.exp().detach()
    kl = (p * (logp - ref)).sum().detach()

    def mean(kind: str) -> Tensor:  # a sampled loss does not differentiate the sampling law: p is fixed
        return (p * kl_estimate(logp, ref.detach(), kind)).sum()

    def slope(x: Tensor) -> Tensor:
        return torch.autograd.grad(x, logits, retain_graph=True)[0][0]

    near(mean("k1").detach(), kl, atol=1e-12)
    near(mean("k3").detach(), kl, atol=1e-12)
    assert (kl_estimate(logp, ref, "k3") >= 0).all()
    near(slope(mean("k1")), torch.zeros(8), atol=1e-12)
    near(slope(mean("k2")), slope((logp.exp() * (logp - ref.detach())).sum()), atol=1e-12)
    near(slope(mean("k3")), slope((q * (ref.detach() - logp)).sum()), atol=1e-12)


def test_an_unknown_kl_estimator_is_named() -> None:
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(t([0]), t([0]), "k4")  # type: ignore[arg-type]


def test_adaptive_kl_golden() -> None:
    controller = AdaptiveKL(kl_coef=0.15, target=6, horizon=10_000)
    coefs = [controller.update(kl, num_episodes=512) for kl in (9, 3, 6, 60, 0)]
    assert coefs == pytest.approx([0.151536, 0.14998427, 0.14998427, 0.15152011, 0.14996854], abs=1e-8)
    assert controller.kl_coef == coefs[-1]
