"""Memory and work of pretraining, SFT and the reward model; see `budget`."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

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
    scalar_of,
)
from rlhf.stages.budget_parallel import phase_of, sampling, updating
from rlhf.stages.budget_sampling import decoding, engine_of, sampled
from rlhf.stages.footprint import ATTENTION, PADDED, Footprint, Fused, learn, traced
from rlhf.stages.head_loss import head_loss
from rlhf.stages.models import PolicyModel, ScalarModel
from rlhf.stages.packing import read
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.pretrain.train import make_optimizers
from rlhf.stages.reward.answers import AT_ONCE as SAMPLED_AT_ONCE
from rlhf.stages.reward.config import RewardSettings
from rlhf.stages.sft.config import SFTSettings
from rlhf.stages.text_limits import num_positions

Texts = SFTSettings | RewardSettings


def _packs(settings: Texts, case: Case) -> bool:
    """Whether texts are put into one row, by default on a GPU in 16 bits."""
    return (case.is_gpu and case.half) if settings.packing is None else settings.packing


def _steps(settings: Texts, case: Case) -> tuple[int, int | None]:
    """(rows that a process has in a step, steps; None where rows were not counted)."""
    size = settings.global_batch_size
    share = case.share(f"{settings.stage}.global_batch_size", size)
    if case.num_rows is None:
        return share, None
    size = min(size, case.num_rows)
    return max(size // case.num_processes, 1), math.ceil(settings.num_epochs * case.num_rows / size)


def pretrain(settings: PretrainSettings, case: Case) -> list[Phase]:
    """One step of training; evaluations take less."""
    length = settings.block_size or min(settings.context_length, num_positions(case.config))
    name, rows, each = settings.global_batch(length)
    share = case.share(f"pretrain.{name}", rows, each)
    size, num = microbatches_of(settings, share)
    compiled = settings.compile and case.is_gpu
    whole = compiled and not case.in_parts  # sharded, its layers alone are compiled
    attention = ATTENTION if settings.attend_across_documents else PADDED

    def run(configs: Sequence[PreTrainedConfig], footprint: Footprint) -> None:
        model = causal(configs[0], attention=attention).train()
        if settings.gradient_checkpointing:
            model.activation_checkpointing_enable()
        with footprint.of(model):
            blocks = ids_of(size, length + 1)
            learn(footprint, "update", {model: lambda: _next_token_loss(model, blocks, case, whole)}, num)
            if settings.optimizer == "muon":
                muon = make_optimizers(model, settings)[1]
                footprint.at("update, step")
                muon.step()

    fused: Fused = "whole" if whole else "layers" if compiled else None
    moments = traced([case.config], run, fused, settings.gradient_checkpointing)
    with torch.device("meta"):
        model = causal(case.config)
        held = Held().add(model)
        if settings.optimizer == "muon":  # which keeps one number per weight, and makes it in its first step
            held.moments = 8 * sum(p.numel() for group in make_optimizers(model, settings)[0].param_groups
                                   for p in group["params"])  # fmt: skip
        cost = case.cost(model)
    texts = lengths_of(share, length)
    flops = cost.learning(torch.zeros_like(texts), texts)
    flops += settings.gradient_checkpointing * cost.reading(texts, torch.zeros_like(texts))
    return [
        phase_of(
            "update", held, case, moments, settings.num_steps, updating([model], case, num=num), flops=flops,
            passes=3 * num * num_layers(case.config), fused=fused,
        )
    ]  # fmt: skip


def _next_token_loss(model: PreTrainedModel, blocks: Tensor, case: Case, compiled: bool) -> Tensor:
    """As `NextTokenLoss`, which tries on numbers whether a model's logits are made straight from its states."""
    with case.autocast, torch.compiler.set_stance("force_eager"):
        hidden, targets = read(model, blocks[:, :-1]), blocks[:, 1:].flatten()
        return head_loss(hidden.flatten(0, 1), model.get_output_embeddings().weight, targets, compiled)[0]


def sft(settings: SFTSettings, case: Case) -> list[Phase]:
    """One step of training."""
    share, times = _steps(settings, case)
    compiled = settings.compile and case.is_gpu
    packed = _packs(settings, case)
    size, num = microbatches_of(settings, share, settings.max_length, settings.microbatch_tokens)
    recompute = settings.args.get("activation_checkpointing") or settings.args.get("gradient_checkpointing")

    def build(config: PreTrainedConfig) -> PreTrainedModel:
        model = causal(config).train()
        if settings.lora is not None:
            model.requires_grad_(False)
            adapters.add_lora(model, settings.lora)
        return model

    def run(configs: Sequence[PreTrainedConfig], footprint: Footprint) -> None:
        model = build(configs[0])
        if recompute:
            model.activation_checkpointing_enable()

        def loss() -> Tensor:
            ids = ids_of(1, size * settings.max_length) if packed else ids_of(size, settings.max_length)
            with case.autocast, torch.compiler.set_stance("force_eager"):
                hidden, head = read(model, ids).flatten(0, 1), model.get_output_embeddings().weight
                return head_loss(hidden, head, ids.flatten(), compiled, with_hits=True)[0]

        with footprint.of(model):
            learn(footprint, "update", {model: loss}, num)

    fused: Fused = "all" if compiled else None
    moments = traced([case.config], run, fused, bool(recompute))
    with torch.device("meta"):
        model = build(case.config)
        held, cost = Held().add(model), case.cost(model)
    texts = lengths_of(share, settings.max_length)
    flops = cost.learning(torch.zeros_like(texts), texts) + bool(recompute) * cost.reading(texts, 0 * texts)
    return [
        phase_of(
            "update", held, case, moments, times, updating([model], case, num=num), flops=flops,
            passes=3 * num * num_layers(case.config), fused=fused,
        )
    ]  # fmt: skip


def reward(settings: RewardSettings, case: Case) -> list[Phase]:
    """The sampling of answers, if there is one, and one step of training."""
    share, times = _steps(settings, case)
    answers = case.num_answers + settings.num_sampled_answers
    packed = _packs(settings, case)
    size, num = microbatches_of(settings, share, settings.max_length * answers, settings.microbatch_tokens)
    fused: Fused = "layers" if settings.compile and case.is_gpu else None

    def build(config: PreTrainedConfig) -> ScalarModel:
        model = scalar_of(config)
        if settings.lora is not None:
            model.requires_grad_(False)
            adapters.add_lora(model.classifier, settings.lora)
        return model.train()

    def head_of(config: PreTrainedConfig) -> PolicyModel:
        return PolicyModel(causal(config)).requires_grad_(False)

    def run(configs: Sequence[PreTrainedConfig], footprint: Footprint) -> None:
        model = build(configs[0])
        lm_head = head_of(configs[0]) if settings.lm_coef else None

        def loss() -> Tensor:
            rows = (1, size * answers * settings.max_length) if packed else (size * answers, settings.max_length)
            ids = ids_of(*rows)
            with case.autocast:
                values, hidden = model(ids, torch.ones_like(ids).bool(), with_hidden=True)
            if lm_head is None:
                return values.sum()
            best = hidden.flatten(0, 1)[: size * settings.max_length]
            return values.sum() + lm_head.read(best, ids.flatten()[: len(best)], 1.0, with_entropy=False)[0].sum()

        with footprint.of(model, *([lm_head] if lm_head else [])):
            learn(footprint, "update", {model.classifier: loss}, num)

    moments = traced([case.config], run, fused)
    with torch.device("meta"):
        model = build(case.config)
        held, cost = Held().add(model), case.cost(model.classifier)
        if settings.lm_coef:
            head = head_of(case.config).model.get_output_embeddings().weight
            held.weights += head.nbytes
    texts = lengths_of(share * answers, settings.max_length)
    flops = cost.learning(texts, 0 * texts)
    layers = num_layers(case.config)
    update = phase_of(
        "update", held, case, moments, times, updating([model.classifier], case, num=num), flops=flops,
        passes=3 * num * layers, fused=fused,
    )  # fmt: skip
    if not settings.num_sampled_answers or settings.answers_from is not None:
        return [update]
    room = settings.max_length - settings.max_new_tokens
    of_samples = sampled(case, room, settings.max_new_tokens, SAMPLED_AT_ONCE)
    batches = None if case.num_rows is None else math.ceil(
        case.num_rows * settings.num_sampled_answers / case.num_processes / SAMPLED_AT_ONCE
    )  # fmt: skip
    with torch.device("meta"):
        policy = causal(case.config).requires_grad_(False)
        held, cost = Held().add(policy), case.cost(policy)
    engine = engine_of("auto", case)
    work = decoding(cost, room, settings.max_new_tokens, SAMPLED_AT_ONCE, layers, engine)
    exchange = sampling(policy, case, engine)
    recorded = engine == "static"
    return [phase_of("sampling", held, case, of_samples, batches, exchange, **work, recorded=recorded), update]
