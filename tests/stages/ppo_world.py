"""PPO in memory for its tests: tiny models, rollouts with known numbers, and one update of them."""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from stages_world import byte_tokenizer, tiny_policy
from torch import Tensor
from transformers import GPT2ForSequenceClassification, LlamaForSequenceClassification

from rlhf.data.collate import Blocks, pad_left
from rlhf.data.rows import Prompt
from rlhf.stages import adapters
from rlhf.stages.engines.choice import make_engine
from rlhf.stages.models import PolicyModel, ScalarModel, fresh_head, save_folder
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.layout import reads_without_padding
from rlhf.stages.ppo.reward_models import ModelReward
from rlhf.stages.ppo.rewards import Rewards
from rlhf.stages.ppo.rollout import Rollout, collect, response_values
from rlhf.stages.ppo.shaping import Targets
from rlhf.stages.ppo.train import train
from rlhf.stages.ppo.update import Updater
from rlhf.stages.reward.config import RewardSettings
from rlhf.stages.reward.train import train as train_reward
from rlhf.stages.runtime import Runtime
from rlhf.stages.settings_file import write_settings

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


def lora_reward(folder: Path, model: str, **fields: Any) -> str:
    """A reward model that was trained as an adapter of `model`, far enough to be told from it; its folder."""
    rows = [{"prompt": text, "chosen": text * 3, "rejected": text + "z"} for text in "abcdefghijkl"]
    folder.mkdir(parents=True)
    (folder / "rankings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = {
        "model": model, "data": str(folder / "rankings.jsonl"), "max_length": 32, "global_batch_size": 4,
        "num_epochs": 2, "learning_rate": 0.05, "eval_share": 0.3, "lora": {"r": 2, "alpha": 4}, "log_every": 1,
        "report_to": [], **fields,
    }  # fmt: skip
    write_settings(folder, RewardSettings.load(chosen, "reward"))
    train_reward(folder)
    return str(folder / "model")


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
    return collect(make_engine(policy), reader, ref, rewards, critic, prompts, asked, chosen, stops, byte_tokenizer())


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
        input_ids=ids, attention_mask=attention, mask=mask, logprobs=logprobs, sampled_logprobs=logprobs,
        ref_logprobs=ref_logprobs, entropy=entropy, values=values, scores=torch.arange(8.0),
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
                 ptx: Blocks | None = None) -> None:  # fmt: skip
        self.run = run
        self.policy, self.reference = tiny_policy(shape, dropout), tiny_policy(shape, dropout)
        self.critic = tiny_scalar(shape)
        reader: Any = PolicyModel(self.policy)
        torch.manual_seed(2)
        if run.settings.layout == "shared_trunk":  # the critic then only values the rollout
            reader.value_head = fresh_head(16)
        elif run.settings.layout == "adapters":
            self.policy = adapters.shared_copy(self.reference.requires_grad_(False))
            adapters.add_lora(self.policy, run.settings.lora)
            reader, self.critic = PolicyModel(self.policy), ScalarModel(adapters.classifier_on(self.reference)).eval()
            adapters.add_lora(self.critic.classifier, run.settings.lora)
        self.learners: list[Any] = [reader] if reader.value_head is not None else [reader, self.critic]
        if run.settings.packing:
            assert all(reads_without_padding(run, learner) for learner in self.learners)
        rates = (run.settings.learning_rate, run.settings.critic_learning_rate)
        self.optimizers = [
            torch.optim.SGD(model.parameters(), lr=rate)
            if sgd
            else torch.optim.AdamW(model.parameters(), lr=rate, eps=1e-5, weight_decay=0.0, fused=True)
            for model, rate in zip(self.learners, rates, strict=False)
        ]
        reader, *others = run.accelerator.prepare(*self.learners, *self.optimizers)
        critic = others.pop(0) if len(self.learners) == 2 else None
        self.updater = Updater(run, reader, critic, others, ptx)

    def rollout(self) -> Rollout:
        return make_rollout(self.policy, self.reference, self.critic, self.run.settings.temperature)

    def update(self, rollout: Rollout, targets: Targets | None = None, iteration: int = 0, kl_coef: float = 0.05
               ) -> dict[str, float]:  # fmt: skip
        return self.updater(rollout, targets or make_targets(rollout), iteration, kl_coef)

    def weights(self) -> Tensor:
        """Of all that learns, in one vector."""
        return torch.cat([flat(model) for model in self.learners])


def flat(model: torch.nn.Module) -> Tensor:
    """A copy of all weights in one vector."""
    return torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
