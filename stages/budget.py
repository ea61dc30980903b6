"""What each stage holds in memory and gets through, phase by phase, from its settings and the shapes of its models.

A phase's memory is what is there all the time (weights, AdamW's moments) and the most that its passes add, which
`footprint` traces. Texts are taken to be as long as the settings allow, and no answer to end early.

Here is what the stages share; what several processes change is in `budget_parallel`, sampling in `budget_sampling`,
pretrain, sft and reward in `budget_stages`, PPO in `budget_ppo`.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedConfig, PreTrainedModel

from rlhf.data.errors import RefusedError
from rlhf.stages.footprint import ATTENTION, Fused
from rlhf.stages.models import ScalarModel
from rlhf.stages.profile import Cost, cost_of
from rlhf.stages.settings import LoraSettings, why_uneven
from rlhf.stages.sharding import local

GIB = 2**30
KINDS = ("weights", "optimiser", "gradients", "activations", "cache", "logits")


@dataclass(frozen=True)
class Case:
    """Where a stage runs, and on what."""

    precision: str
    """bf16, fp16, tf32 or fp32: what is multiplied in."""
    is_gpu: bool
    num_processes: int
    config: PreTrainedConfig
    """Of the stage's model."""
    reward_config: PreTrainedConfig | None = None
    """Of PPO's reward model; None where there is none."""
    reward_lora: LoraSettings | None = None
    """Of the reward model where it is an adapter of ppo.model."""
    other_rewards: Sequence[PreTrainedConfig] = ()
    """Of the models in ppo.rewards."""
    num_rows: int | None = None
    """Rows to train on, if that is known."""
    num_answers: int = 2
    """Answers of a ranking."""
    layout: str = "ddp"
    """How several processes share the models: ddp, zero2 or fsdp2."""

    @property
    def half(self) -> bool:
        """Whether it is multiplied in 16 bits."""
        return self.precision in ("bf16", "fp16")

    @property
    def low(self) -> torch.dtype:
        """What models that are not trained are kept in, and sampling computes in."""
        return torch.bfloat16 if self.half else torch.float32

    @property
    def autocast(self) -> torch.autocast:
        """Traced on the CPU, whose autocast has bf16; fp16 takes as much memory."""
        return torch.autocast("cpu", torch.bfloat16, enabled=self.half)

    @property
    def num_bytes(self) -> int:
        """Of a number that is multiplied."""
        return 2 if self.half else 4

    @property
    def in_parts(self) -> bool:
        """Whether each process holds only a part of weights, gradients and moments."""
        return self.num_processes > 1 and self.layout != "ddp"

    def cost(self, model: PreTrainedModel) -> Cost:
        return cost_of(model, self.num_bytes)

    def share(self, name: str, size: int, each: int = 1, also: int = 1) -> int:
        """A process's part of a global batch. Raises RefusedError, as a stage does, where it is uneven. `each` and
        `also` as in `why_uneven`."""
        if problem := why_uneven(name, size, self.num_processes, each, also):
            raise RefusedError(problem)
        return size // self.num_processes


@dataclass
class Phase:
    """One phase of one process."""

    name: str
    gib: dict[str, float]
    """By kind."""
    times: float | None
    """How often the stage has it; None where that depends on rows which were not counted."""
    flops: float = 0.0
    num_bytes: float = 0.0
    """Read from memory by decoding."""
    passes: float = 0.0
    """Forward passes through a layer; a backward pass counts as two."""
    steps: float = 0.0
    """Layers times tokens that are decoded one after the other."""
    recorded: bool = False
    """Whether on a GPU what is launched for a token is recorded in CUDA graphs."""
    fused: Fused = None
    """What is compiled."""
    sent: float = 0.0
    """Bytes that each process sends to others."""
    hidden: float = 0.0
    """Share of the phase's own work that goes on meanwhile."""
    beside: bool = False
    """Whether it goes on while the stage's other phases have their turns."""

    @property
    def total(self) -> float:
        return sum(self.gib.values())


@dataclass
class Held:
    """What is there all the time, in bytes."""

    weights: float = 0.0
    gradients: float = 0.0
    """Of all weights that are trained; they are there in updates only."""
    moments: float = 0.0
    """AdamW's two, of the weights' own type."""
    seen: set[int] = field(default_factory=set)

    def add(self, *models: nn.Module) -> "Held":
        """Models; a tensor that several share counts once."""
        for model in models:
            for tensor in chain(model.parameters(), model.buffers()):
                if id(tensor) in self.seen:
                    continue
                self.seen.add(id(tensor))
                size = local(tensor).nbytes
                self.weights += size
                if tensor.requires_grad:
                    self.gradients += size
                    self.moments += 2 * size
        return self

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.moments


def held_by(named: Mapping[str, Sequence[nn.Module]]) -> dict[str, Held]:
    """What each of several roles holds; a tensor that they share belongs to the first of them."""
    seen: set[int] = set()
    return {name: Held(seen=seen).add(*models) for name, models in named.items()}


def causal(config: PreTrainedConfig, dtype: torch.dtype = torch.float32, attention: str = ATTENTION) -> PreTrainedModel:
    """A causal language model on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype, attn_implementation=attention)


def scalar_of(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> ScalarModel:
    """A reward model or critic on the meta device, its head in float32."""
    config = copy.deepcopy(config)
    config.num_labels, config.pad_token_id = 1, 0
    with torch.device("meta"):
        classifier = AutoModelForSequenceClassification.from_config(config, dtype=dtype, attn_implementation=ATTENTION)
    if dtype != torch.float32:
        classifier.score.float()
    return ScalarModel(classifier)


def ids_of(rows: int, length: int) -> Tensor:
    """Ids [rows,length], to be read where they have no contents."""
    return torch.zeros(rows, length, dtype=torch.long)


def lengths_of(rows: float, length: float) -> Tensor:
    """Of one batch, for what `Cost` counts."""
    return torch.full((max(round(rows), 1),), float(length), dtype=torch.float64)


def microbatches_of(settings: Any, share: int, tokens: float = 0.0, limit: float | None = None) -> tuple[int, int]:
    """(rows of a microbatch, microbatches of a step), of `share` rows of so many `tokens`, of which a microbatch has no
    more than the `limit`."""
    size = int(min(settings.microbatch_size or share, share, max((limit or math.inf) // max(tokens, 1), 1)))
    return size, math.ceil(share / size)


def num_layers(config: PreTrainedConfig) -> int:
    """Of a language model, whatever else belongs to it."""
    return int(config.get_text_config().num_hidden_layers)
