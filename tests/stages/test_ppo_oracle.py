"""PPO against a problem whose answer is known exactly, with no network in it.

The policy is a table: four tokens, two of them in a response, a score for each of the 16 responses. The
best policy for E[score] − β · KL is the reference reweighted by exp(score / β). To land there, the sign and
place of the KL penalty, advantages, whitening, ratio and both losses must all be right.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from ppo_world import settings
from torch import Tensor

from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.objective import kl_estimate, loss_denominator, policy_loss, value_loss
from rlhf.stages.ppo.rollout import Rollout
from rlhf.stages.ppo.shaping import Targets, targets

V, BETA = 4, 0.5
EPISODES = 512
MASK = torch.ones(EPISODES, 2, dtype=torch.bool)

TABLE: dict[str, Any] = {
    "num_iterations": 60, "rollout_batch_size": EPISODES, "num_epochs": 4, "num_minibatches": 2, "kl_coef": BETA,
    "max_new_tokens": 3, "learning_rate": 0.05,
}  # fmt: skip

_generator = torch.Generator().manual_seed(0)
_first, _second, _scores = (torch.randn(n, V, generator=_generator, dtype=torch.float64) for n in (1, V, V))
REF_LOGPROBS = torch.cat([_first, _second]).log_softmax(dim=-1).float()  # [1+V,V], a row for each state (see `joint`)
SCORES = _scores.float()  # [V,V]


def joint(logprobs: Tensor) -> Tensor:
    """Log-probabilities [V,V] of responses; row 0 is for the first token, row 1 + a for the one after a."""
    return logprobs[0].unsqueeze(1) + logprobs[1:]


OPTIMUM = (joint(REF_LOGPROBS) + SCORES / BETA).flatten().softmax(dim=0).view(V, V)


def near_sighted() -> Tensor:
    """Where each token is reweighted by exp(E[score] / β) as if no KL came after it [V,V]."""
    second = (REF_LOGPROBS[1:] + SCORES / BETA).softmax(dim=-1)
    first = (REF_LOGPROBS[0] + (second * SCORES).sum(dim=-1) / BETA).softmax(dim=-1)
    return first.unsqueeze(1) * second


def total_variation(ours: Tensor, theirs: Tensor) -> float:
    return (ours - theirs).abs().sum().item() / 2


Shaping = Callable[[Rollout, PPOSettings], Targets]


def rightly(rollout: Rollout, chosen: PPOSettings) -> Targets:
    return targets(rollout, rollout.scores, chosen.kl_coef, chosen)


def learn(seed: int, shaping: Shaping = rightly, kl_estimator: str | None = None, **fields: Any) -> Tensor:
    """Probabilities [V,V] of the responses under the policy that PPO ends with, from the reference on.

    The estimator is no setting here since k1 in the loss is refused.
    """
    chosen = settings(**{**TABLE, **fields})
    generator = torch.Generator().manual_seed(seed)
    logits, critic = REF_LOGPROBS.clone().requires_grad_(), torch.zeros(1 + V, requires_grad=True)
    optimizer = torch.optim.Adam([logits, critic], lr=chosen.learning_rate, fused=True)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=chosen.num_iterations)
    for _ in range(chosen.num_iterations):
        rollout, states = sample(logits.detach().log_softmax(dim=-1), critic.detach(), generator)
        learned = shaping(rollout, chosen)
        for _ in range(chosen.num_epochs):
            for rows in torch.randperm(EPISODES, generator=generator).chunk(chosen.num_minibatches):
                mask, num_tokens = MASK[rows], MASK[rows].sum()
                logprobs = logits.log_softmax(dim=-1)[states[rows], rollout.input_ids[rows]]
                denominator = loss_denominator(mask, chosen.aggregation, num_tokens, len(rows), chosen.max_new_tokens)
                loss, _ = policy_loss(
                    logprobs, rollout.logprobs[rows], learned.advantages[rows], mask, chosen.clip_range,
                    num_tokens=num_tokens, denominator=denominator,
                )  # fmt: skip
                if chosen.kl_in == "loss":
                    kl = kl_estimate(logprobs, rollout.ref_logprobs[rows], kl_estimator)  # type: ignore[arg-type]
                    loss = loss + chosen.kl_coef * (kl / denominator).sum()
                v_loss, _ = value_loss(critic[states[rows]], rollout.values[rows], learned.returns[rows], mask)
                optimizer.zero_grad()
                (loss + v_loss).backward()
                optimizer.step()
        scheduler.step()
    return joint(logits.detach().log_softmax(dim=-1)).exp()


def sample(logprobs: Tensor, critic: Tensor, generator: torch.Generator) -> tuple[Rollout, Tensor]:
    """Responses without a prompt, and the states [B,2] before each token."""
    first = torch.multinomial(logprobs[0].exp(), EPISODES, replacement=True, generator=generator)
    second = torch.multinomial(logprobs[1 + first].exp(), 1, generator=generator).squeeze(1)
    tokens, states = torch.stack([first, second], dim=1), torch.stack([torch.zeros_like(first), 1 + first], dim=1)
    scores = SCORES[first, second]
    rollout = Rollout(
        input_ids=tokens, attention_mask=MASK, mask=MASK, logprobs=logprobs[states, tokens],
        sampled_logprobs=logprobs[states, tokens],
        ref_logprobs=REF_LOGPROBS[states, tokens], entropy=torch.zeros(EPISODES, 2), values=critic[states],
        scores=scores, reward_scores=scores.unsqueeze(1), ended=MASK[:, 0],
    )  # fmt: skip
    return rollout, states


def test_the_optimum_is_as_far_from_the_reference_as_the_specification_says() -> None:
    kl = (OPTIMUM * (OPTIMUM.log() - joint(REF_LOGPROBS))).sum().item()
    assert kl == pytest.approx(0.5836075, abs=1e-5)


@pytest.mark.parametrize(("seed", "fields"), [
    (0, {}),
    (1, {}),
    (0, {"whiten_advantages": False}),
    (1, {"whiten_advantages": False, "whiten_rewards": True}),
    (0, {"aggregation": "sequence_mean"}),
    (1, {"aggregation": "constant"}),
], ids=str)  # fmt: skip
def test_kl_in_the_reward_finds_the_exact_optimum(seed: int, fields: dict[str, Any]) -> None:
    assert total_variation(learn(seed, **fields), OPTIMUM) < 0.01


def wrong_sign(rollout: Rollout, chosen: PPOSettings) -> Targets:
    return targets(rollout, rollout.scores, -chosen.kl_coef, chosen)


def clamped(rollout: Rollout, chosen: PPOSettings) -> Targets:
    """As if max(k1, 0) were the penalty."""
    return rightly(replace(rollout, logprobs=torch.maximum(rollout.logprobs, rollout.ref_logprobs)), chosen)


@pytest.mark.parametrize(("broken", "miss"), [(wrong_sign, 0.81), (clamped, 0.41)])
def test_a_wrong_sign_or_a_clamped_kl_in_the_reward_misses_it(broken: Shaping, miss: float) -> None:
    distance = total_variation(learn(0, broken, whiten_advantages=False), OPTIMUM)
    assert distance == pytest.approx(miss, abs=0.02)


# Without whitening below: it would bring the advantages to another scale than the KL beside them.
KL_IN_LOSS: dict[str, Any] = {"kl_in": "loss", "whiten_advantages": False}


@pytest.mark.parametrize(("kind", "miss"), [("k1", 0.80), ("k2", 0.06), ("k3", 0.13)])
def test_kl_in_the_loss_misses_it_and_by_k1_holds_nothing_back(kind: str, miss: float) -> None:
    distance = total_variation(learn(0, kl_estimator=kind, **KL_IN_LOSS), OPTIMUM)
    assert distance == pytest.approx(miss, abs=0.02)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_k2_in_the_loss_of_fresh_episodes_is_blind_to_the_kl_of_later_tokens_and_to_that_alone(
    aggregation: str,
) -> None:
    once: dict[str, Any] = {"num_epochs": 1, "num_minibatches": 1, "num_iterations": 300, "learning_rate": 0.1}
    found = learn(0, kl_estimator="k2", aggregation=aggregation, **KL_IN_LOSS, **once)
    assert total_variation(found, near_sighted()) < 0.02
    assert total_variation(near_sighted(), OPTIMUM) == pytest.approx(0.0624, abs=1e-4)
