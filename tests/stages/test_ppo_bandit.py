"""PPO on a problem whose best answer is plain: the score is the share of one token in the response."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ppo_world import PROMPTS, model_folders, roll, settings, tiny_scalar
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf.stages.models import PolicyModel
from rlhf.stages.optimizers import set_learning_rate
from rlhf.stages.ppo.objective import kl_estimate
from rlhf.stages.ppo.shaping import shaped_scores, targets
from rlhf.stages.ppo.train import schedule
from rlhf.stages.ppo.update import Updater
from rlhf.stages.runtime import Runtime

A = 5
"""The token that pays."""


def small_policy() -> Any:
    """Thirty-two tokens, near uniform."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.1, bos_token_id=None, eos_token_id=0,
        pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def learn(folder: Path, given: dict[str, str], **fields: Any) -> list[tuple[float, float]]:
    """Score and KL (by k3, which has little noise near 0) of each iteration's rollout."""
    chosen = settings(
        **given, rollout_batch_size=64, num_minibatches=2, num_epochs=4, temperature=1.0, gae_lambda=0.95, **fields
    )
    run = Runtime(chosen, folder)
    policy, reference, critic = small_policy(), small_policy(), tiny_scalar()
    torch.nn.init.zeros_(critic.classifier.score.weight)
    reader = PolicyModel(policy)
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
        for model in (reader, critic)
    ]
    update = Updater(run, reader, critic, run.accelerator.prepare(*optimizers), None)
    run.seed(per_process=True)
    history = []
    for iteration in range(chosen.num_iterations):
        rate = schedule(iteration, chosen)
        set_learning_rate(optimizers[0], chosen.learning_rate * rate)
        set_learning_rate(optimizers[1], chosen.critic_learning_rate * rate)
        rollout = roll(policy, reference, critic, chosen, prompts=PROMPTS * 8)
        hits = rollout.mask & (rollout.responses == A)
        rollout.scores = hits.sum(-1) / rollout.lengths
        learned = targets(rollout, shaped_scores(run, rollout), chosen.kl_coef, chosen)
        update(rollout, learned, iteration, chosen.kl_coef)
        kl = torch.where(rollout.mask, kl_estimate(rollout.logprobs, rollout.ref_logprobs, "k3"), 0.0).sum(-1)
        history.append((rollout.scores.mean().item(), kl.mean().item()))
    run.close()
    return history


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, str]:
    return model_folders(tmp_path_factory.mktemp("models"), tokenizer)


def test_without_a_kl_penalty_the_policy_finds_the_token_that_pays(given: dict[str, str], tmp_path: Path) -> None:
    scores = [score for score, _ in learn(tmp_path, given, kl_coef=0.0, num_iterations=20, learning_rate=2e-2)]
    quarters = [sum(scores[i : i + 5]) / 5 for i in range(0, 20, 5)]
    assert scores[0] < 0.1
    assert quarters[3] > 0.5
    assert quarters[0] < quarters[1] < quarters[2]


def test_with_a_large_kl_coef_the_policy_stays_at_the_reference(given: dict[str, str], tmp_path: Path) -> None:
    history = learn(tmp_path, given, kl_coef=10.0, num_iterations=8, learning_rate=1e-3)
    assert sum(kl for _, kl in history[-3:]) / 3 < 0.04  # it would be 0.14
    assert history[-1][0] < 0.1
