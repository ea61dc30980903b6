"""transformers' `generate` as a rollout engine, for any causal language model."""

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from rlhf.data.collate import pad_left, response_mask
from rlhf.stages.engines import Responses, no_responses


class TransformersEngine:
    """Samples from `model` by `generate`.

    Nothing of a checkpoint's generation_config (top-k, top-p, penalties …) takes part. `batch_size` prompts are
    answered at a time, all by default. A `streamer` is handed the tokens of a single prompt as they are drawn.
    Temperature 0 takes the likeliest token each time, with certainty.
    """

    def __init__(
        self, model: PreTrainedModel, batch_size: int | None = None, streamer: BaseStreamer | None = None
    ) -> None:
        self.model, self.batch_size, self.streamer = model, batch_size, streamer

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
        size = self.batch_size or len(prompts)
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
            do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max_new_tokens,
            eos_token_id=stops or None, pad_token_id=pad_token_id,
        )  # fmt: skip
        law = _Law(temperature)
        kept, self.model.generation_config = self.model.generation_config, config  # what `config` leaves open is
        try:  # filled in from the model's own
            whole = self.model.generate(
                input_ids=ids, attention_mask=mask.long(), generation_config=config,
                logits_processor=LogitsProcessorList([law]), streamer=self.streamer,
            )  # fmt: skip
        finally:
            self.model.generation_config = kept
        tokens = whole[:, ids.shape[1] :]
        logprobs = law.of(whole)
        counted = response_mask(tokens, stops)
        return Responses(tokens.masked_fill(~counted, pad_token_id), logprobs.masked_fill(~counted, 0.0), counted)


class _Law(LogitsProcessor):
    """Divides logits by the temperature, and keeps of each step the log-probability of the token that was drawn."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self._drawn: list[Tensor] = []
        self._last: Tensor | None = None  # [B,V] of the step under way

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self._take(input_ids)
        if self.temperature > 0:
            self._last = (scores.float() / self.temperature).log_softmax(-1)
        else:
            nothing = torch.full_like(scores, float("-inf"), dtype=torch.float32)
            self._last = nothing.scatter(-1, scores.argmax(-1, keepdim=True), 0.0)
        return self._last

    def of(self, whole: Tensor) -> Tensor:
        """Log-probabilities [B,R] of the tokens drawn, at the end of `whole` [B,P+R]."""
        self._take(whole)
        return torch.stack(self._drawn, dim=1)

    def _take(self, ids: Tensor) -> None:
        if self._last is not None:
            self._drawn.append(self._last.gather(-1, ids[:, -1:])[:, 0])


def _wider(x: Tensor, width: int, value: float) -> Tensor:
    return torch.nn.functional.pad(x, (0, width - x.shape[1]), value=value)
