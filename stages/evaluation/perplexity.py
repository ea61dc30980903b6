"""How well a model foresees held-out text and held-out responses: what alignment costs, and what SFT taught.

A perplexity is per token of the run's own tokenizer, so that it compares the models of one run; across tokenizers take
bits per byte.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.data.collate import document_mask
from rlhf.data.tokens import Encoded
from rlhf.stages.pretrain.objective import NextTokenLoss
from rlhf.stages.sft.objective import Reading, num_targets

TOKENS_AT_ONCE = 2**13
"""That one forward pass reads."""


@torch.no_grad()
def text_nats(
    model: PreTrainedModel, blocks: Tensor, tokenizer: PreTrainedTokenizerBase, across_documents: bool
) -> float:
    """Mean cross entropy per token, in nats, of blocks [n, T + 1], read as in pretraining."""
    loss_of, total = NextTokenLoss(model), 0.0
    for some in blocks.split(max(TOKENS_AT_ONCE // blocks.shape[1], 1)):
        inputs = {}
        if not across_documents:
            position_ids, mask = document_mask(some[:, :-1], tokenizer.eos_token_id)
            inputs = {"position_ids": position_ids.to(model.device), "attention_mask": mask.to(model.device)}
        total += loss_of.losses(some.to(model.device), **inputs).item()
    return total / blocks[:, 1:].numel()


@torch.no_grad()
def response_nats(model: PreTrainedModel, rows: Sequence[Encoded], tokenizer: PreTrainedTokenizerBase) -> float:
    """Mean cross entropy per response token, eos included, in nats, read as in SFT."""
    longest = max(len(row.input_ids) for row in rows)
    reading = Reading(model, longest, tokenizer.pad_token_id, model.device, "no", nullcontext(), packing=False)
    total = 0.0
    for cut in reading.cut(rows, None, TOKENS_AT_ONCE):
        total += reading.losses(model, reading.passage([rows[i] for i in cut]).to(model.device))[0].item()
    return total / sum(map(num_targets, rows))


def perplexity(nats: float) -> float:
    """From nats per token; infinite beyond what a float holds."""
    return math.exp(nats) if nats < 700 else math.inf


def num_bytes(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Sequence[int]]) -> int:
    """UTF-8 bytes of what the ids say; special tokens, an eos say, have none."""
    return sum(len(text.encode()) for text in tokenizer.batch_decode(list(texts), skip_special_tokens=True))


def bits_per_byte(nats: float, num_tokens: int, size: int) -> float:
    """From nats per token, and how many tokens stand for how many bytes."""
    return nats * num_tokens / math.log(2) / max(size, 1)
