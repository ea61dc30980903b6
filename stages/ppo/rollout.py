"""The rollout phase: responses sampled from the policy, and what every model says about them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.data.collate import pad_left
from rlhf.data.rows import Messages
from rlhf.stages.generation import sample
from rlhf.stages.models import PolicyModel, ScalarModel
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.objective import response_mask
from rlhf.stages.ppo.rewards import Episodes, Rewards, response_texts


@dataclass
class Rollout:
    """B episodes: prompts padded on the left to P tokens, responses on the right to R, T = P + R."""

    input_ids: Tensor  # [B,T] prompt and response
    attention_mask: Tensor  # [B,T] True on prompt tokens and on the response up to its stop token
    mask: Tensor  # [B,R] True on the response up to its stop token, which is an action like the others
    logprobs: Tensor  # [B,R] of the policy that sampled, at the sampling temperature
    ref_logprobs: Tensor  # [B,R] of the reference, at the same temperature
    entropy: Tensor  # [B,R]
    values: Tensor  # [B,R] of the state before each token; zeros without a critic
    scores: Tensor  # [B] of all rewards together, before any penalty
    reward_scores: Tensor  # [B,N] of each reward, unweighted
    ended: Tensor  # [B] True where the response has a stop token

    @property
    def responses(self) -> Tensor:
        return self.input_ids[:, -self.mask.shape[1] :]

    @property
    def kl(self) -> Tensor:
        """Log-ratio to the reference [B], summed over each response (k1, in nats)."""
        return torch.where(self.mask, self.logprobs - self.ref_logprobs, 0.0).sum(-1)

    @property
    def lengths(self) -> Tensor:
        return self.mask.sum(-1)

    def __getitem__(self, rows: list[int]) -> "Rollout":
        return Rollout(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@torch.no_grad()
def collect(
    policy: PolicyModel,
    reference: PolicyModel,
    rewards: Rewards,
    critic: ScalarModel | None,
    prompts: list[list[int]],
    messages: Sequence[Messages],
    settings: PPOSettings,
    stop_token_ids: list[int],
    tokenizer: PreTrainedTokenizerBase,
) -> Rollout:
    """One response per prompt, with log-probabilities, values and scores. All models are in eval mode."""
    device, pad_token_id = policy.model.device, tokenizer.pad_token_id
    responses = sample(
        policy.model, prompts, settings.max_new_tokens, settings.temperature, stop_token_ids, pad_token_id
    )  # [B,R]
    prompt_ids, prompt_mask = (x.to(device) for x in pad_left(prompts, pad_token_id))  # [B,P]
    mask = response_mask(responses, stop_token_ids)
    input_ids = torch.cat([prompt_ids, responses], dim=1)
    attention_mask = torch.cat([prompt_mask, mask], dim=1)
    ended = torch.isin(responses, torch.tensor(stop_token_ids, device=device)).any(-1)
    parts = [
        judge_part(policy, reference, critic, input_ids[rows], attention_mask[rows], mask[rows], settings)
        for rows in _chunks(len(prompts), settings.microbatch_size)
    ]
    texts = response_texts(tokenizer, responses, mask)
    scores, parts_of_score = rewards(Episodes(input_ids, attention_mask, mask, ended, messages, texts))
    logprobs, ref_logprobs, entropy, values = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return Rollout(
        input_ids, attention_mask, mask, logprobs, ref_logprobs, entropy, values, scores, parts_of_score, ended
    )  # fmt: skip


def judge_part(
    policy: PolicyModel,
    reference: PolicyModel,
    critic: ScalarModel | None,
    input_ids: Tensor,
    attention_mask: Tensor,
    mask: Tensor,
    settings: PPOSettings,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(logprobs, ref_logprobs, entropy, values) [B,R] of one microbatch."""
    length = mask.shape[1]
    logprobs, entropy = policy(input_ids, attention_mask, length, settings.temperature, with_entropy=True)
    assert entropy is not None
    ref_logprobs, _ = reference(input_ids, attention_mask, length, settings.temperature)
    values = torch.zeros_like(logprobs)
    if critic is not None:
        values = response_values(critic, input_ids, attention_mask, length)
    return logprobs, ref_logprobs, entropy, values


def response_values(critic: torch.nn.Module, input_ids: Tensor, attention_mask: Tensor, num_response: int) -> Tensor:
    """Values [B,R]: the one at t judges the state before response token t, hence the shift by one."""
    return critic(input_ids, attention_mask)[:, -num_response - 1 : -1]


def _chunks(num_rows: int, size: int | None) -> Iterator[slice]:
    size = size or num_rows
    for start in range(0, num_rows, size):
        yield slice(start, start + size)
