"""The mathematics of PPO for language models: tensors in, tensors out.

In the order of an iteration: which tokens count, what each is rewarded, how much better it was than
expected, and the two losses. Shapes: B responses of R token slots, padded on the right. `mask` is True
where a token counts; what lies in the other slots (padding, NaN, values after the end) never matters.
All arithmetic is in float32, or float64 where the inputs are.

Sources: Schulman et al. 2017 (PPO), Schulman et al. 2016 (GAE), Ziegler et al. 2019 (KL-shaped reward,
adaptive coefficient), Ye et al. 2020 (dual clip), http://joschu.net/blog/kl-approx.html (k1, k2, k3).
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from rlhf.data.collate import response_mask as response_mask
from rlhf.stages.watchdog import collective

Stats = dict[str, Tensor]

MAX_LOG_RATIO = 20.0  # e^20 is far outside every clip range, and still finite in float32


def token_rewards(
    scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, kl_coef: float | Tensor
) -> Tensor:
    """Reward of each token [B,R]: minus the KL penalty, plus the score [B] on the last counted token.

    `logprobs` are those of the policy that sampled. The penalty is k1, for which PPO's optimum is exactly
    the reference reweighted by exp(score / kl_coef); a row sums to score − kl_coef · Σ k1.
    """
    kl = _where(mask, kl_estimate(logprobs, ref_logprobs, "k1"))
    slots = torch.arange(mask.shape[-1], device=mask.device)
    last = torch.where(mask, slots, -1).amax(dim=-1, keepdim=True)  # −1 where nothing counts: no slot matches
    return torch.where(slots == last, _float(scores).unsqueeze(-1), 0.0) - kl_coef * kl


def gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, gae_lambda: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and the critic's targets, both [B,R] and 0 outside the mask.

    `values[:, t]` judges the state before token t. The state after the last counted token is worth 0.
    Tokens masked inside a response are skipped: their neighbours see each other as if they were cut out.
    """
    rewards, values = _where(mask, rewards), _where(mask, values)
    order = mask.int().argsort(dim=1, descending=True, stable=True)  # counted tokens first, in their order
    reward, value, counted = (x.gather(1, order) for x in (rewards, values, mask))
    next_value = torch.cat([value[:, 1:], torch.zeros_like(value[:, :1])], dim=1)
    deltas = torch.where(counted, reward + gamma * next_value - value, 0.0)
    advantages = torch.where(counted, discounted_sums(deltas, gamma * gae_lambda), 0.0)
    advantages = torch.zeros_like(values).scatter(1, order, advantages)
    return advantages, advantages + values


def discounted_sums(numbers: Tensor, factor: float, block: int = 256) -> Tensor:
    """Sums [B,R] of each number [B,R] and those after it, each times `factor` to the power of its distance.

    A block of columns at a time: a loop over single tokens would start thousands of kernels on a GPU.
    """
    exact = numbers.dtype if numbers.device.type == "mps" else torch.float64  # which mps lacks
    distance = torch.arange(block, device=numbers.device, dtype=exact)
    powers = torch.where(distance[:, None] >= distance, factor ** (distance[:, None] - distance).clamp(min=0), 0.0)
    after, found = numbers.new_zeros(len(numbers), 1, dtype=exact), []  # the sum of all that follows a block
    for part in reversed(numbers.to(exact).split(block, dim=1)):
        size = part.shape[1]
        sums = part @ powers[:size, :size] + after * factor ** (size - distance[:size])
        after = sums[:, :1]
        found.append(sums)
    return torch.cat(found[::-1], dim=1).to(numbers.dtype)


def whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale counted values to variance 1 and mean 0; `shift_mean=False` leaves the mean where it was.

    The moments are those of all ranks together when torch.distributed is initialised (every rank must
    call this, also with an empty mask). The variance is the biased one.
    """
    values = _where(mask, values)
    count = mask.sum().to(values.dtype)
    total, count = _sum_over_ranks(torch.stack([values.sum(), count]))
    mean = total / count.clamp(min=1)
    centred = _where(mask, values - mean)
    variance = _sum_over_ranks(centred.square().sum()) / count.clamp(min=1)
    whitened = centred / (variance + 1e-8).sqrt()
    return whitened if shift_mean else _where(mask, whitened + mean)


def update_log_ratio(logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """By how much the update has changed the log-probability of each counted token [B,R]; 0 elsewhere."""
    return _where(mask, _float(logprobs) - _float(old_logprobs)).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def truncated_importance_weights(logprobs: Tensor, sampled_logprobs: Tensor, mask: Tensor, cap: float = 2.0) -> Tensor:
    """What the policy's gradient at each token [B,R] is multiplied by when another program, or older weights, sampled
    it; no gradient.

    `sampled_logprobs` are those of the law that was sampled, `logprobs` those that the trainer gives the same weights.
    The two differ by rounding; min(e^(logprobs − sampled), `cap`) makes good for it on average, up to the cap, which
    bounds the variance (Yao et al. 2025, truncated importance sampling). 1 where the mask is False.
    """
    log_ratio = _where(mask, _float(logprobs) - _float(sampled_logprobs)).detach()
    return log_ratio.exp().clamp(max=cap).where(mask, 1.0)


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_range: float = 0.2,
    dual_clip: float | None = None,
    num_tokens: Tensor | float | None = None,
    denominator: Tensor | float | None = None,
) -> tuple[Tensor, Stats]:
    """Clipped policy loss: the mean over counted tokens of max(−ratio · A, −clip(ratio) · A).

    `dual_clip` (> 1) bounds the loss of a token with negative advantage at −dual_clip · A.
    `num_tokens` is the number of tokens in the whole optimiser step, over all microbatches and ranks;
    by default the mask's own. Given it, losses and stats of microbatches add up to those of the whole.
    `denominator` (see `loss_denominator`) makes the loss, not the stats, another mean than that over tokens.
    """
    advantages = _where(mask, advantages)
    log_ratio = update_log_ratio(logprobs, old_logprobs, mask)
    ratio = log_ratio.exp()
    unclipped = -ratio * advantages
    clipped = -ratio.clamp(1 - clip_range, 1 + clip_range) * advantages
    losses = torch.maximum(unclipped, clipped)

    shares = {"clip_fraction": clipped > unclipped}
    if dual_clip is not None:
        bound = -dual_clip * advantages
        shares["dual_clip_fraction"] = (advantages < 0) & (losses > bound)
        losses = torch.where(advantages < 0, torch.minimum(losses, bound), losses)

    loss = _token_mean(losses, mask, num_tokens if denominator is None else denominator)
    stats = {
        "policy_loss": loss,
        "ratio": _token_mean(ratio, mask, num_tokens),
        "approx_kl": _token_mean(log_ratio.square() / 2, mask, num_tokens),
        "approx_kl_k3": _token_mean(ratio - 1 - log_ratio, mask, num_tokens),
        **{name: _token_mean(share.to(losses.dtype), mask, num_tokens) for name, share in shares.items()},
    }
    return loss, {name: stat.detach() for name, stat in stats.items()}


def loss_denominator(
    mask: Tensor,
    aggregation: Literal["token_mean", "sequence_mean", "constant"],
    num_tokens: Tensor | float,
    num_rows: int,
    max_length: int,
) -> Tensor | float:
    """What the loss of a counted token is divided by, before all are added up: a number, or one per row [B,1].

    token_mean: `num_tokens`, so that each token weighs the same. sequence_mean: the row's length times
    `num_rows`, so that each response does (and a token of a long one less). constant: `num_rows` · `max_length`
    (Liu et al. 2025, Dr. GRPO). The counts are those of the whole optimiser step, over microbatches and ranks.
    """
    if aggregation == "token_mean":
        return num_tokens
    if aggregation == "sequence_mean":
        return mask.sum(dim=-1, keepdim=True).clamp(min=1) * num_rows
    return float(num_rows * max_length)


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int, penalty: float) -> Tensor:
    """What a response of `lengths` [B] tokens pays for coming near the limit (Yu et al. 2025, DAPO).

    Nothing up to max_length − buffer, `penalty` at max_length, in a straight line between.
    """
    if buffer == 0:
        return torch.zeros_like(lengths, dtype=torch.float32)
    return penalty * (lengths - (max_length - buffer)).clamp(min=0) / buffer


def after_the_end(mask: Tensor) -> Tensor:
    """`mask` [B,R] with one slot more in each row where there is room: where TRL and the N+ study put the score."""
    return mask | (torch.nn.functional.pad(mask[:, :-1], (1, 0)) & ~mask)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip_range: float = 0.2,
    num_tokens: Tensor | float | None = None,
) -> tuple[Tensor, Stats]:
    """Clipped value loss: the mean over counted tokens of ½ · max((V − R)², (V clipped − R)²).

    V clipped moves at most `clip_range` (inf: no clipping) from the value at the time of the rollout.
    `num_tokens` as in `policy_loss`.
    """
    values, old_values, returns = (_where(mask, x) for x in (values, old_values, returns))
    unclipped = (values - returns).square() / 2
    clipped = (old_values + (values - old_values).clamp(-clip_range, clip_range) - returns).square() / 2
    loss = _token_mean(torch.maximum(unclipped, clipped), mask, num_tokens)
    stats = {
        "value_loss": loss,
        "value_clip_fraction": _token_mean((clipped > unclipped).to(values.dtype), mask, num_tokens),
        "value_mean": _token_mean(values, mask, num_tokens),
        "return_mean": _token_mean(returns, mask, num_tokens),
    }
    return loss, {name: stat.detach() for name, stat in stats.items()}


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: Literal["k1", "k2", "k3"] = "k1") -> Tensor:
    """Per-token estimate [B,R] of KL(policy ‖ reference) from tokens that the policy sampled.

    k1 is unbiased and may be negative; k3 is unbiased and never negative; k2 is biased, but as a loss term
    it alone has the gradient of a token's KL given what came before (k1's is zero on average, k3's is that of
    the reversed KL). None of them, as a loss term, holds a token to account for the KL of those after it.
    """
    log_ratio = _float(logprobs) - _float(ref_logprobs)
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio.square() / 2
    if kind == "k3":
        log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)  # e^100 is infinite in float32
        return torch.expm1(-log_ratio) + log_ratio
    raise ValueError(f"kind is {kind!r}; the KL estimators are k1, k2 and k3")


@dataclass
class AdaptiveKL:
    """A `kl_coef` that steers the KL of a response (nats) towards a target. It is training state: save it."""

    kl_coef: float
    target: float  # nats per response
    horizon: float  # episodes in which the coefficient may change by a fifth

    def update(self, kl: float, num_episodes: int) -> float:
        """Call once per rollout with the mean KL of all ranks' responses; returns the new `kl_coef`."""
        error = min(max(kl / self.target - 1, -0.2), 0.2)
        self.kl_coef *= 1 + error * num_episodes / self.horizon
        return self.kl_coef


def _float(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _where(mask: Tensor, x: Tensor) -> Tensor:
    """x where it counts, else 0. Not x · mask: NaN · 0 is NaN."""
    return torch.where(mask, _float(x), 0.0)


def _token_mean(x: Tensor, mask: Tensor, num_tokens: Tensor | float | None) -> Tensor:
    if num_tokens is None:
        num_tokens = mask.sum().clamp(min=1)  # nothing counts: the sum is 0, and so is the mean
    return (_where(mask, x) / num_tokens).sum()


def _sum_over_ranks(x: Tensor) -> Tensor:
    if dist.is_available() and dist.is_initialized():
        with collective("sum"):
            dist.all_reduce(x)
    return x
