"""One token per row from softmax(logits / temperature), with its log-probability."""

import torch
from torch import Tensor


def shaped(logits: Tensor, scale: float, softcap: float | None, temperature: float) -> Tensor:
    """Logits [n,V] in float32 as the model means them, divided by the temperature."""
    logits = logits.float() * scale
    if softcap is not None:
        logits = softcap * (logits / softcap).tanh()
    return logits / temperature


def draw(logits: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens [n], log-probabilities [n]) of logits [n,V] in float32, from one uniform number per row.

    `torch.multinomial` draws a number per token of the vocabulary, which takes a fifth of a small model's rollout.
    """
    logprobs = logits.log_softmax(-1)
    exact = torch.float32 if logits.device.type == "mps" else torch.float64  # which mps lacks
    cumulative = logprobs.exp().to(exact).cumsum(-1)
    point = torch.rand(len(logits), 1, dtype=exact, device=logits.device) * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, point, right=True).clamp(max=logits.shape[-1] - 1)
    return tokens[:, 0], logprobs.gather(-1, tokens)[:, 0]
