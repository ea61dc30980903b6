"""Sampling from a policy: exactly softmax(logits / temperature), stopped at the first stop token.

Own loop rather than `generate`: no logits processor and nothing of a checkpoint's generation_config (top-k,
top-p, …) can change the law that is sampled, finished rows leave the batch, and no scores are kept.
"""

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from rlhf.data.collate import pad_left


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
        output = model(
            input_ids=ids, attention_mask=mask.long(), position_ids=positions,
            cache=cache, use_cache=True, logits_to_keep=1,
        )  # fmt: skip
        probs = (output.logits[:, -1].float() / temperature).softmax(-1)  # [B,V]
        token = torch.multinomial(probs, 1)[:, 0]
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
