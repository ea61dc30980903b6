"""What the tests of the engines have in common: a model of each family, prompts, and the model's own word on what was
sampled."""

from collections.abc import Callable
from typing import Any

import torch
from decoder_world import PLACES
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from rlhf.stages import adapters
from rlhf.stages.decoder import DecoderConfig
from rlhf.stages.engines import Engine, Responses
from rlhf.stages.settings import LoraSettings

PROMPTS = [[5, 6, 7], [8] * 11, [9, 10], [3, 4, 5, 6, 7, 8], [5, 6, 7], [5, 6, 7], [40, 41]]
"""Of unlike lengths; one is there three times."""
BASE: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
STOPS = list(range(10, 22))
"""Of 97 tokens: enough for responses of many lengths."""
GPT2: dict[str, Any] = {"vocab_size": 97, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_positions": 64, "eos_token_id": 1}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**BASE),
    "llama with biases": lambda: LlamaConfig(**BASE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mistral": lambda: MistralConfig(**BASE, sliding_window=7),
    "qwen2": lambda: Qwen2Config(**BASE),
    "qwen2 with windows": lambda: Qwen2Config(**BASE, use_sliding_window=True, sliding_window=7, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**BASE, head_dim=16),
    "gemma": lambda: GemmaConfig(**BASE, head_dim=12),
    "gemma2": lambda: Gemma2Config(
        **BASE, head_dim=12, query_pre_attn_scalar=12, sliding_window=7, attn_logit_softcapping=2.0,
        final_logit_softcapping=5.0,
    ),
    "gemma3_text": lambda: Gemma3TextConfig(
        **BASE, head_dim=12, query_pre_attn_scalar=12, sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "gpt2": lambda: GPT2Config(**GPT2),
    "gpt2 scaled by layer": lambda: GPT2Config(**GPT2, scale_attn_by_inverse_layer_idx=True),
    **{
        f"rlhf_decoder {place} {positions} {groups}": lambda place=place, positions=positions, groups=groups: (
            DecoderConfig(**BASE | {"norm_position": place, "positions": positions, "num_key_value_heads": groups})
        )
        for place, positions in PLACES
        for groups in (2, 4)
    },
}  # fmt: skip
"""Windows are shorter than the texts, and caps low enough to cap."""


def new_model(family: str, std: float | None = 0.3, **changes: Any) -> Any:
    """In float32 and far from uniform, or as it is begun without `std`; with `changes` of its config."""
    torch.manual_seed(0)
    config = CONFIGS[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 and std is not None:
            parameter.data.normal_(0, std)
        elif name.endswith("bias"):
            parameter.data.normal_(0, 0.3)
    return model


def drawn(engine: Engine, prompts: list[list[int]] = PROMPTS, length: int = 20) -> Responses:
    torch.manual_seed(0)
    return engine.generate(prompts, length, 0.7, STOPS, 0)


def adapted(model: Any, **lora: Any) -> Any:
    """The policy with an adapter that has a say."""
    model.requires_grad_(False)
    adapters.add_lora(model, LoraSettings(r=2, alpha=4, **lora))
    torch.manual_seed(4)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:  # what begins at 0
            nn.init.normal_(parameter, std=0.5)
    return model


@torch.no_grad()
def read(model: Any, prompts: list[list[int]], responses: Responses, temperature: float) -> Tensor:
    """Log-probabilities [B,R] of the responses: each text alone, in one plain forward pass, without our code."""
    found = torch.zeros_like(responses.logprobs)
    for row, (prompt, tokens, mask) in enumerate(zip(prompts, responses.tokens, responses.mask, strict=True)):
        response = tokens[mask]
        logits = model(response.new_tensor([prompt + response.tolist()])).logits[0, len(prompt) - 1 : -1].float()
        found[row, : len(response)] = (logits / temperature).log_softmax(-1).gather(-1, response[:, None])[:, 0]
    return found


def assert_sampled(model: Any, prompts: list[list[int]], responses: Responses, temperature: float, stops: list[int],
                   longest: int, pad: int = 0, gap: float = 1e-4) -> None:  # fmt: skip
    """Each response ends at its first stop token or is as long as it may be, and has the model's log-probabilities,
    `gap` nats beside them at most."""
    assert responses.tokens.shape == responses.logprobs.shape == responses.mask.shape
    assert responses.logprobs.dtype == torch.float32
    assert len(responses.tokens) == len(prompts)
    for tokens, mask in zip(responses.tokens.tolist(), responses.mask.tolist(), strict=True):
        ends = [t for t, token in enumerate(tokens) if token in stops]
        length = ends[0] + 1 if ends else longest
        assert mask == [t < length for t in range(len(tokens))]
        assert tokens[length:] == [pad] * (len(tokens) - length)
    assert responses.logprobs[~responses.mask].eq(0).all()
    torch.testing.assert_close(responses.logprobs, read(model, prompts, responses, temperature), rtol=0, atol=gap)


def assert_drawn_from(expected: torch.Tensor, drawn: torch.Tensor) -> None:
    """A chi-square test of tokens [N] against probabilities [V]: five standard deviations are too far."""
    counts, expected = torch.bincount(drawn, minlength=len(expected)), expected * len(drawn)
    often = expected >= 5
    degrees = int(often.sum())
    assert degrees > 20
    assert ((counts - expected) ** 2 / expected)[often].sum().item() < degrees + 5 * (2 * degrees) ** 0.5
