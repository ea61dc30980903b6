"""What is sampled is softmax(logits / temperature), from the prompt alone, up to the first stop token."""

from typing import Any

import pytest
import torch
from stages_world import tiny_policy
from transformers import GenerationConfig

from rlhf.data.collate import pad_left
from rlhf.stages.generation import sample
from rlhf.stages.models import PolicyModel


def first_token_shares(policy: Any, number: int, temperature: float) -> torch.Tensor:
    torch.manual_seed(3)
    tokens = sample(policy, [[7, 8, 9]] * number, 1, temperature, [], 0)[:, 0]
    return torch.bincount(tokens, minlength=260) / number


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_first_tokens_follow_the_softmax_at_the_temperature(policy: Any, temperature: float) -> None:
    number = 20_000
    logits = policy(torch.tensor([[7, 8, 9]])).logits[0, -1] / temperature
    expected = logits.softmax(-1)
    shares = first_token_shares(policy, number, temperature)
    often = expected * number >= 5
    chi2 = ((shares - expected) ** 2 / expected)[often].sum().item() * number
    degrees = int(often.sum())
    assert degrees > 20
    assert chi2 < degrees + 5 * (2 * degrees) ** 0.5  # five standard deviations of a chi-square


def test_a_leftover_generation_config_changes_nothing(policy: Any) -> None:
    plain = first_token_shares(policy, 2000, 1.0)
    policy.generation_config = GenerationConfig(do_sample=True, top_k=1, top_p=0.1, repetition_penalty=9.0)
    assert torch.equal(first_token_shares(policy, 2000, 1.0), plain)


def test_cached_sampling_sees_the_same_model_as_one_forward_pass(policy: Any) -> None:
    """Rows of other lengths, rows that end early and leave the batch: at temperature near 0 sampling is argmax."""
    prompts = [[7, 8, 9, 10, 11, 12], [20, 21], [30]]
    plain = sample(policy, prompts, 8, 1e-4, [], 0)
    stop = plain[1, 2].item()  # the second row ends at its third token at the latest
    stopped = sample(policy, prompts, 8, 1e-4, [stop], 0)
    for row, prompt in enumerate(prompts):
        ids = list(prompt)
        for t in range(stopped.shape[1]):
            best = policy(torch.tensor([ids])).logits[0, -1].argmax().item()
            assert stopped[row, t].item() == best
            ids.append(best)
            if best == stop:
                assert (stopped[row, t + 1 :] == 0).all()
                break


def test_several_stop_tokens_each_end_a_response(policy: Any) -> None:
    plain = sample(policy, [[7, 8], [9]], 6, 1e-4, [], 0)
    stops = [plain[0, 1].item(), plain[1, 2].item()]
    stopped = sample(policy, [[7, 8], [9]], 6, 1e-4, stops, 0)
    assert (stopped[0, 2:] == 0).all()
    assert (stopped[1, 3:] == 0).all()


def test_rows_with_the_same_prompt_get_different_samples(policy: Any) -> None:
    torch.manual_seed(0)
    assert len({tuple(row) for row in sample(policy, [[7, 8]] * 8, 6, 1.0, [], 0).tolist()}) > 1


def test_logprobs_of_what_was_sampled_match_the_sampling_law() -> None:
    """The mean of exp(-logprob) over samples is the vocabulary size: E[1/p] = V when p is the sampling law."""
    policy = tiny_policy()
    for parameter in policy.parameters():
        parameter.data *= 0.5  # so that no token is too rare to be seen
    torch.manual_seed(0)
    prompts = [[7, 8, 9]] * 20_000
    tokens = sample(policy, prompts, 1, 0.7, [], 0)
    ids, mask = pad_left([p + t for p, t in zip(prompts, tokens.tolist(), strict=True)], 0)
    with torch.no_grad():
        logprobs, _, _ = PolicyModel(policy)(ids, mask, 1, temperature=0.7)
    assert (-logprobs).exp().mean().item() == pytest.approx(260, rel=0.1)
