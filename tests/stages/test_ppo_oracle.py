"""PPO against a problem whose answer is known exactly, with no network in it.

The policy is a table: four tokens, two of them in a response, a score for each of the 16 responses. The
best policy for E[score] − β · KL is the reference reweighted by exp(score / β). To land there, the sign and
place of the KL penalty, advantages, whitening, ratio and both losses must all be right.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rlhf.stages.ppo.objective import gae, policy_loss, token_rewards, value_loss, whiten

V, BETA = 4, 0.5
ROLLOUTS, EPISODES, EPOCHS, MINIBATCHES = 60, 512, 4, 4
MASK = torch.ones(EPISODES, 2, dtype=torch.bool)


def response_logprobs(logits: Tensor) -> Tensor:
    """Log-probabilities [V,V] of responses; row 0 is for the first token, row 1 + a for the one after a."""
    logp = logits.log_softmax(dim=-1)
    return logp[0].unsqueeze(1) + logp[1:]


def distance_to_the_optimum(seed: int, rewards: Callable[..., Tensor] = token_rewards, whitened: bool = True) -> float:
    """Total variation between the policy that PPO ends with and the exact optimum."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(V, V, generator=generator)
    ref_logits = torch.randn(1 + V, V, generator=generator)
    optimum = (response_logprobs(ref_logits) + scores / BETA).flatten().softmax(dim=0).view(V, V)

    logits, critic = ref_logits.clone().requires_grad_(), torch.zeros(1 + V, requires_grad=True)
    optimizer = torch.optim.Adam([logits, critic], lr=0.05)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=ROLLOUTS)
    for _ in range(ROLLOUTS):
        with torch.no_grad():
            logp = logits.log_softmax(dim=-1)
            first = torch.multinomial(logp[0].exp(), EPISODES, replacement=True, generator=generator)
            second = torch.multinomial(logp[1 + first].exp(), 1, generator=generator).squeeze(1)
            states = torch.stack([torch.zeros_like(first), 1 + first], dim=1)  # [B,2], before each token
            tokens = torch.stack([first, second], dim=1)
            old_logprobs, old_values = logp[states, tokens], critic[states]
            ref_logprobs = ref_logits.log_softmax(dim=-1)[states, tokens]
            reward = rewards(scores[first, second], old_logprobs, ref_logprobs, MASK, BETA)
            advantages, returns = gae(reward, old_values, MASK)
            if whitened:
                advantages = whiten(advantages, MASK)
        for _ in range(EPOCHS):
            for rows in torch.randperm(EPISODES, generator=generator).chunk(MINIBATCHES):
                logprobs = logits.log_softmax(dim=-1)[states[rows], tokens[rows]]
                p_loss, _ = policy_loss(logprobs, old_logprobs[rows], advantages[rows], MASK[rows])
                v_loss, _ = value_loss(critic[states[rows]], old_values[rows], returns[rows], MASK[rows])
                optimizer.zero_grad()
                (p_loss + v_loss).backward()
                optimizer.step()
        scheduler.step()
    return (response_logprobs(logits.detach()).exp() - optimum).abs().sum().item() / 2


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("whitened", [True, False])
def test_ppo_finds_the_exact_optimum(seed: int, whitened: bool) -> None:
    assert distance_to_the_optimum(seed, whitened=whitened) < 0.01


def _wrong_sign(scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, beta: float) -> Tensor:
    return token_rewards(scores, logprobs, ref_logprobs, mask, -beta)


def _clamped_kl(scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, beta: float) -> Tensor:
    return token_rewards(scores, torch.maximum(logprobs, ref_logprobs), ref_logprobs, mask, beta)


@pytest.mark.parametrize("broken", [_wrong_sign, _clamped_kl])
def test_a_wrong_sign_or_a_clamped_kl_misses_it(broken: Callable[..., Tensor]) -> None:
    assert distance_to_the_optimum(0, broken) > 0.05
