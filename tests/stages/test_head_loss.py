"""Cross entropy straight from hidden states: the number and the gradients that all logits would give."""

import shutil

import pytest
import torch
from stages_world import tiny_policy
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Gemma2Config, Gemma2ForCausalLM

from rlhf.stages import head_loss as module
from rlhf.stages.head_loss import head_loss, takes_logits_straight


def given() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 4, requires_grad=True), torch.randn(11, 4, requires_grad=True)
    return hidden, weight, torch.randint(11, (7,))


@pytest.mark.parametrize("at_once", [2**27, 33, 1])
def test_pieces_of_the_logits_give_the_loss_and_the_gradients_of_all(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", at_once)  # all, three tokens, one
    hidden, weight, targets = given()
    logits = hidden @ weight.T
    expected = cross_entropy(logits, targets, reduction="sum")
    slopes = torch.autograd.grad(expected / 3, (hidden, weight))
    loss, correct = head_loss(hidden, weight, targets)
    (loss / 3).backward()
    torch.testing.assert_close(loss, expected)
    assert correct == (logits.argmax(-1) == targets).sum()
    torch.testing.assert_close((hidden.grad, weight.grad), slopes)


def test_a_frozen_head_gets_no_gradient_and_an_evaluation_makes_none() -> None:
    hidden, weight, targets = given()
    weight.requires_grad_(False)
    head_loss(hidden, weight, targets)[0].backward()
    assert weight.grad is None
    assert hidden.grad is not None
    with torch.no_grad():
        assert not head_loss(hidden, weight, targets)[0].requires_grad


@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs g++")
@pytest.mark.filterwarnings("ignore")
def test_compiled_it_is_the_same() -> None:
    hidden, weight, targets = given()
    plain, _ = head_loss(hidden, weight, targets)
    compiled, correct = head_loss(hidden, weight, targets, compile=True)
    torch.testing.assert_close(compiled, plain)
    assert correct == head_loss(hidden, weight, targets)[1]
    expected = torch.autograd.grad(plain, (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(compiled, (hidden, weight)), expected)


def test_models_that_do_more_after_the_last_layer_are_told_apart() -> None:
    assert takes_logits_straight(tiny_policy("llama"))
    assert takes_logits_straight(tiny_policy("gpt2"))
    config = Gemma2Config(
        vocab_size=40, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, final_logit_softcapping=30.0, max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    assert not takes_logits_straight(Gemma2ForCausalLM(config))
