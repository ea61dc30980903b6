"""What the tests of the engines have in common: prompts, and the model's own word on what was sampled."""

from typing import Any

import torch
from torch import Tensor

from rlhf.stages.engines import Responses

PROMPTS = [[5, 6, 7], [8] * 11, [9, 10], [3, 4, 5, 6, 7, 8], [5, 6, 7], [5, 6, 7], [40, 41]]
"""Of unlike lengths; one is there three times."""


@torch.no_grad()
def read(model: Any, prompts: list[list[int]], responses: Responses, temperature: float) -> Tensor:
    """Log-probabilities [B,R] of the responses: each text alone, in one plain forward pass, without our code."""
    found = torch.zeros(responses.tokens.shape)
    for row, (prompt, tokens, mask) in enumerate(zip(prompts, responses.tokens, responses.mask, strict=True)):
        response = tokens[mask]
        logits = model(torch.tensor([prompt + response.tolist()])).logits[0, len(prompt) - 1 : -1].float()
        found[row, : len(response)] = (logits / temperature).log_softmax(-1).gather(-1, response[:, None])[:, 0]
    return found


def assert_sampled(model: Any, prompts: list[list[int]], responses: Responses, temperature: float, stops: list[int],
                   longest: int, pad: int = 0) -> None:  # fmt: skip
    """Each response ends at its first stop token or is as long as it may be, and has the model's log-probabilities."""
    assert responses.tokens.shape == responses.logprobs.shape == responses.mask.shape
    assert responses.logprobs.dtype == torch.float32
    assert len(responses.tokens) == len(prompts)
    for tokens, mask in zip(responses.tokens.tolist(), responses.mask.tolist(), strict=True):
        ends = [t for t, token in enumerate(tokens) if token in stops]
        length = ends[0] + 1 if ends else longest
        assert mask == [t < length for t in range(len(tokens))]
        assert tokens[length:] == [pad] * (len(tokens) - length)
    assert responses.logprobs[~responses.mask].eq(0).all()
    torch.testing.assert_close(responses.logprobs, read(model, prompts, responses, temperature), rtol=0, atol=1e-4)
