"""Settings of the pretrain stage."""

from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlhf.data.sources import TextSource
from rlhf.stages.pretrain.presets import GPT, LLAMA, PARTS, PRESETS
from rlhf.stages.settings import StageSettings, nearest, one_or_several

TRAINED_TOKENIZERS = ("bpe", "characters")
"""The values of `tokenizer` that ask for a new one."""
_OWN_PARTS = {"llama": LLAMA, "gpt2": GPT, "decoder": LLAMA}
"""The parts of each architecture; decoder's are only where it starts from."""
_OF_A_NEW_MODEL = (
    "preset", "architecture", *PARTS, "tokenizer", "vocab_size", "special_tokens", "pad_vocab_to", "hidden_size",
    "num_layers", "num_heads", "num_kv_heads", "intermediate_size", "context_length", "tie_embeddings", "dropout",
    "initializer_range",
)  # fmt: skip


class PretrainSettings(StageSettings):
    """A tokenizer and a decoder from scratch, or a decoder trained further, on raw text."""

    stage: ClassVar[str] = "pretrain"
    length_fields: ClassVar[tuple[str, ...]] = ("block_size",)
    input_fields: ClassVar[tuple[str, ...]] = ("model",)
    not_in_key: ClassVar[frozenset[str]] = (StageSettings.not_in_key - {"max_skipped"}) | {
        "preset", "sample_prompts", "sample_length",
    }  # fmt: skip

    data: list[TextSource]
    """Raw text: a file, a folder, a JSONL/Parquet column, a hub id or a module:function; or a list of them, each with
    its `weight`."""
    eval_data: list[TextSource] | None = None
    """Text for the validation loss; by default a share of the documents is held out."""
    model: str | None = None
    """Folder or hub id of a model to train further, with its own tokenizer; none: a new one."""

    preset: list[str] = Field(default_factory=list, json_schema_extra=one_or_several)
    """Named shapes that fill in what the recipe does not set, one or several, the later over the former: original,
    llama, gpt3-125m to gpt3-175b, mini-gpt, mini-64. [GPT-3, table 2.1; LLaMA; Vaswani 2017]"""
    architecture: Literal["llama", "gpt2", "decoder"] = "llama"
    """llama and gpt2 are transformers' own classes; decoder is ours, in which each part is a choice."""
    hidden_size: int = Field(512, ge=8)
    """Width of the residual stream."""
    num_layers: int = Field(8, ge=1)
    """Transformer blocks."""
    num_heads: int = Field(8, ge=1)
    """Attention heads. [Vaswani 2017]"""
    num_kv_heads: int | None = Field(None, ge=1)
    """Key/value heads (grouped-query attention); as many as heads by default. [GQA]"""
    intermediate_size: int | None = Field(None, ge=8)
    """Width of the feed-forward. By default 4 times hidden_size; for SwiGLU 8/3 of it, rounded up to a multiple of 32,
    which gives as many weights. [LLaMA]"""
    context_length: int = Field(1024, ge=8)
    """Longest sequence the model is made for; prompt and response must fit in it later."""
    norm_position: Literal["pre", "post"] | None = None
    """Where the norms stand: before each sublayer, or after its residual is added. This and the next four are choices
    of decoder alone, by default those of llama. [GPT-2]"""
    norm: Literal["rmsnorm", "layernorm"] | None = None
    """Kind of norm. [LLaMA]"""
    feed_forward: Literal["swiglu", "silu", "gelu", "relu"] | None = None
    """Activation of the feed-forward; swiglu has a gate beside it. [SwiGLU]"""
    positions: Literal["rope", "learned", "sinusoidal", "none"] | None = None
    """How the model knows the order of its tokens. [LLaMA; Vaswani 2017]"""
    bias: bool | None = None
    """Biases in norms and linear layers (but for query, key, value and the logits)."""
    tie_embeddings: bool = True
    """Use the embeddings for the logits, too. [Press & Wolf 2017]"""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on embeddings, attention weights and each sublayer's output; llama has it on attention weights alone."""
    initializer_range: float = Field(0.02, gt=0)
    """Standard deviation of the random weights; small models learn faster with about 1 / sqrt(hidden_size). [GPT-2]"""

    tokenizer: str = "bpe"
    """bpe: byte-level BPE trained on the text; characters; or folder or hub id of an existing tokenizer. [GPT-2]"""
    vocab_size: int = Field(32000, ge=264)
    """Size of the BPE vocabulary, special tokens and the 256 bytes included."""
    special_tokens: list[str] = Field(default_factory=list)
    """Further special tokens of a new tokenizer."""
    pad_vocab_to: int = Field(64, ge=1)
    """The model has a multiple of this many embeddings, which GPUs multiply faster; those left over are never used."""

    block_size: int | None = Field(None, ge=2)
    """Tokens per training row; the context length by default."""
    attend_across_documents: bool = True
    """Let tokens of a block see those of other documents before them in it; false is slower."""
    deduplicate: Literal["exact", "minhash"] | None = None
    """Leave out documents that came before: equal ones, or those that share most of their words, too (needs rensa)."""
    min_document_length: int = Field(1, ge=1)
    """Characters; shorter documents are left out."""
    max_document_length: int | None = Field(None, ge=1)
    """Characters; longer documents are left out."""

    num_steps: int = Field(1000, ge=1)
    """Optimiser steps."""
    global_batch_size: int = Field(32, ge=1)
    """Blocks per optimiser step, over all processes."""
    global_batch_tokens: int | None = Field(None, ge=2)
    """The same in tokens, instead of global_batch_size: so many blocks as they fill."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """muon is for the matrices inside the blocks; embeddings, logits, norms and biases keep AdamW. [Muon; AdamW]"""
    learning_rate: float | None = Field(None, ge=0)
    """Peak of AdamW's learning rate, 1e-3 by default. For noam the factor before the formula, by default 1."""
    muon_learning_rate: float = Field(0.02, ge=0)
    """Peak learning rate of Muon's matrices. [Muon]"""
    schedule: Literal["cosine", "linear", "constant", "wsd", "noam"] = "cosine"
    """After the warm-up: down to end_share along a cosine or a line; constant; wsd: constant, then down a line over the
    last decay_share of the steps; noam: hidden_size^-0.5 · min(step^-0.5, step · warmup_steps^-1.5). [MiniCPM; Vaswani
    2017]"""
    warmup_steps: float = Field(100, ge=0)
    """Steps of linear warm-up; below 1 it is a share of num_steps."""
    end_share: float = Field(0.1, ge=0, le=1)
    """Learning rate at the last step, as a share of its peak. [GPT-3]"""
    decay_share: float = Field(0.2, gt=0, le=1)
    """Share of the steps in which wsd decays."""
    weight_decay: float = Field(0.1, ge=0)
    """Weight decay, on matrices only. [AdamW; GPT-3]"""
    adam_beta2: float = Field(0.95, ge=0, lt=1)
    """AdamW's second beta; its first is 0.9. [GPT-3]"""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient norm to clip at. [GPT-3]"""
    compile: bool = False
    """torch.compile on a GPU (elsewhere it does nothing): a minute more at the start, then faster."""
    gradient_checkpointing: bool = False
    """Compute the blocks' activations again in the backward pass instead of keeping them: slower, less memory."""

    eval_every: int = Field(100, ge=1)
    """Steps between two validation losses; the checkpoint with the best one is kept."""
    early_stopping_patience: int | None = Field(None, ge=1)
    """Stop after so many validation losses in a row without a new best one."""
    sample_prompts: list[str] = Field(default_factory=list)
    """Beginnings of texts that the model goes on with at each evaluation; shown, and kept in samples.jsonl."""
    sample_length: int = Field(200, ge=1)
    """Tokens of each such sample, or as many as the model has positions for."""
    max_spike: float = Field(8.0, gt=0)
    """A step whose loss is more than so many standard deviations above the mean of the last 100 is skipped, as is one
    whose loss or gradient is not finite. [PaLM; OPT]"""
    max_skipped: int = Field(3, ge=1)
    """After so many skipped steps in a row the stage goes back to the last checkpoint, and on with other data."""
    max_rollbacks: int = Field(3, ge=0)
    """How often it may go back before it gives up."""

    @model_validator(mode="before")
    @classmethod
    def _with_presets(cls, values: Any) -> Any:
        names = values.get("preset") if isinstance(values, dict) else None
        names = [names] if isinstance(names, str) else names
        if not isinstance(names, list):
            return values
        filled: dict[str, Any] = {}
        for name in names:
            if name not in PRESETS:
                raise ValueError(f"no preset '{name}'; {nearest(str(name), list(PRESETS))}")
            filled |= PRESETS[name]
        if values.get("architecture", "decoder") != "decoder":  # which has its own parts
            filled = {name: value for name, value in filled.items() if name not in PARTS}
        return filled | values | {"preset": names}

    @field_validator("data", "eval_data", mode="before", json_schema_input_type=TextSource | list[TextSource] | None)
    @classmethod
    def _list_of_sources(cls, value: Any) -> Any:
        return value if isinstance(value, list) or value is None else [value]

    @field_validator("data", "eval_data")
    @classmethod
    def _all_or_none_weighted(cls, sources: list[TextSource] | None) -> list[TextSource] | None:
        if sources is not None:
            if not sources:
                raise ValueError("an empty list; name at least one source")
            if len({source.weight is None for source in sources}) > 1:
                raise ValueError("some sources have a weight and some have none; give one to all, or to none")
        return sources

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.model is not None:
            fields = type(self).model_fields
            for name in _OF_A_NEW_MODEL:
                if getattr(self, name) != fields[name].get_default(call_default_factory=True):
                    raise ValueError(f"{name} is of a new model, but model names one to train further; take one out")
            return self
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ValueError(f"hidden_size {self.hidden_size} must be an even multiple of num_heads {self.num_heads}")
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if self.block_size and self.block_size > self.context_length:
            raise ValueError(f"block_size {self.block_size} exceeds context_length {self.context_length}; lower it")
        if self.architecture != "decoder":
            for name, own in _OWN_PARTS[self.architecture].items():
                if getattr(self, name) not in (None, own):
                    raise ValueError(
                        f"{name} {getattr(self, name)}: {self.architecture} has {own}; architecture decoder "
                        "leaves the choice"
                    )
        if self.architecture == "gpt2" and self.num_kv_heads not in (None, self.num_heads):
            raise ValueError(f"num_kv_heads {self.num_kv_heads}: gpt2 has as many as num_heads; take llama or decoder")
        return self

    @property
    def parts(self) -> dict[str, Any]:
        """The choices of a decoder's parts, all made."""
        chosen = {name: getattr(self, name) for name in PARTS if getattr(self, name) is not None}
        return _OWN_PARTS[self.architecture] | chosen

    def global_batch(self, block_size: int) -> tuple[str, int, int]:
        """Name and value, in blocks, of the setting that says how large a step is, and what it counts for a block."""
        if self.global_batch_tokens is None:
            return "global_batch_size", self.global_batch_size, 1
        return "global_batch_tokens / block_size", max(self.global_batch_tokens // block_size, 1), block_size

    def inputs(self) -> dict[str, str | None]:
        """The model to train further, or a tokenizer that is taken as it is, if there is one."""
        if self.model is not None:
            return {"model": self.model}
        return {} if self.tokenizer in TRAINED_TOKENIZERS else {"tokenizer": self.tokenizer}

    def only_whole(self) -> Iterator[tuple[str, str]]:
        if self.optimizer == "muon":
            yield "optimizer: muon", "it takes whole matrices; use adamw"

    def result_settings(self) -> dict[str, Any]:
        """As everywhere; a tokenizer's digest stands for its path."""
        existing = {"tokenizer": "existing"} if "tokenizer" in self.inputs() else {}
        return super().result_settings() | existing
