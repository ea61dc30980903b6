"""Memory and work of PPO; see `budget`."""

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from rlhf.stages import adapters
from rlhf.stages.budget import (
    Case,
    Held,
    Phase,
    causal,
    ids_of,
    lengths_of,
    microbatches_of,
    num_layers,
    phase_of,
    scalar_of,
)
from rlhf.stages.budget_sampling import decode, decoding, engine_of
from rlhf.stages.footprint import PADDED, Footprint, learn, traced
from rlhf.stages.models import PolicyModel, ScalarModel, fresh_head
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.layout import recompute_layers
from rlhf.stages.settings import LoraSettings


@dataclass
class Models:
    """The roles of PPO, as `layout.load_roles` makes them."""

    policy: PolicyModel
    reference: PolicyModel
    critic: ScalarModel | None
    rewards: list[ScalarModel]
    quantised: float
    """Bytes that the base does not take where it is quantised."""


def ppo(settings: PPOSettings, case: Case) -> list[Phase]:
    """One iteration: rollout, scoring, update."""
    num_prompt, num_new = settings.max_prompt_length, settings.max_new_tokens
    share = max(settings.rollout_batch_size // case.num_processes, 1)
    at_once = min(settings.generation_batch_size or share, share)
    read_at_once, _ = microbatches_of(settings, share)
    size, num = microbatches_of(settings, max(share // settings.num_minibatches, 1))
    configs = [case.config, *([case.reward_config] if case.reward_config is not None else [])]
    engine, compiled = engine_of(settings.rollout.engine, case), settings.compile and case.is_gpu

    def run(configs: Sequence[PreTrainedConfig], footprint: Footprint) -> None:
        models = models_of(settings, case, configs)
        with footprint.of(*all_models(models)):
            with torch.no_grad():
                decode(footprint, "rollout", engine, models.policy.model, case, num_prompt, num_new, at_once)
            with torch.no_grad(), case.autocast:
                _score(footprint, settings, models, read_at_once)
            _update(footprint, settings, case, models, size, num)

    moments = traced(configs, run, "layers" if compiled else None)
    with torch.device("meta"):
        models = models_of(settings, case, configs)
        learners = [models.policy, *([models.critic] if models.critic else [])]
        waiting = [models.reference, *models.rewards]
        held = Held().add(*learners)
        before = held.weights
        held.add(*waiting)
        held.weights += sum(_size_of(config) for config in case.other_rewards) - models.quantised
        away = held.weights - before if settings.offload else 0.0
        if settings.ema_decay is not None:  # in float32
            held.weights += 4 * sum(p.numel() for p in models.policy.parameters() if p.requires_grad)
        of_policy = case.cost(models.policy.model)
        of_critic = case.cost(models.critic.classifier) if models.critic else None
        readers = [case.cost(models.reference.model), *(case.cost(m.classifier) for m in models.rewards)]
    here, without = held, copy.copy(held)
    without.weights -= away
    prompts, responses = lengths_of(share, num_prompt), lengths_of(share, num_new)
    all_readers = [of_policy, *readers, *([of_critic] if of_critic else [])]
    layers = num_layers(case.config)
    rounds = math.ceil(share / at_once)
    of_rollout = {
        name: rounds * work for name, work in decoding(of_policy, num_prompt, num_new, at_once, layers, engine).items()
    }
    learning = [cost for cost in (of_policy, of_critic) if cost is not None]
    flops = sum(cost.learning(prompts, responses) for cost in learning)
    if settings.gradient_checkpointing:
        flops += sum(cost.reading(prompts, responses) for cost in learning)
    flops *= settings.num_epochs
    steps = settings.num_epochs * settings.num_minibatches
    if settings.ptx_data is not None:
        blocks = lengths_of(settings.ptx_batch_size / case.num_processes, settings.ptx_block_size)
        flops += steps * of_policy.learning(0 * blocks, blocks)
    scored = sum(cost.reading(prompts, responses) for cost in all_readers)
    pieces = math.ceil(share / read_at_once)
    times = settings.num_iterations
    return [
        phase_of(
            "rollout", without, case, moments, times, **{key: rounds * value for key, value in of_rollout.items()}
        ),
        phase_of("scoring", here, case, moments, times, flops=scored, passes=pieces * len(all_readers) * layers),
        phase_of(
            "update",
            without,
            case,
            moments,
            times,
            flops=flops,
            passes=3 * steps * num * len(learning) * layers,
            compiled=compiled,
        ),
    ]


def _score(footprint: Footprint, settings: PPOSettings, models: Models, rows: int) -> None:
    """What each model says of `rows` episodes."""
    ids = ids_of(rows, settings.max_prompt_length + settings.max_new_tokens)
    mask = torch.ones_like(ids).bool()
    footprint.at("scoring")
    models.policy(ids, mask, settings.max_new_tokens, settings.temperature, with_entropy=True)
    models.reference(ids, mask, settings.max_new_tokens, settings.temperature)
    for scalar in (*([models.critic] if models.critic else []), *models.rewards):
        scalar(ids, mask)
    footprint.at("")


def _update(footprint: Footprint, settings: PPOSettings, case: Case, models: Models, rows: int, num: int) -> None:
    """Microbatches of policy and critic in turn, and of raw text."""
    ids = ids_of(rows, settings.max_prompt_length + settings.max_new_tokens)
    mask, num_new = torch.ones_like(ids).bool(), settings.max_new_tokens

    def of_policy() -> Tensor:
        with case.autocast:
            found = models.policy(ids, mask, num_new, settings.temperature, with_entropy=settings.entropy_coef > 0)
        return torch.stack([numbers.sum() for numbers in found if numbers is not None]).sum()

    def of_critic() -> Tensor:
        assert models.critic is not None
        with case.autocast:
            return models.critic(ids[:, :-1], mask[:, :-1])[:, -num_new:].sum()

    def of_text() -> Tensor:
        size, _ = microbatches_of(settings, max(settings.ptx_batch_size // case.num_processes, 1))
        blocks = ids_of(size, settings.ptx_block_size + 1)
        with case.autocast:
            return models.policy(blocks, torch.ones_like(blocks).bool(), settings.ptx_block_size, 1.0)[0].sum()

    losses: dict[PreTrainedModel, Callable[[], Tensor]] = {models.policy.model: of_policy}
    if models.critic is not None:
        losses[models.critic.classifier] = of_critic
    learn(footprint, "update", losses, num)
    if settings.ptx_data is not None:
        learn(footprint, "update", {models.policy.model: of_text}, 1)


def all_models(models: Models) -> list[nn.Module]:
    return [models.policy, models.reference, *([models.critic] if models.critic else []), *models.rewards]


def models_of(settings: PPOSettings, case: Case, configs: Sequence[PreTrainedConfig]) -> Models:
    """As `layout.load_roles`, without contents. `configs` are the policy's and the reward model's."""
    config, *of_reward = configs
    models = (_on_one_base if settings.layout == "adapters" else _apart)(settings, case, config, of_reward)
    models.reference.requires_grad_(False)
    for model in all_models(models):
        model.eval()
    for scalar in models.rewards:
        scalar.requires_grad_(False)
    if settings.gradient_checkpointing:
        for learner in (models.policy, *([models.critic] if models.critic else [])):
            recompute_layers(learner)
    return models


def _apart(
    settings: PPOSettings, case: Case, config: PreTrainedConfig, of_reward: Sequence[PreTrainedConfig]
) -> Models:
    kept = torch.bfloat16 if settings.weights == "bf16" else torch.float32
    policy, reference = (PolicyModel(causal(config, PADDED, dtype)) for dtype in (kept, case.low))
    rewards = [scalar_of(one, case.low) for one in of_reward]
    if settings.layout == "shared_trunk":
        policy.value_head = fresh_head(config.get_text_config().hidden_size)
        return Models(policy, reference, None, rewards, 0.0)
    return Models(policy, reference, scalar_of(of_reward[0] if of_reward else config, kept), rewards, 0.0)


def _on_one_base(
    settings: PPOSettings, case: Case, config: PreTrainedConfig, of_reward: Sequence[PreTrainedConfig]
) -> Models:
    base = causal(config, PADDED, case.low).requires_grad_(False)
    quantised = bytes_saved(base, settings.quantization)
    policy = adapters.shared_copy(base)
    adapters.add_lora(policy, settings.lora)

    def on_base(lora: LoraSettings) -> ScalarModel:
        classifier = adapters.classifier_on(base)
        adapters.add_lora(classifier, lora)
        return ScalarModel(classifier)

    critic = on_base(case.reward_lora or settings.lora)
    rewards = [on_base(case.reward_lora)] if case.reward_lora else [scalar_of(one, case.low) for one in of_reward]
    return Models(PolicyModel(policy), PolicyModel(base), critic, rewards, quantised)


def bytes_saved(base: PreTrainedModel, quantization: str | None) -> float:
    """Bytes that linear layers do not take in 8 bits, or in 4 with a float32 scale for each 64 weights."""
    if quantization is None:
        return 0.0
    head = base.get_output_embeddings()
    size = 1.0 if quantization == "8bit" else 0.5 + 4 / 64
    linear = (m.weight for m in base.modules() if isinstance(m, nn.Linear) and m is not head)
    return sum(weight.numel() * (weight.element_size() - size) for weight in linear)


def _size_of(config: PreTrainedConfig) -> float:
    """Bytes of a sequence classifier in float32."""
    model = AutoModelForSequenceClassification.from_config(copy.deepcopy(config))
    return float(sum(parameter.nbytes for parameter in model.parameters()))


def is_adapter(reference: str) -> bool:
    """Whether a reward model's folder holds the adapter that it was merged from."""
    return (Path(reference) / "adapter").is_dir()
