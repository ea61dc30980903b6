"""The loss of pretraining, made in pieces, is the loss and the gradient that whole logits would give."""

from typing import Any

import pytest
import torch
from stages_world import tiny_policy
from torch.nn.functional import cross_entropy

from rlhf.stages import head_loss as module
from rlhf.stages.pretrain.objective import NextTokenLoss


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_pieces_of_logits_give_loss_and_gradients_of_the_whole(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOGITS_AT_ONCE", 260 * 7)  # 48 positions in pieces of 7
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


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch says it to itself
def test_a_compiled_model_is_one_graph_and_makes_no_mask() -> None:
    loss_of = NextTokenLoss(tiny_policy())
    blocks = torch.randint(260, (2, 9))
    expected = loss_of(blocks)
    causal: list[bool] = []

    def look(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        for node in graph.graph.nodes:
            if "scaled_dot_product" in str(node.target):
                causal.append(bool(node.kwargs["is_causal"]) and node.kwargs["attn_mask"] is None)
        return graph

    found = torch.compile(loss_of.losses, fullgraph=True, dynamic=False, backend=look)(blocks)
    assert causal == [True, True]  # two layers
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_step_that_failed_leaves_the_next_one_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_policy()
    loss_of, blocks = NextTokenLoss(model), torch.randint(260, (2, 9))
    before = loss_of(blocks).item(), model.config._attn_implementation

    def fails(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(model.model.norm, "forward", fails)
        with pytest.raises(torch.OutOfMemoryError):
            loss_of(blocks)
    assert (loss_of(blocks).item(), model.config._attn_implementation) == before
