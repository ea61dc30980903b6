"""What the phases of an iteration get through, and the least that they have to read and to calculate for it."""

import torch

from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.layout import Roles
from rlhf.stages.ppo.reward_models import ModelReward
from rlhf.stages.ppo.rollout import Rollout
from rlhf.stages.profile import cost_of
from rlhf.stages.runtime import Runtime


class Work:
    """Tells the run's clock of phases about each iteration.

    Of rewards those are counted that read the policy's ids, and not what is given text. What a server or another GPU
    reads, is not read from this device's memory; and a rollout that was sampled ahead does not tell how fast.
    """

    def __init__(self, run: Runtime[PPOSettings], roles: Roles) -> None:
        self.run = run
        half = run.precision in ("bf16", "fp16") or roles.policy.model.dtype == torch.bfloat16
        num_bytes = 2 if half else 4
        self.policy = cost_of(roles.policy.model, num_bytes)
        self.critic = None if roles.critic is None else cost_of(roles.critic.classifier, num_bytes)
        others = []
        if run.settings.placement == "together":
            others.append(roles.reference.model)
            others += [
                reward.scalar.classifier
                for reward in roles.rewards.models
                if isinstance(reward, ModelReward) and reward.tokenizer is None
            ]
        self.readers = [self.policy, *(cost_of(model, num_bytes) for model in others)]
        if self.critic is not None:
            self.readers.append(self.critic)

    def count(self, rollout: Rollout, num_updates: float, policy_learns: bool) -> None:
        """One iteration, of whose optimiser steps `num_updates` were made."""
        run, settings = self.run, self.run.settings
        prompts, responses = (lengths.cpu().double() for lengths in (rollout.prompt_lengths, rollout.lengths))  # [B]
        texts = float((prompts + responses).sum())
        countable = settings.quantization is None  # packed weights do not tell how many there are
        here = settings.rollout.engine != "vllm"
        num_bytes = here * self.policy.decoding(prompts, responses)
        if not settings.rollout.one_step_off:
            run.phases.count("rollout", float(responses.sum()), num_bytes=num_bytes)
        flops = sum(cost.reading(prompts, responses) for cost in self.readers)
        run.phases.count("scoring", texts, flops=countable * flops)
        epochs = num_updates / settings.num_minibatches
        learners = [cost for cost in (self.policy if policy_learns else None, self.critic) if cost is not None]
        flops = epochs * sum(cost.learning(prompts, responses) for cost in learners)
        if policy_learns and settings.ptx_data is not None:
            flops += num_updates * self._ptx()
        run.phases.count("update", epochs * texts, flops=countable * flops)

    def _ptx(self) -> float:
        """Operations of an optimiser step on raw text."""
        settings = self.run.settings
        blocks = torch.full((settings.ptx_batch_size,), settings.ptx_block_size, dtype=torch.float64)
        return self.policy.learning(torch.zeros_like(blocks), blocks) / self.run.num_processes
