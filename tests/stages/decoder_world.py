"""Tiny models of our own decoder for its tests."""

import itertools
from typing import Any

import pytest
import torch

from rlhf.stages.decoder import DecoderConfig, DecoderForCausalLM

LLAMA = {"norm_position": "pre", "norm": "rmsnorm", "feed_forward": "swiglu", "positions": "rope"}
GPT = {"norm_position": "pre", "norm": "layernorm", "feed_forward": "gelu", "positions": "learned", "bias": True}
ORIGINAL = GPT | {"norm_position": "post", "feed_forward": "relu", "positions": "sinusoidal"}
PLACES = list(itertools.product(("pre", "post"), ("sinusoidal", "learned", "rope", "none")))

each_place = pytest.mark.parametrize(("norm_position", "positions"), PLACES)


def tiny_config(**fields: Any) -> DecoderConfig:
    """Two layers of 16 numbers with 4 heads (2 for keys and values), 50 tokens, weights that are far from zero."""
    sizes = {
        "vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "eos_token_id": 0,
        "pad_token_id": 0,
    }  # fmt: skip
    return DecoderConfig(**sizes | fields)


def tiny_decoder(seed: int = 0, **fields: Any) -> Any:
    """In eval mode."""
    torch.manual_seed(seed)
    return DecoderForCausalLM._from_config(tiny_config(**fields)).eval()


def some_ids(rows: int = 2, length: int = 9) -> torch.Tensor:
    return torch.randint(1, 50, (rows, length), generator=torch.Generator().manual_seed(1))
