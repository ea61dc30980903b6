"""PPO in memory for its tests: tiny models, rollouts with known numbers, and one update of them."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from stages_world import byte_tokenizer, tiny_policy
from torch import Tensor
from transformers import GPT2ForSequenceClassification, LlamaForSequenceClassification

from rlhf.data.collate import pad_left
from rlhf.data.rows import Prompt
from rlhf.stages.artifact import write_settings
from rlhf.stages.models import PolicyModel, ScalarModel, save_folder
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.reward_models import ModelReward
from rlhf.stages.ppo.rewards import Rewards
from rlhf.stages.ppo.rollout import Rollout, collect, response_values
from rlhf.stages.ppo.shaping import Targets
from rlhf.stages.ppo.train import train
from rlhf.stages.ppo.update import Updater
from rlhf.stages.runtime import Runtime

EOS = 0  # also the pad id
LENGTHS = (6, 1, 2, 5, 3, 1, 4, 6)
"""Of the responses of `make_rollout`; the first has no eos, the last has it in the last slot."""
PROMPTS = [[7, 8, 9, 10, 11], [12], [13, 0, 14], [15, 16], [17, 18, 19, 20], [21], [22, 23], [24, 25, 26]]
"""Of unlike lengths; one contains the pad id."""

SMALL: dict[str, Any] = {
    "num_iterations": 4, "rollout_batch_size": 8, "num_epochs": 2, "num_minibatches": 2, "max_prompt_length": 16,
    "max_new_tokens": 6, "temperature": 0.7, "learning_rate": 1e-2, "critic_learning_rate": 1e-2, "eval_every": 2,
    "save_every": 2, "log_every": 1,
}  # fmt: skip


def tiny_scalar(shape: str = "llama", seed: int = 1) -> ScalarModel:
    config = copy.deepcopy(tiny_policy(shape).config)
    config.num_labels, config.pad_token_id = 1, EOS
    torch.manual_seed(seed)
    kind: Any = LlamaForSequenceClassification if shape == "llama" else GPT2ForSequenceClassification
    return ScalarModel(kind(config)).eval()


def model_folders(root: Path, tokenizer: Any) -> dict[str, str]:
    """A policy, a reward model and prompts on disk, as settings name them."""
    save_folder(root / "policy", tiny_policy(), tokenizer)
    save_folder(root / "reward", tiny_scalar(), tokenizer)
    for name, texts in (("prompts", "abcdefghijkl"), ("held_out", "mnop")):
        lines = [json.dumps({"prompt": text * (1 + i % 4)}) + "\n" for i, text in enumerate(texts)]
        (root / f"{name}.jsonl").write_text("".join(lines))
    return {
        "model": str(root / "policy"), "reward_model": str(root / "reward"), "data": str(root / "prompts.jsonl"),
        "eval_data": str(root / "held_out.jsonl"),
    }  # fmt: skip


def settings(**fields: Any) -> PPOSettings:
    return PPOSettings.load({"data": "unused.jsonl", **SMALL, **fields}, "ppo")


def run_ppo(folder: Path, given: dict[str, str], **fields: Any) -> dict[str, Any]:
    """The whole stage, in about half a second."""
    write_settings(folder, settings(**given, **fields))
    return train(folder)


def roll(policy: Any, reference: Any, critic: ScalarModel, chosen: PPOSettings, stops: list[int] | None = None,
         prompts: list[list[int]] | None = None) -> Rollout:  # fmt: skip
    """What `collect` makes of the policy; the critic is the reward model too."""
    reader, ref = PolicyModel(policy), PolicyModel(reference)
    rewards = Rewards([ModelReward("reward_model", copy.deepcopy(critic))])  # it freezes its models
    prompts = prompts or PROMPTS
    stops = [EOS] if stops is None else stops
    asked = [Prompt([{"role": "user", "content": "unread"}], {})] * len(prompts)  # its model reads ids
    return collect(reader, ref, rewards, critic, prompts, asked, chosen, stops, byte_tokenizer())


@torch.no_grad()
def make_rollout(policy: Any, reference: Any, critic: ScalarModel, temperature: float = 0.7) -> Rollout:
    """Eight episodes of LENGTHS with random tokens, scored 0 … 7."""
    generator = torch.Generator().manual_seed(5)
    length = max(LENGTHS)
    mask = torch.arange(length) < torch.tensor(LENGTHS)[:, None]
    responses = torch.randint(1, 260, mask.shape, generator=generator)
    last = torch.tensor(LENGTHS) - 1
    responses[torch.arange(1, 8), last[1:]] = EOS
    responses = torch.where(mask, responses, EOS)
    prompt_ids, prompt_mask = pad_left(PROMPTS, EOS)
    ids, attention = torch.cat([prompt_ids, responses], 1), torch.cat([prompt_mask, mask], 1)
    logprobs, entropy, _ = PolicyModel(policy)(ids, attention, length, temperature, with_entropy=True)
    assert entropy is not None
    ref_logprobs, _, _ = PolicyModel(reference)(ids, attention, length, temperature)
    values = response_values(critic, ids, attention, length)
    return Rollout(
        input_ids=ids, attention_mask=attention, mask=mask, logprobs=logprobs, ref_logprobs=ref_logprobs,
        entropy=entropy, values=values, scores=torch.arange(8.0),
        reward_scores=torch.arange(8.0)[:, None], ended=torch.arange(8) > 0,
    )  # fmt: skip


def make_targets(rollout: Rollout, scale: float = 1.0) -> Targets:
    """Random advantages and returns on the rollout's tokens."""
    generator = torch.Generator().manual_seed(6)
    advantages, returns = torch.randn(2, *rollout.mask.shape, generator=generator)
    advantages, returns = (torch.where(rollout.mask, x, 0.0) for x in (advantages * scale, returns))
    return Targets(advantages, returns, rollout.mask)


class World:
    """A policy, its reference and a critic, with an updater that has just started."""

    def __init__(self, run: Runtime[PPOSettings], shape: str = "llama", sgd: bool = False, dropout: float = 0.0,
                 ptx: Tensor | None = None) -> None:  # fmt: skip
        self.run = run
        self.policy, self.reference = tiny_policy(shape, dropout), tiny_policy(shape, dropout)
        self.critic = tiny_scalar(shape)
        reader: Any = PolicyModel(self.policy)
        critic: Any = self.critic
        rates = (run.settings.learning_rate, run.settings.critic_learning_rate)
        self.optimizers = [
            torch.optim.SGD(model.parameters(), lr=rate)
            if sgd
            else torch.optim.AdamW(model.parameters(), lr=rate, eps=1e-5, weight_decay=0.0)
            for model, rate in zip((reader, critic), rates, strict=True)
        ]
        reader, critic, *optimizers = run.accelerator.prepare(reader, critic, *self.optimizers)
        self.updater = Updater(run, reader, critic, optimizers, ptx)

    def rollout(self) -> Rollout:
        return make_rollout(self.policy, self.reference, self.critic, self.run.settings.temperature)

    def update(self, rollout: Rollout, targets: Targets | None = None, iteration: int = 0, kl_coef: float = 0.05
               ) -> dict[str, float]:  # fmt: skip
        return self.updater(rollout, targets or make_targets(rollout), iteration, kl_coef)

    def weights(self) -> Tensor:
        """Policy and critic, in one vector."""
        return torch.cat([flat(self.policy), flat(self.critic)])


def flat(model: torch.nn.Module) -> Tensor:
    """A copy of all weights in one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
