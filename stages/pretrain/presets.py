"""Named shapes: what `preset` fills in where the recipe says nothing. No torch."""

from typing import Any

ORIGINAL = {
    "norm_position": "post",
    "norm": "layernorm",
    "feed_forward": "relu",
    "positions": "sinusoidal",
    "bias": True,
}
"""The Transformer of Vaswani et al. 2017, its decoder alone."""
LLAMA = {"norm_position": "pre", "norm": "rmsnorm", "feed_forward": "swiglu", "positions": "rope", "bias": False}
"""LLaMA (Touvron et al. 2023)."""
GPT = {"norm_position": "pre", "norm": "layernorm", "feed_forward": "gelu", "positions": "learned", "bias": True}
"""GPT-2 and GPT-3."""
LECTURE = GPT | {"feed_forward": "relu"}
PARTS = tuple(LLAMA)
"""The settings that choose a decoder's parts."""


def _gpt3(num_layers: int, hidden_size: int, num_heads: int) -> dict[str, Any]:
    size = {"num_layers": num_layers, "hidden_size": hidden_size, "num_heads": num_heads, "context_length": 2048}
    return {"architecture": "decoder", **GPT, **size}


# Brown et al. 2020, table 2.1. Two of its rows do not multiply out: 1.3B has 16 heads of 128 here (not 24), 13B is
# 5120 wide (not 5140).
PRESETS: dict[str, dict[str, Any]] = {
    "original": {"architecture": "decoder", **ORIGINAL},
    "llama": {"architecture": "decoder", **LLAMA},
    "gpt3-125m": _gpt3(12, 768, 12),
    "gpt3-350m": _gpt3(24, 1024, 16),
    "gpt3-760m": _gpt3(24, 1536, 16),
    "gpt3-1.3b": _gpt3(24, 2048, 16),
    "gpt3-2.7b": _gpt3(32, 2560, 32),
    "gpt3-6.7b": _gpt3(32, 4096, 32),
    "gpt3-13b": _gpt3(40, 5120, 40),
    "gpt3-175b": _gpt3(96, 12288, 96),
    "mini-gpt": {
        "architecture": "decoder", **LECTURE, "num_layers": 6, "num_heads": 6, "hidden_size": 384,
        "context_length": 256, "dropout": 0.2, "tie_embeddings": False, "tokenizer": "characters", "pad_vocab_to": 1,
        "global_batch_size": 64, "num_steps": 5000, "learning_rate": 3e-4, "schedule": "constant", "warmup_steps": 0,
        "weight_decay": 0.01, "adam_beta2": 0.999,
    },
    "mini-64": {
        "architecture": "decoder", **LECTURE, "num_layers": 6, "num_heads": 8, "hidden_size": 64,
        "context_length": 64, "tie_embeddings": False, "tokenizer": "characters", "pad_vocab_to": 1,
        "initializer_range": 0.1,
    },
}  # fmt: skip
