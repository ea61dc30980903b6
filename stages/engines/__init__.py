"""Rollout engines: what samples responses from a policy, and with which log-probability.

static        our own: keys and values in tensors made once, the policy's own weights, CUDA graphs
transformers  `generate`, for any causal language model
vllm          a server in an environment of its own, which is sent the weights
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass
class Responses:
    """B responses of up to R tokens."""

    tokens: Tensor  # [B,R] stop token included, padded on the right
    logprobs: Tensor  # [B,R] float32, of the law that was sampled, temperature included; 0 where mask is False
    mask: Tensor  # [B,R] True up to and including the stop token


class Engine(Protocol):
    """What a stage samples with."""

    def generate(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: list[int],
        pad_token_id: int,
    ) -> Responses:
        """One response per prompt, exactly from softmax(logits / temperature), up to the first stop token.

        Draws from the global random stream of the model's device; a server from its own.
        """
        ...

    def sync(self, model: PreTrainedModel) -> None:
        """Take the model's weights as they are now. Engines in this process read them anyway whenever they sample."""
        ...


def no_responses(device: torch.device) -> Responses:
    """What is sampled where a process has no prompts."""
    nothing = torch.zeros(0, 0, device=device)
    return Responses(nothing.long(), nothing, nothing.bool())
