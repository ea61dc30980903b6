"""transformers' `generate` as a rollout engine, for any causal language model."""

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from rlhf.data.collate import pad_left
from rlhf.stages.engines import Responses, mask_to_the_end, no_responses
from rlhf.stages.models import PolicyModel


class TransformersEngine:
    """Samples from `model` by `generate`, and reads the log-probabilities in one more pass.

    Nothing of a checkpoint's generation_config (top-k, top-p, penalties …) takes part. `num_rows` prompts are answered
    at a time, all by default.
    """

    def __init__(self, model: PreTrainedModel, num_rows: int | None = None) -> None:
        self.model, self.num_rows = model, num_rows
        self.policy = PolicyModel(model)

    @torch.no_grad()
    def generate(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: list[int],
        pad_token_id: int,
    ) -> Responses:
        """See `Engine.generate`."""
        if not prompts:
            return no_responses(self.model.device)
        size = self.num_rows or len(prompts)
        law = max_new_tokens, temperature, stop_token_ids, pad_token_id
        parts = [self._answer(prompts[start : start + size], *law) for start in range(0, len(prompts), size)]
        width = max(part.mask.shape[1] for part in parts)
        return Responses(
            torch.cat([_wider(part.tokens, width, pad_token_id) for part in parts]),
            torch.cat([_wider(part.logprobs, width, 0.0) for part in parts]),
            torch.cat([_wider(part.mask, width, False) for part in parts]),
        )

    def sync(self, model: PreTrainedModel) -> None:
        """Nothing to do: weights are read anew for every call."""

    def _answer(
        self, prompts: list[list[int]], max_new_tokens: int, temperature: float, stops: list[int], pad_token_id: int
    ) -> Responses:
        ids, mask = (x.to(self.model.device) for x in pad_left(prompts, pad_token_id))  # [B,P]
        config = GenerationConfig(
            do_sample=True, temperature=temperature, top_k=0, top_p=1.0, max_new_tokens=max_new_tokens,
            eos_token_id=stops or None, pad_token_id=pad_token_id,
        )  # fmt: skip
        kept, self.model.generation_config = self.model.generation_config, config  # what `config` leaves open is
        try:  # filled in from the model's own
            whole = self.model.generate(input_ids=ids, attention_mask=mask.long(), generation_config=config)
        finally:
            self.model.generation_config = kept
        tokens = whole[:, ids.shape[1] :]
        counted = mask_to_the_end(tokens, stops)
        tokens = tokens.masked_fill(~counted, pad_token_id)
        text, seen = torch.cat([ids, tokens], dim=1), torch.cat([mask, counted], dim=1)
        logprobs, _, _ = self.policy(text, seen, tokens.shape[1], temperature)
        return Responses(tokens, logprobs.masked_fill(~counted, 0.0), counted)


def _wider(x: Tensor, width: int, value: float) -> Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[1]), value=value)
