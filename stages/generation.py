"""Sampling from a policy: exactly softmax(logits / temperature), stopped at the first stop token.

Own loop rather than `generate`: no logits processor and nothing of a checkpoint's generation_config (top-k,
top-p, …) can change the law that is sampled, finished rows leave the batch, and no scores are kept.
"""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache, PreTrainedModel

from rlhf.data.collate import pad_left

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All but cuDNN's, which takes some 60 ms to plan for every new shape of batch and cache: for every token, here."""


@torch.no_grad()
def sample(
    model: PreTrainedModel,
    prompts: list[list[int]],
    max_new_tokens: int,
    temperature: float,
    stop_token_ids: list[int],
    pad_token_id: int,
) -> Tensor:
    """One response per prompt: ids [B,R], R <= max_new_tokens, stop token included, padded on the right.

    Draws from the global random stream of the model's device; the model must be in eval mode.
    """
    device = model.device
    ids, mask = (x.to(device) for x in pad_left(prompts, pad_token_id))  # [B,P]
    responses = torch.full((len(prompts), max_new_tokens), pad_token_id, device=device)
    stops = torch.tensor(stop_token_ids, device=device)
    rows = torch.arange(len(prompts), device=device)  # rows of the batch that are still being written
    cache = DynamicCache(config=model.config)
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
    for t in range(max_new_tokens):
        with sdpa_kernel(_KERNELS):
            output = model(
                input_ids=ids, attention_mask=mask.long(), position_ids=positions,
                cache=cache, use_cache=True, logits_to_keep=1,
            )  # fmt: skip
        token = draw((output.logits[:, -1].float() / temperature).softmax(-1))
        responses[rows, t] = token
        going = ~torch.isin(token, stops)
        if not going.any():
            break
        positions = positions[:, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        ids = token[:, None]
        if not going.all():
            kept = going.nonzero()[:, 0]
            cache.batch_select_indices(kept)
            rows, ids, mask, positions = rows[kept], ids[kept], mask[kept], positions[kept]
    return responses[:, : t + 1]


def draw(probs: Tensor) -> Tensor:
    """One token per row of `probs` [B,V], from one uniform number each.

    `torch.multinomial` draws a number per token of the vocabulary, which takes a fifth of a small model's rollout.
    """
    exact = torch.float32 if probs.device.type == "mps" else torch.float64  # which mps lacks
    cumulative = probs.to(exact).cumsum(-1)
    point = torch.rand(len(probs), 1, dtype=exact, device=probs.device) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True)[:, 0].clamp(max=probs.shape[-1] - 1)
