"""The loss of pretraining, made in pieces, is the loss and the gradient that whole logits would give."""

import math
from typing import Any

import pytest
import torch
from stages_world import tiny_policy
from torch.nn.functional import cross_entropy
from torch.profiler import profile
from transformers import AutoModelForCausalLM, Gemma2Config

from rlhf.stages.head_loss import takes_logits_straight
from rlhf.stages.pretrain import objective
from rlhf.stages.pretrain.objective import NextTokenLoss, head_loss


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def test_two_equal_logits_cost_ln_2_a_token() -> None:
    hidden, weight = torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([[2.0, 5.0], [2.0, 5.0]])
    assert head_loss(hidden, weight, torch.tensor([0, 1])).item() == pytest.approx(2 * math.log(2))


def test_a_state_moves_towards_its_target_and_away_from_the_rest_by_their_probabilities() -> None:
    hidden = torch.zeros(1, 2, requires_grad=True)
    head_loss(hidden, torch.tensor([[4.0, 0.0], [0.0, 8.0]]), torch.tensor([0])).backward()
    # Probabilities are 1/2 and 1/2: the slope is (1/2 - 1) · (4, 0) + 1/2 · (0, 8).
    assert torch.equal(hidden.grad, torch.tensor([[-2.0, 4.0]]))


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_pieces_of_logits_give_loss_and_gradients_of_the_whole(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objective, "LOGITS_AT_ONCE", 260 * 7)  # 48 positions in pieces of 7
    model = tiny_policy(shape)
    blocks = torch.randint(260, (3, 17))
    loss = NextTokenLoss(model)(blocks)
    (loss / 48).backward()
    ours = gradients(model)
    logits = model(input_ids=blocks[:, :-1]).logits
    whole = cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten(), reduction="sum")
    (whole / 48).backward()
    theirs = gradients(model)
    assert loss.item() == pytest.approx(whole.item(), rel=1e-6)
    assert ours.keys() == theirs.keys()
    for name, grad in theirs.items():
        assert torch.allclose(ours[name], grad, atol=1e-6), name


def test_a_model_that_does_more_after_its_last_state_is_read_by_its_own_logits() -> None:
    model = tiny_policy()
    head = model.lm_head.forward
    model.lm_head.forward = lambda hidden: 30 * torch.tanh(head(hidden) / 30)  # a cap, as Gemma has one
    blocks = torch.randint(260, (2, 9))
    logits = model(input_ids=blocks[:, :-1]).logits
    whole = cross_entropy(logits.flatten(0, 1), blocks[:, 1:].flatten(), reduction="sum")
    assert NextTokenLoss(model)(blocks).item() == pytest.approx(whole.item(), rel=1e-6)


def test_an_evaluation_multiplies_with_the_head_once_and_a_training_step_thrice() -> None:
    def products(learns: bool) -> int:
        hidden, weight = torch.randn(6, 4), torch.randn(3, 4, requires_grad=True)
        with torch.set_grad_enabled(learns), profile() as seen:
            head_loss(hidden, weight, torch.tensor([0, 1, 2, 0, 1, 2]))
        return sum(event.count for event in seen.key_averages() if event.key == "aten::mm")

    assert (products(learns=False), products(learns=True)) == (1, 3)


def test_a_model_that_caps_its_logits_is_not_taken_for_one_that_does_not() -> None:
    config = Gemma2Config(
        vocab_size=260, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, final_logit_softcapping=30.0, bos_token_id=1, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    assert not takes_logits_straight(AutoModelForCausalLM.from_config(config))
    assert takes_logits_straight(tiny_policy())
