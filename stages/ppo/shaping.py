"""From scores to what the update learns from: shaped scores, token rewards, advantages and returns."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rlhf.stages.microbatches import Piece
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.objective import (
    after_the_end,
    gae,
    overlong_penalty,
    token_rewards,
    truncated_importance_weights,
    whiten,
)
from rlhf.stages.ppo.rollout import Rollout
from rlhf.stages.runtime import Runtime


def shaped_scores(run: Runtime[PPOSettings], rollout: Rollout) -> Tensor:
    """Scores [B] normalised, clipped, and with the price of answers that never end or nearly did not."""
    settings = run.settings
    scores = rollout.scores
    if settings.normalise_scores:
        moments = run.state.setdefault("score_moments", {"count": 0.0, "sum": 0.0, "squares": 0.0})
        mean, std = update_moments(run, moments, scores)
        scores = (scores - mean) / std
    if settings.score_clip is not None:
        scores = scores.clamp(-settings.score_clip, settings.score_clip)
    if settings.missing_eos_penalty is not None:
        price = torch.full_like(scores, -settings.missing_eos_penalty)
        if settings.missing_eos == "subtract":
            price = scores + price
        scores = torch.where(rollout.ended, scores, price)
    return scores - overlong_penalty(
        rollout.lengths, settings.max_new_tokens, settings.overlong_buffer, settings.overlong_penalty
    )


def update_moments(run: Runtime[Any], moments: dict[str, float], scores: Tensor) -> tuple[float, float]:
    """Take the scores of all processes into the running sums; returns mean and standard deviation so far."""
    scores = scores.cpu().double()  # first: in float32 the squares of large, close scores are all alike
    sums = torch.stack([torch.ones_like(scores).sum(), scores.sum(), scores.square().sum()])
    for name, value in zip(("count", "sum", "squares"), run.sum(sums).tolist(), strict=True):
        moments[name] += value
    mean = moments["sum"] / moments["count"]
    variance = max(moments["squares"] / moments["count"] - mean**2, 0.0)
    return mean, max(variance**0.5, 1e-4)  # equal scores become 0, not infinite


@dataclass
class Targets:
    """What the update learns from."""

    advantages: Tensor  # [B,R]
    returns: Tensor  # [B,R]
    value_mask: Tensor  # [B,R]
    """Where the critic learns: the response, and with `score_placement: after_eos` one slot more."""

    def cut(self, piece: Piece) -> "Targets":
        """The piece's rows, without the columns that are padding in all of them."""
        return Targets(*(piece.of_response(x) for x in (self.advantages, self.returns, self.value_mask)))


def importance_weights(rollout: Rollout, settings: PPOSettings) -> Tensor | None:
    """Of each token [B,R], where something else than the policy of now sampled it; None where there are none."""
    cap = settings.rollout.importance_cap
    if cap is None or not settings.rollout.is_off_policy:
        return None
    return truncated_importance_weights(rollout.logprobs, rollout.sampled_logprobs, rollout.mask, cap)


def targets(rollout: Rollout, scores: Tensor, kl_coef: float, settings: PPOSettings) -> Targets:
    """Token rewards, and from them advantages and returns."""
    rewarded = rollout.mask
    if settings.score_placement == "after_eos":
        rewarded = after_the_end(rollout.mask)
    logprobs, ref_logprobs = (
        torch.where(rollout.mask, x, 0.0) for x in (rollout.logprobs, rollout.ref_logprobs)
    )  # no KL on a slot after the end
    rewards = token_rewards(scores, logprobs, ref_logprobs, rewarded, kl_coef if settings.kl_in == "reward" else 0.0)
    if settings.whiten_rewards:
        rewards = whiten(rewards, rewarded, shift_mean=False)
    advantages, returns = gae(rewards, rollout.values, rewarded, settings.gamma, settings.gae_lambda)
    if settings.critic_gae_lambda is not None:
        _, returns = gae(rewards, rollout.values, rewarded, settings.gamma, settings.critic_gae_lambda)
    advantages = torch.where(rollout.mask, advantages, 0.0)
    if settings.whiten_advantages:
        advantages = whiten(advantages, rollout.mask)
    if (weights := importance_weights(rollout, settings)) is not None:
        # Part of the policy's loss, which is linear in the advantages; the critic's targets stay as they are.
        advantages = advantages * weights
    return Targets(advantages, returns, rewarded)
