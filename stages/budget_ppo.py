"""Memory and work of PPO; see `budget`."""

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from rlhf.stages import adapters
from rlhf.stages.budget import (
    GIB,
    Case,
    Held,
    Phase,
    causal,
    held_by,
    ids_of,
    lengths_of,
    microbatches_of,
    num_layers,
    scalar_of,
)
from rlhf.stages.budget_parallel import phase_of, reading, sampling, updating
from rlhf.stages.budget_sampling import decode, decoding, engine_of
from rlhf.stages.footprint import Footprint, Fused, learn, traced
from rlhf.stages.models import PolicyModel, ScalarModel, fresh_head
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.layout import Roles, recompute_layers
from rlhf.stages.profile import cache_bytes_per_token
from rlhf.stages.settings import LoraSettings


@dataclass
class Models:
    """The roles of PPO, as `layout.load_roles` makes them."""

    policy: PolicyModel
    reference: PolicyModel
    critic: ScalarModel | None
    rewards: list[ScalarModel]
    quantised: float = 0.0
    """Bytes that the base does not take where it is quantised."""

    @property
    def learners(self) -> list[PreTrainedModel]:
        return [self.policy.model, *([self.critic.classifier] if self.critic else [])]

    @property
    def readers(self) -> list[PreTrainedModel]:
        """All that read the finished answers."""
        return [*self.learners, self.reference.model, *(scalar.classifier for scalar in self.rewards)]


def memory(roles: Roles, settings: PPOSettings, num_rows: int) -> dict[str, float]:
    """GiB that each of a run's roles holds all the time, and of the cache of a process that samples `num_rows`.

    Weights, and for those that are trained gradients and AdamW's two moments. A tensor that several roles share counts
    where it is met first; what is offloaded, or on a second GPU, does not count.
    """
    policy, here = roles.policy, not settings.offload and settings.placement == "together"
    named: dict[str, nn.Module | None] = {
        "base" if settings.layout == "adapters" else "reference": roles.reference if here else None,
        "policy": policy, "critic": roles.critic, "reward models": roles.rewards if here else None,
    }  # fmt: skip
    held = held_by({name: [model] for name, model in named.items() if model is not None})
    found = {name: of_role.total for name, of_role in held.items() if of_role.total}
    if settings.ema_decay is not None:
        found["moving average"] = average_of(policy)
    if settings.rollout.engine != "vllm":
        length = settings.max_prompt_length + settings.max_new_tokens
        at_once = min(num_rows, settings.generation_batch_size or num_rows)
        num_bytes = roles.reference.model.dtype.itemsize
        found["rollout cache"] = at_once * length * cache_bytes_per_token(policy.model.config, num_bytes)
    return {name: size / GIB for name, size in found.items()}


def described(gib: Mapping[str, float]) -> str:
    """One line of what `memory` found."""
    parts = ", ".join(f"{name} {size:.2g}" for name, size in gib.items())
    return f"about {sum(gib.values()):.2g} GiB and the activations of a microbatch ({parts})"


def average_of(policy: nn.Module) -> float:
    """Bytes of the moving average, which is in float32."""
    return 4.0 * sum(p.numel() for p in policy.parameters() if p.requires_grad)


def ppo(settings: PPOSettings, case: Case) -> list[Phase]:
    """One iteration: rollout, scoring, update."""
    num_prompt, num_new = settings.max_prompt_length, settings.max_new_tokens
    num_minibatches = settings.num_minibatches
    of_minibatch = case.share(
        "ppo.rollout_batch_size / num_minibatches", settings.rollout_batch_size // num_minibatches, num_minibatches,
        settings.num_samples_per_prompt,
    )  # fmt: skip
    share = of_minibatch * num_minibatches
    at_once = min(settings.generation_batch_size or share, share)
    cut = num_prompt + num_new, settings.microbatch_tokens
    read_at_once, num_read = microbatches_of(settings, share, *cut)
    size, num = microbatches_of(settings, of_minibatch, *cut)
    ptx_size, num_ptx = _ptx_cut(settings, case)
    configs = [case.config, *([case.reward_config] if case.reward_config is not None else [])]
    engine = engine_of(settings.rollout.engine, case)
    fused: Fused = "layers" if settings.compile and case.is_gpu else None

    def run(configs: Sequence[PreTrainedConfig], footprint: Footprint) -> None:
        models = models_of(settings, case, configs)
        copies = [_sampler(configs[0], case)] if samples_ahead(settings) else []
        with footprint.of(*all_models(models), *copies):
            with torch.no_grad():
                sampler = copies[0] if copies else models.policy.model
                decode(footprint, "rollout", engine, sampler, case, num_prompt, num_new, at_once)
            with torch.no_grad(), case.autocast:
                _score(footprint, settings, models, read_at_once)
            _update(footprint, settings, case, models, size, num, ptx_size)

    moments = traced(configs, run, fused, settings.gradient_checkpointing)
    with torch.device("meta"):
        models = models_of(settings, case, configs)
    learners: list[nn.Module] = [models.policy, *([models.critic] if models.critic else [])]
    parts = held_by({"learning": learners, "waiting": [models.reference, *models.rewards]})
    held, waiting = parts["learning"], parts["waiting"].weights
    waiting += sum(_size_of(config, case) for config in case.other_rewards) - models.quantised
    together = settings.placement == "together"  # else what only reads has another GPU
    readers = models.readers if together else models.learners
    held.weights += waiting * together
    if settings.ema_decay is not None:
        held.weights += average_of(models.policy)
    without = copy.copy(held)
    without.weights -= waiting * settings.offload
    of_sampling, sampling_case = without, case
    if samples_ahead(settings):
        of_sampling, sampling_case = _ahead(settings, case, held, waiting), replace(case, num_processes=1)

    prompts, responses = lengths_of(share, num_prompt), lengths_of(share, num_new)
    layers, times = num_layers(case.config), settings.num_iterations
    learning = [case.cost(model) for model in models.learners]
    steps = settings.num_epochs * num_minibatches
    flops = sum(cost.learning(prompts, responses) for cost in learning)
    if settings.gradient_checkpointing:
        flops += sum(cost.reading(prompts, responses) for cost in learning)
    flops *= settings.num_epochs
    if num_ptx:
        blocks = lengths_of(_ptx_share(settings, case), settings.ptx_block_size)
        flops += steps * learning[0].learning(0 * blocks, blocks)
    rounds = math.ceil(share / at_once)
    of_rollout = decoding(learning[0], num_prompt, num_new, at_once, layers, engine)
    of_readers = [case.cost(model).reading(prompts, responses) for model in models.readers]
    first = len(of_readers) if together else len(models.learners)
    on_devices = of_readers[:first], of_readers[first:]
    return [
        phase_of(
            "rollout", of_sampling, sampling_case, moments, times, sampling(models.policy.model, case, engine),
            **{name: rounds * work for name, work in of_rollout.items()}, beside=settings.rollout.one_step_off,
            fused=fused, recorded=engine == "static",
        ),
        phase_of(
            "scoring", held, case, moments, times, reading(readers, case, num_read),
            flops=max(map(sum, on_devices)), passes=num_read * max(map(len, on_devices)) * layers, fused=fused,
        ),
        phase_of(
            "update", without, case, moments, times,
            updating(models.learners, case, steps, num + num_ptx, others=readers[len(models.learners) :]),
            flops=flops, passes=3 * steps * (num * len(learning) + num_ptx) * layers, fused=fused,
        ),
    ]  # fmt: skip


def samples_ahead(settings: PPOSettings) -> bool:
    """Whether a copy of the policy samples while the rest goes on."""
    return settings.rollout.one_step_off and settings.rollout.engine != "vllm"


def notes(settings: PPOSettings) -> list[str]:
    """What the phases do not tell."""
    found, second = [], settings.placement == "second_gpu"
    if samples_ahead(settings):
        where = "on the second GPU of each process" if second else "beside the others in the same memory"
        found.append(f"rollout is sampled {where} during scoring and update; an iteration takes as long as the longer")
    if second:
        found.append("left out: what reference and reward models make while they read, on the second GPU")
    if settings.rollout.engine == "vllm":
        found.append("left out: the server's memory and sampling, and the way of the weights to it")
    return found


def _sampler(config: PreTrainedConfig, case: Case) -> PreTrainedModel:
    """The copy that samples ahead."""
    return causal(config, case.low).requires_grad_(False).eval()


def _ahead(settings: PPOSettings, case: Case, held: Held, waiting: float) -> Held:
    """What is there where the copy samples, all of it whole: the models that only read, or on a CPU everything."""
    found = Held(weights=waiting) if settings.placement == "second_gpu" else copy.copy(held)
    with torch.device("meta"):
        return found.add(_sampler(case.config, case))


def _ptx_share(settings: PPOSettings, case: Case) -> int:
    """Blocks of raw text that a process reads in an optimiser step."""
    return case.share("ppo.ptx_batch_size", settings.ptx_batch_size)


def _ptx_cut(settings: PPOSettings, case: Case) -> tuple[int, int]:
    """(blocks of raw text that are read together, microbatches of a step)."""
    if settings.ptx_data is None:
        return 0, 0
    return microbatches_of(
        settings, _ptx_share(settings, case), settings.ptx_block_size + 1, settings.microbatch_tokens
    )


def _score(footprint: Footprint, settings: PPOSettings, models: Models, rows: int) -> None:
    """What each model says of `rows` episodes."""
    ids = ids_of(rows, settings.max_prompt_length + settings.max_new_tokens)
    mask = torch.ones_like(ids).bool()
    footprint.at("scoring")
    models.policy(ids, mask, settings.max_new_tokens, settings.temperature, with_entropy=True)
    models.reference(ids, mask, settings.max_new_tokens, settings.temperature)
    for scalar in (*([models.critic] if models.critic else []), *models.rewards):
        scalar(ids, mask)
    footprint.at()


def _update(
    footprint: Footprint, settings: PPOSettings, case: Case, models: Models, rows: int, num: int, ptx_rows: int
) -> None:
    """Microbatches of policy and critic in turn, and of `ptx_rows` blocks of raw text."""
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
        blocks = ids_of(ptx_rows, settings.ptx_block_size + 1)
        with case.autocast:
            return models.policy(blocks, torch.ones_like(blocks).bool(), settings.ptx_block_size, 1.0)[0].sum()

    losses: dict[PreTrainedModel, Callable[[], Tensor]] = {models.policy.model: of_policy}
    if models.critic is not None:
        losses[models.critic.classifier] = of_critic
    learn(footprint, "update", losses, num)
    if ptx_rows:
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
    policy, reference = (PolicyModel(causal(config, dtype)) for dtype in (kept, case.low))
    rewards = [scalar_of(one, case.low) for one in of_reward]
    if settings.layout == "shared_trunk":
        policy.value_head = fresh_head(config.get_text_config().hidden_size)
        return Models(policy, reference, None, rewards)
    return Models(policy, reference, scalar_of(of_reward[0] if of_reward else config, kept), rewards)


def _on_one_base(
    settings: PPOSettings, case: Case, config: PreTrainedConfig, of_reward: Sequence[PreTrainedConfig]
) -> Models:
    base = causal(config, case.low).requires_grad_(False)
    quantised = bytes_saved(base, settings.quantization)

    def a_base() -> PreTrainedModel:
        """One for all roles; in parts, one for each."""
        return causal(config, case.low).requires_grad_(False) if case.in_parts else base

    policy = adapters.shared_copy(a_base())
    adapters.add_lora(policy, settings.lora)

    def on_base(lora: LoraSettings) -> ScalarModel:
        classifier = adapters.classifier_on(a_base())
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


def _size_of(config: PreTrainedConfig, case: Case) -> float:
    """Bytes of a sequence classifier: an encoder in float32, a decoder in the autocast type but for its head."""
    with torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(copy.deepcopy(config), dtype=torch.float32)
    if isinstance(getattr(model, "score", None), nn.Linear):  # as `reward_models` tells them apart
        model.base_model.to(case.low)
    return float(sum(parameter.nbytes for parameter in model.parameters()))


def is_adapter(reference: str) -> bool:
    """Whether a reward model's folder holds the adapter that it was merged from."""
    return (Path(reference) / "adapter" / adapters.HEAD).is_file()
