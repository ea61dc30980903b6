"""Tiny decoders for the tests of the stages."""

import importlib
from collections.abc import Iterable
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from rlhf.data.tokens import ensure_chat_template, ensure_pad
from rlhf.recipes import demo_world
from rlhf.stages.engines.choice import make_engine
from rlhf.stages.settings_file import write_settings


@cache
def byte_tokenizer() -> Any:
    """Bytes, three role tokens, and <|endoftext|> (id 0) as eos and pad."""
    specials = ["<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*specials, *alphabet])}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(specials)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>")
    ensure_pad(tokenizer)
    ensure_chat_template(tokenizer)
    return tokenizer


def tiny_policy(shape: str = "llama", dropout: float = 0.0, seed: int = 0) -> Any:
    """A decoder of two layers and 260 tokens, far from uniform, in eval mode."""
    torch.manual_seed(seed)
    if shape == "llama":
        config = LlamaConfig(
            vocab_size=260, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.5,
            attention_dropout=dropout, bos_token_id=None, eos_token_id=0, pad_token_id=0,
        )  # fmt: skip
        return LlamaForCausalLM(config).eval()
    config = GPT2Config(
        vocab_size=260, n_embd=16, n_layer=2, n_head=2, n_positions=64, initializer_range=0.5,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config).eval()


def sample(
    model: Any, prompts: list[list[int]], max_new_tokens: int, temperature: float, stops: list[int], pad: int = 0
) -> Tensor:
    """Responses [B,R] of the model."""
    return make_engine(model).generate(prompts, max_new_tokens, temperature, stops, pad).tokens


WORLD = "rlhf.recipes.demo_world"


def block_rows(documents: Iterable[list[int]], length: int) -> Tensor:
    """All rows [N, length + 1] of documents that are joined: each begins with the last token of the one before."""
    return torch.tensor([*chain.from_iterable(documents)]).unfold(0, length + 1, length)


def prompts() -> list[dict[str, str]]:
    """A fifth of the demo's: to tokenise all takes longer than the iterations of `TINY`."""
    return list(islice(demo_world.prompts(), 100))


TINY: dict[str, dict[str, Any]] = {
    "pretrain": {
        "data": {"path": f"{WORLD}:documents", "options": {"num": 120}}, "vocab_size": 300, "hidden_size": 16,
        "num_layers": 1, "num_heads": 2, "context_length": 96, "block_size": 32, "num_steps": 6, "save_every": 2,
        "global_batch_size": 4, "eval_every": 3, "log_every": 1, "learning_rate": 1e-2, "warmup_steps": 2,
    },
    "sft": {
        "data": {"path": f"{WORLD}:demonstrations", "options": {"num": 60}}, "max_length": 96, "save_every": 2,
        "global_batch_size": 10, "learning_rate": 1e-3, "log_every": 1,
    },
    "reward": {
        "data": {"path": f"{WORLD}:rankings", "options": {"num": 40}}, "judge": f"{WORLD}:judge",
        "num_sampled_answers": 1, "judge_noise": 0.1, "max_new_tokens": 16, "max_length": 96, "save_every": 2,
        "global_batch_size": 6, "learning_rate": 1e-3, "log_every": 1, "eval_every": 3, "max_dropped": 0.1,
    },
    "ppo": {
        "data": "stages_world:prompts", "judge": f"{WORLD}:judge", "num_iterations": 5, "rollout_batch_size": 8,
        "num_epochs": 2, "num_minibatches": 2, "max_prompt_length": 64, "max_new_tokens": 16, "save_every": 2,
        "learning_rate": 1e-3, "critic_learning_rate": 1e-3, "log_every": 1, "eval_every": 3, "eval_share": 0.1,
        "missing_eos_penalty": 1.0,
    },
}  # fmt: skip
"""Settings under which each stage takes about a second."""


def run_stage(stage: str, folder: Path, **fields: Any) -> dict[str, Any]:
    """Write the stage's settings into its folder and train."""
    config = importlib.import_module(f"rlhf.stages.{stage}.config")
    cls = next(c for c in vars(config).values() if getattr(c, "stage", None) == stage)
    write_settings(folder, cls.load({"report_to": [], **TINY[stage], **fields}, stage))
    metrics: dict[str, Any] = importlib.import_module(f"rlhf.stages.{stage}.train").train(folder)
    return metrics


def inputs(stage: str, folders: dict[str, Path]) -> dict[str, str]:
    """The models that a stage starts from, out of the folders of a chain."""
    names = {
        "sft": {"model": "pretrain"},
        "reward": {"model": "sft"},
        "ppo": {"model": "sft", "reward_model": "reward"},
    }
    return {field: str(folders[source] / "model") for field, source in names.get(stage, {}).items()}


def without_clock(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics without what the machine and its load decide."""
    return {name: value for name, value in row.items() if name != "peak_gib" and "second" not in name}
