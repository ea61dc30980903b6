"""The decoder that is trained: a new one from its settings, or one that goes on from a checkpoint."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rlhf.stages.decoder import DecoderConfig
from rlhf.stages.models import load_policy
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.pretrain.tokenizer import padded_vocab_size
from rlhf.stages.text_limits import num_positions


def make_model(settings: PretrainSettings, tokenizer: PreTrainedTokenizerBase, spread: bool = False) -> PreTrainedModel:
    """In float32 and in training mode; `spread` as in `load_policy`."""
    if settings.model is not None:
        model = load_policy(settings.model, tokenizer, spread=spread)
    else:
        model = AutoModelForCausalLM.from_config(model_config(settings, tokenizer), dtype=torch.float32)
    if settings.gradient_checkpointing:
        model.activation_checkpointing_enable()
    return model.train()


def model_config(settings: PretrainSettings, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """The architecture in transformers' terms."""
    width, parts = settings.hidden_size, settings.parts
    inner = settings.intermediate_size
    if inner is None:  # a gate makes it three matrices instead of two
        inner = -(-width * 8 // 3 // 32) * 32 if parts["feed_forward"] == "swiglu" else 4 * width
    common: dict[str, Any] = {
        "vocab_size": padded_vocab_size(tokenizer, settings.pad_vocab_to),
        "initializer_range": settings.initializer_range,
        "tie_word_embeddings": settings.tie_embeddings,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    if settings.architecture == "gpt2":
        return GPT2Config(
            n_embd=width, n_layer=settings.num_layers, n_head=settings.num_heads, n_inner=inner,
            n_positions=settings.context_length, resid_pdrop=settings.dropout, embd_pdrop=settings.dropout,
            attn_pdrop=settings.dropout, **common,
        )  # fmt: skip
    common |= {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "num_key_value_heads": settings.num_kv_heads or settings.num_heads,
        "max_position_embeddings": settings.context_length,
    }
    if settings.architecture == "llama":
        return LlamaConfig(attention_dropout=settings.dropout, **common)
    return DecoderConfig(dropout=settings.dropout, **parts, **common)


def non_embedding_parameters(model: PreTrainedModel) -> int:
    """Weights without embeddings of tokens and positions and without the logits' matrix, as Kaplan et al. count."""
    left_out = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    head = model.get_output_embeddings().weight
    return int(model.num_parameters() - sum((left_out | {id(head): head.numel()}).values()))


def flops_per_token(model: PreTrainedModel, block_size: int) -> float:
    """Floating-point operations of forward and backward pass per token: 6 N + 12 · layers · width · block size.

    N counts the weights that are multiplied with, which embeddings are only where they make the logits, too (Chowdhery
    et al. 2022, appendix B).
    """
    config = model.config.get_text_config()
    attention = 12 * config.num_hidden_layers * config.hidden_size * min(block_size, num_positions(model))
    weights = non_embedding_parameters(model) + model.get_output_embeddings().weight.numel()
    return float(6 * weights + attention)
