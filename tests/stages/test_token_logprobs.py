"""Log-probabilities and entropies of tokens are those of the logits, and so are their gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor

import rlhf.stages.token_logprobs as module
from rlhf.stages.token_logprobs import products, token_logprobs

TOKENS = torch.tensor([3, 0, 10, 3, 7])


def inputs() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(*shape, dtype=torch.float64).float().requires_grad_() for shape in ((5, 4), (11, 4), (11,))]


def plain(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: float, cap: float | None, temperature: float
) -> Any:
    logits = hidden @ weight.T if bias is None else hidden @ weight.T + bias
    logits = (scale * logits if cap is None else cap * (scale * logits / cap).tanh()) / temperature
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(-1, TOKENS[:, None])[:, 0], -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("law", [(1.0, None, 1.0), (0.5, None, 0.7), (2.0, 3.0, 0.7)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("learns", [False, True])
def test_values_and_gradients_are_those_of_all_logits_at_once(
    size: int, law: tuple[float, float | None, float], with_bias: bool, with_entropy: bool, learns: bool
) -> None:
    """Of a loss that weighs each token and each entropy differently; with a head that learns and one that does not."""
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0, 0.0])

    def loss(logprobs: Tensor, entropies: Tensor | None) -> Tensor:
        total = (weights * logprobs).sum()
        return total if entropies is None else total + (weights.flip(0) * entropies).sum()

    hidden, weight, bias = inputs()
    weight.requires_grad_(learns), bias.requires_grad_(learns)
    given = bias if with_bias else None
    found = token_logprobs(hidden, weight, given, TOKENS, law, with_entropy, size)
    loss(*found).backward()
    hidden2, weight2, bias2 = inputs()
    wanted = plain(hidden2, weight2, bias2 if with_bias else None, *law)
    loss(wanted[0], wanted[1] if with_entropy else None).backward()
    assert torch.allclose(found[0], wanted[0], atol=1e-6)
    assert (found[1] is not None) == with_entropy
    if found[1] is not None:
        assert torch.allclose(found[1], wanted[1], atol=1e-6)
    pairs = [(hidden, hidden2)]
    if learns:
        pairs += [(weight, weight2), *([(bias, bias2)] if with_bias else [])]
    for ours, theirs in pairs:
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-5)


def test_no_tokens_at_all_give_no_gradient() -> None:
    hidden, weight, _ = inputs()
    logprobs, _ = token_logprobs(hidden[:0], weight, None, TOKENS[:0], (1.0, None, 1.0), False, 2)
    logprobs.sum().backward()
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize(("learns", "num_products"), [(False, 3), (True, 9)])
def test_a_frozen_head_costs_no_product_for_its_gradient(
    learns: bool, num_products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five tokens in three pieces: a product each forward; of one that learns, another backward, and one for its own
    gradient."""
    made = []
    monkeypatch.setattr(module, "products", lambda *given: made.append(1) or products(*given))
    hidden, weight, _ = inputs()
    token_logprobs(hidden, weight.requires_grad_(learns), None, TOKENS, (1.0, None, 1.0), False, 2)[0].sum().backward()
    assert hidden.grad is not None
    assert len(made) == num_products


def test_logits_are_not_held_while_the_layers_below_have_their_turn() -> None:
    hidden, weight, _ = inputs()
    logprobs, _ = token_logprobs(hidden, weight, None, TOKENS, (1.0, None, 1.0), False, 100)
    step: Any = logprobs.grad_fn
    assert step.kept is not None
    logprobs.sum().backward()
    assert step.kept is None


def test_products_of_16_bit_numbers_are_not_rounded_to_16_bits() -> None:
    """256 + 1 has nine bits: bfloat16 has eight."""
    hidden, weight = torch.tensor([[16.0, 1.0]]).bfloat16(), torch.tensor([[16.0, 1.0]]).bfloat16()
    assert products(hidden, weight).item() == 257.0


def test_under_autocast_states_are_rounded_and_nothing_else() -> None:
    hidden, weight, _ = inputs()
    law = (1.0, None, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        found, entropies = token_logprobs(hidden, weight, None, TOKENS, law, True, 2)
    wanted = plain(hidden.bfloat16().float(), weight, None, *law)
    assert found.dtype == torch.float32
    assert torch.allclose(found, wanted[0], atol=1e-6)
    assert entropies is not None
    assert torch.allclose(entropies, wanted[1], atol=1e-6)
    found.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.float32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the product is a GPU's")
def test_on_a_gpu_16_bit_states_have_products_in_float32_too() -> None:
    hidden = torch.tensor([[16.0, 1.0]] * 8).bfloat16().cuda()
    assert products(hidden, hidden).tolist() == [[257.0] * 8] * 8
