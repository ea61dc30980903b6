"""The roles of PPO (policy, reference, critic, reward models) and what of them is in memory: the three layouts.

separate       four models; the critic starts as the reward model
shared_trunk   policy and critic are one model, with a value head in float32 on the policy's last hidden states
adapters       one frozen base; policy and critic are LoRA adapters on it, the reference is the base itself, and a
               reward model that was trained as an adapter of this base is one more
"""

import logging
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import BitsAndBytesConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf.data.errors import RefusedError
from rlhf.stages import adapters
from rlhf.stages.artifact import model_digest
from rlhf.stages.disk import copy_folder
from rlhf.stages.models import (
    PolicyModel,
    ScalarModel,
    compile_layers,
    fresh_head,
    load_policy,
    load_scalar,
    save_folder,
)
from rlhf.stages.optimizers import trained
from rlhf.stages.packing import packs_here, reads_packs
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.placement import scorers_device
from rlhf.stages.ppo.reward_models import ModelReward, PairReward
from rlhf.stages.ppo.rewards import Rewards, load_rewards
from rlhf.stages.runtime import Runtime
from rlhf.stages.sharding import gathered, later


@dataclass
class Roles:
    """Who is who, on the run's device and in eval mode: dropout would make the scored law differ from the sampled."""

    policy: PolicyModel
    reference: PolicyModel
    critic: ScalarModel | None  # None where the policy reads the values
    rewards: Rewards

    def named(self) -> list[tuple[str, nn.Module]]:
        """All models, with a name for each."""
        found: list[tuple[str, nn.Module]] = [("policy", self.policy), ("reference", self.reference)]
        if self.critic is not None:
            found.append(("critic", self.critic))
        for model in self.rewards.models:
            if isinstance(model, ModelReward):
                found.append((model.name, model.scalar))
            elif isinstance(model, PairReward):
                found.append((model.name, model.classifier))
        return found

    def optimizers(self, settings: PPOSettings) -> list[torch.optim.Optimizer]:
        """One for the policy, and one for the critic where there is one."""
        learners = [[(self.policy.model, settings.learning_rate)]]
        if self.policy.value_head is not None:
            learners[0].append((self.policy.value_head, settings.critic_learning_rate))
        if self.critic is not None:
            learners.append([(self.critic, settings.critic_learning_rate)])
        return [ppo_adamw(models) for models in learners]


def ppo_adamw(models: list[tuple[nn.Module, float]]) -> torch.optim.AdamW:
    """AdamW over the trained weights of `models`, each with its peak learning rate; eps as in Huang et al. 2024."""
    groups: list[dict[str, Any]] = [
        {"params": list(trained(model).values()), "lr": rate, "peak": rate} for model, rate in models
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0, fused=True)


def prepare(run: Runtime[PPOSettings], roles: Roles) -> tuple[Any, ...]:
    """(policy, critic or None, optimisers) as accelerate wraps them for the run's processes."""
    optimizers = roles.optimizers(run.settings)
    if roles.critic is None:
        policy, *optimizers = run.accelerator.prepare(roles.policy, *optimizers)
        return policy, None, *optimizers
    return tuple(run.accelerator.prepare(roles.policy, roles.critic, *optimizers))


def load_roles(run: Runtime[PPOSettings], tokenizer: PreTrainedTokenizerBase) -> Roles:
    """The models that the settings name, in their layout. Raises RefusedError for what cannot be used."""
    settings, there = run.settings, scorers_device(run)
    roles = _on_one_base(run, tokenizer) if settings.layout == "adapters" else _apart(run, tokenizer)
    roles.reference.requires_grad_(False)
    padded = []
    for name, member in roles.named():
        learns = member in (roles.policy, roles.critic)
        if learns or settings.placement == "together":
            run.spread(member.eval())  # before the next one comes to the device
        else:
            member.to(there).eval()
        with gathered(member):
            if isinstance(member, PolicyModel | ScalarModel) and not reads_without_padding(run, member):
                padded.append(name)
    if settings.packing and padded:
        run.say(
            f"ppo.packing has no effect on {', '.join(padded)}: the model, or its attention on this device, does not "
            "keep texts apart"
        )
    if settings.compile and run.device.type == "cuda":
        # All of them: compiled layers round less, and policy and reference are compared.
        for decoder in (roles.policy.model, roles.reference.model, *_classifiers(roles)):
            compile_layers(decoder)
        roles.policy.compiled = roles.reference.compiled = True
    for model in (roles.policy, roles.critic):
        if model is not None and settings.gradient_checkpointing:
            recompute_layers(model)
    if settings.offload:
        for frozen in (roles.reference, roles.rewards):
            frozen.to("cpu")
    return roles


def reads_without_padding(run: Runtime[PPOSettings], reader: PolicyModel | ScalarModel) -> bool:
    """Let a decoder on the run's device read packed texts if it can; whether it does."""
    model = reader.model if isinstance(reader, PolicyModel) else reader.classifier
    here = packs_here(run.settings.packing, run.device, run.accelerator.mixed_precision)
    reader.packed = here and reads_packs(model, run.accelerator.autocast())
    return reader.packed


def _apart(run: Runtime[PPOSettings], tokenizer: PreTrainedTokenizerBase) -> Roles:
    """separate and shared_trunk."""
    settings = run.settings
    assert settings.model is not None
    frozen = run.low_precision or torch.float32
    if settings.weights == "bf16" and frozen != torch.bfloat16:
        raise RefusedError("ppo.weights: bf16 needs precision bf16, which this device does not have; leave it out")
    kept = torch.bfloat16 if settings.weights == "bf16" else torch.float32
    learner_spreads = run.sharding is not None
    frozen_spreads = learner_spreads and settings.placement == "together"
    policy = PolicyModel(load_policy(settings.model, tokenizer, kept, learner_spreads))
    reference = PolicyModel(load_policy(settings.model, tokenizer, frozen, frozen_spreads))
    rewards = load_rewards(settings, tokenizer, policy.model)
    _keep_in(frozen, rewards, frozen_spreads)
    if settings.layout == "shared_trunk":
        policy.value_head = fresh_head(policy.model.config.get_text_config().hidden_size)
        return Roles(policy, reference, None, rewards)
    if (start := rewards.critic_start) is None:
        run.say("no reward model reads the policy's tokens: the critic starts as ppo.model with a new head")
    critic = load_scalar(start or settings.model, tokenizer, start is None, learner_spreads)
    _bring_to(kept, critic, learner_spreads)
    return Roles(policy, reference, critic, rewards)


def _on_one_base(run: Runtime[PPOSettings], tokenizer: PreTrainedTokenizerBase) -> Roles:
    """adapters."""
    settings = run.settings
    assert settings.model is not None
    dtype = run.low_precision or torch.float32
    spread = run.sharding is not None

    def load() -> PreTrainedModel:
        found = load_policy(
            str(settings.model), tokenizer, dtype, spread, **_quantized(settings, dtype, run.device)
        ).requires_grad_(False)
        for module in found.modules():
            # On some CPUs bitsandbytes would repack weights in eval mode, after which no gradient passes through them.
            if hasattr(module, "support_avx512bf16_for_cpu"):
                module.support_avx512bf16_for_cpu = False
        return found if spread else found.to(run.device)

    base = load()

    def a_base() -> PreTrainedModel:
        """To be shared by all roles; or one for each, of which this process will have a part: a tree is cut whole."""
        return load() if spread else base

    policy = adapters.shared_copy(a_base())
    adapters.add_lora(policy, settings.lora)
    of_reward = on_base = None
    if settings.reward_model is not None:
        of_reward = adapters.adapter_of(settings.reward_model, model_digest(settings.model, "ppo.model"))
    if of_reward is not None:
        on_base = adapters.load_scalar_on(a_base(), of_reward)
        critic = adapters.load_scalar_on(a_base(), of_reward)
    else:
        run.say(
            "no reward model is an adapter of ppo.model (train one with reward.lora): reward models are loaded whole, "
            "and the critic starts as ppo.model with a new head"
        )
        classifier = adapters.classifier_on(a_base())
        adapters.add_lora(classifier, settings.lora)
        critic = ScalarModel(classifier)
    rewards = load_rewards(settings, tokenizer, base, on_base)
    _keep_in(dtype, rewards, spread, but=on_base)
    return Roles(PolicyModel(policy), PolicyModel(base), critic, rewards)


def _classifiers(roles: Roles) -> list[PreTrainedModel]:
    """Those of critic and reward models that read the policy's ids."""
    scalars = [model.scalar for model in roles.rewards.models if isinstance(model, ModelReward) and not model.tokenizer]
    return [scalar.classifier for scalar in [*scalars, *([roles.critic] if roles.critic else [])]]


def _keep_in(dtype: torch.dtype, rewards: Rewards, spread: bool, but: ScalarModel | None = None) -> None:
    """Reward models in `dtype`."""
    for model in rewards.models:
        if isinstance(model, ModelReward) and model.scalar is not but:
            _bring_to(dtype, model.scalar, spread)


def _bring_to(dtype: torch.dtype, scalar: ScalarModel, spread: bool) -> None:
    """All but its head, which stays in float32: now, or when it is `spread`."""
    if spread:
        later(scalar.classifier.base_model, dtype)
    else:
        scalar.classifier.base_model.to(dtype)


def _quantized(settings: PPOSettings, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Arguments of `from_pretrained` for a base in 8 or 4 bits."""
    if settings.quantization is None:
        return {}
    settings.refuse_missing_bitsandbytes()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it would say at every 8-bit product that it rounds
    # Its threshold for outliers would let a row's numbers depend on the other rows of the batch.
    config = (
        BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
        if settings.quantization == "8bit"
        else BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)
    )
    return {"quantization_config": config, "device_map": {"": device}}


def recompute_layers(model: nn.Module) -> None:
    """Gradient checkpointing of every layer of a model that stays in eval mode.

    transformers' own recomputes only what is in train mode, where layers of some models (OPT) also drop out. Without
    gradients, as in a rollout, layers run as ever, with their cache.
    """
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False)


def keep_policy(folder: Path, policy: PolicyModel, settings: PPOSettings, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the policy to `folder`/model while it is trained; of `layout: adapters` the adapter alone. A value head
    goes beside it, to `folder`/critic: it is of no use to another trunk."""
    shutil.rmtree(folder, ignore_errors=True)
    if settings.layout == "adapters":
        adapters.save_adapter(folder / "model", policy.model)
    else:
        save_folder(folder / "model", policy.model, tokenizer)
    if policy.value_head is not None:
        adapters.save_head(folder / "critic", policy.value_head)


def put_in_place(kept: Path, model: Path, settings: PPOSettings, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make `model`, which loads anywhere, of a kept policy: an adapter is merged, in float32, and lies beside."""
    assert settings.model is not None
    if settings.layout == "adapters":
        save_folder(model, adapters.merged(load_policy(settings.model, tokenizer), kept / "model"), tokenizer)
        shutil.copytree(kept / "model", model / "adapter")
    else:
        copy_folder(kept / "model", model)


def save_critic(
    folder: Path, critic: ScalarModel | None, kept: Path, settings: PPOSettings, tokenizer: PreTrainedTokenizerBase
) -> None:
    """A sequence classifier, or an adapter with its head, as the last iteration left it; or the kept policy's head."""
    assert settings.model is not None
    if critic is None:
        copy_folder(kept / "critic", folder)
    elif settings.layout == "adapters":
        adapters.save_scalar(folder, critic, model_digest(settings.model, "ppo.model"))
    else:
        save_folder(folder, critic, tokenizer)
