"""Cross entropy straight from hidden states: the number and the gradients that all logits would give."""

import math
from functools import cache, partial
from typing import Any

import pytest
import torch
from stages_world import tiny_policy
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.profiler import profile
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
    loss, correct = head_loss(hidden, weight, targets, with_hits=True)
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


def test_two_equal_logits_cost_ln_2_a_token() -> None:
    hidden, weight = torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([[2.0, 5.0], [2.0, 5.0]])
    assert head_loss(hidden, weight, torch.tensor([0, 1]))[0].item() == pytest.approx(2 * math.log(2))


def test_a_state_moves_towards_its_target_and_away_from_the_rest_by_their_probabilities() -> None:
    hidden = torch.zeros(1, 2, requires_grad=True)
    head_loss(hidden, torch.tensor([[4.0, 0.0], [0.0, 8.0]]), torch.tensor([0]))[0].backward()
    # Probabilities are 1/2 and 1/2: the slope is (1/2 - 1) · (4, 0) + 1/2 · (0, 8).
    assert torch.equal(hidden.grad, torch.tensor([[-2.0, 4.0]]))


def test_an_evaluation_multiplies_with_the_head_once_a_step_thrice_and_hits_are_looked_for_when_asked_for() -> None:
    def calls(learns: bool, with_hits: bool) -> tuple[int, ...]:
        hidden, weight, targets = given()
        with torch.set_grad_enabled(learns), profile() as seen:
            _, hits = head_loss(hidden, weight, targets, with_hits=with_hits)
        assert (hits is not None) == with_hits
        counts = {event.key: event.count for event in seen.key_averages()}
        return tuple(counts.get(f"aten::{name}", 0) for name in ("mm", "exp_", "argmax"))

    assert (calls(False, False), calls(True, False), calls(True, True)) == ((1, 0, 0), (3, 1, 0), (3, 1, 1))


@pytest.mark.filterwarnings("ignore")
def test_compiled_it_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler takes it for; making code of it takes a quarter of a minute."""
    compile = partial(torch.compile, module._read, backend="aot_eager")
    monkeypatch.setattr(module, "_compiled", cache(compile))
    hidden, weight, targets = given()
    plain, hits = head_loss(hidden, weight, targets, with_hits=True)
    compiled, correct = head_loss(hidden, weight, targets, compile=True, with_hits=True)
    torch.testing.assert_close(compiled, plain)
    assert correct == hits
    expected = torch.autograd.grad(plain, (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(compiled, (hidden, weight)), expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch says it to itself
@pytest.mark.parametrize("with_hits", [False, True])
def test_within_code_that_is_compiled_as_a_whole_it_is_part_of_the_one_graph(
    with_hits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is told to compile, which would be a compiler within a compiler."""
    monkeypatch.setattr(module, "COMPILED_AT_ONCE", 33)  # three tokens, in code that is compiled
    hidden, weight, targets = given()

    def whole(hidden: Tensor) -> tuple[Tensor, Tensor | None]:
        loss, hits = head_loss(hidden.sin(), weight, targets, compile=True, with_hits=with_hits)
        return loss * 2, hits

    seen: list[int] = []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        inner = [part.graph for part in graph.modules() if isinstance(part, torch.fx.GraphModule)]
        seen.append(sum("log_softmax" in str(node.target) for nodes in inner for node in nodes.nodes))
        return graph

    compiled, its_hits = torch.compile(whole, fullgraph=True, backend=count)(hidden)
    assert seen == [3]  # pieces
    loss, hits = head_loss(hidden.sin(), weight, targets, with_hits=with_hits)
    torch.testing.assert_close(compiled, 2 * loss)
    assert its_hits == hits
    expected = torch.autograd.grad(2 * loss, (hidden, weight))
    torch.testing.assert_close(torch.autograd.grad(compiled, (hidden, weight)), expected)


def test_models_that_do_more_after_the_last_layer_are_told_apart() -> None:
    assert takes_logits_straight(tiny_policy("llama"))
    assert takes_logits_straight(tiny_policy("gpt2"))
    config = Gemma2Config(
        vocab_size=40, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, final_logit_softcapping=30.0, max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    assert not takes_logits_straight(Gemma2ForCausalLM(config))
