"""Settings of the pretrain stage."""

from typing import ClassVar, Self

from pydantic import Field, model_validator

from rlhf.data.sources import Source
from rlhf.stages.settings import StageSettings


class PretrainSettings(StageSettings):
    """A BPE tokenizer and a Llama-shaped decoder, both from scratch."""

    stage: ClassVar[str] = "pretrain"
    input_fields: ClassVar[tuple[str, ...]] = ()

    data: Source
    """Raw text: a file, a folder, a JSONL/Parquet column, a hub id or a module:function."""
    eval_data: Source | None = None
    """Text for the validation loss; by default a share of the documents is held out."""
    vocab_size: int = Field(32000, ge=264)
    """Size of the BPE vocabulary, special tokens and the 256 bytes included."""
    hidden_size: int = Field(512, ge=8)
    """Width of the residual stream."""
    num_layers: int = Field(8, ge=1)
    """Transformer blocks."""
    num_heads: int = Field(8, ge=1)
    """Attention heads."""
    num_kv_heads: int | None = Field(None, ge=1)
    """Key/value heads (grouped-query attention); as many as heads by default."""
    intermediate_size: int | None = Field(None, ge=8)
    """Width of the SwiGLU feed-forward; 8/3 of hidden_size, rounded up to a multiple of 32, by default."""
    context_length: int = Field(1024, ge=8)
    """Longest sequence the model is made for; prompt and response must fit in it later."""
    block_size: int | None = Field(None, ge=2)
    """Tokens per training row; the context length by default."""
    initializer_range: float = Field(0.02, gt=0)
    """Standard deviation of the random weights; small models learn faster with about 1 / sqrt(hidden_size)."""
    num_steps: int = Field(1000, ge=1)
    """Optimiser steps."""
    global_batch_size: int = Field(32, ge=1)
    """Blocks per optimiser step, over all processes."""
    learning_rate: float = Field(1e-3, ge=0)
    """Peak learning rate; cosine down to a tenth of it."""
    warmup_steps: int = Field(100, ge=0)
    """Steps of linear warm-up."""
    weight_decay: float = Field(0.1, ge=0)
    """AdamW's weight decay, on matrices only."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient norm to clip at."""
    eval_every: int = Field(100, ge=1)
    """Steps between two validation losses; the checkpoint with the best one is kept."""

    @model_validator(mode="after")
    def _shapes_fit(self) -> Self:
        if self.hidden_size % self.num_heads or (self.hidden_size // self.num_heads) % 2:
            raise ValueError(f"hidden_size {self.hidden_size} must be an even multiple of num_heads {self.num_heads}")
        if self.num_kv_heads and self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} must be a multiple of num_kv_heads {self.num_kv_heads}")
        if self.block_size and self.block_size > self.context_length:
            raise ValueError(f"block_size {self.block_size} exceeds context_length {self.context_length}; lower it")
        return self
