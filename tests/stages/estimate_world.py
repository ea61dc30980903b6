"""Shapes, settings and requests that the tests of estimates share."""

from typing import Any

from transformers import LlamaConfig

from rlhf.stages.budget import Case
from rlhf.stages.budget_recipe import Request
from rlhf.stages.footprint import Moments
from rlhf.stages.ppo.config import PPOSettings

SMALL: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def shape(num_layers: int = 3) -> LlamaConfig:
    return LlamaConfig(**SMALL, num_hidden_layers=num_layers)


def ppo_settings(**fields: Any) -> PPOSettings:
    given = {"data": "x", "rollout_batch_size": 8, "max_prompt_length": 32, "max_new_tokens": 32}
    return PPOSettings.load({**given, **fields}, "ppo")


def case(precision: str = "fp32", num_processes: int = 1, layout: str = "ddp") -> Case:
    return Case(precision, precision != "fp32", num_processes, shape(), shape(), layout=layout)


def most(moments: Moments) -> float:
    return max(sum(kinds.values()) for kinds in moments.values())


def request(**stages: Any) -> Request:
    return Request(stages, {}, "h100")


PRETRAIN = {
    "data": "x", "vocab_size": 300, "hidden_size": 32, "num_layers": 3, "num_heads": 2, "context_length": 96,
    "global_batch_size": 4, "num_steps": 7,
}  # fmt: skip
SFT, REWARD = {"data": "x", "max_length": 64, "global_batch_size": 4}, {"data": "x", "max_length": 64}
PPO = {"data": "x", "rollout_batch_size": 8, "max_prompt_length": 32, "max_new_tokens": 16}
