"""Muon makes its step orthogonal, many matrices at a time, and is otherwise what torch has."""

import pytest
import torch

from rlhf.stages.pretrain.muon import Muon, orthogonalised


@pytest.mark.parametrize("shape", [(3, 16, 16), (2, 8, 32), (2, 32, 8)])
def test_singular_values_become_about_one(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalised(torch.randn(shape)))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_scaling_a_gradient_changes_nothing() -> None:
    matrix = torch.randn(1, 6, 4)
    assert torch.allclose(orthogonalised(matrix), orthogonalised(1000 * matrix), atol=1e-5)


def test_a_matrix_alone_is_treated_as_among_others() -> None:
    matrices = torch.randn(5, 6, 4)
    assert torch.allclose(orthogonalised(matrices)[2], orthogonalised(matrices[2:3])[0], atol=1e-6)


def test_three_steps_end_where_torch_ends() -> None:
    torch.manual_seed(0)
    start = [torch.randn(24, 16), torch.randn(24, 16), torch.randn(16, 48)]
    ours, theirs = ([torch.nn.Parameter(w.clone()) for w in start] for _ in range(2))
    optimizers = [Muon(ours, 0.02, 0.1), torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1)]
    for _ in range(3):
        for a, b in zip(ours, theirs, strict=True):
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for a, b, before in zip(ours, theirs, start, strict=True):
        assert torch.allclose(a, b, atol=2e-3)  # torch iterates in bfloat16
        assert not torch.allclose(a, before, atol=2e-2)


def test_a_tall_matrix_takes_a_longer_step_by_the_root_of_its_sides() -> None:
    weight = torch.nn.Parameter(torch.zeros(16, 4))
    weight.grad = torch.randn(16, 4)
    Muon([weight], 0.1, 0.0).step()
    values = torch.linalg.svdvals(weight.detach()) / 0.1
    assert values.mean().item() == pytest.approx(2, rel=0.25)  # sqrt(16 / 4) times about 1


def test_a_matrix_of_inputs_by_outputs_takes_the_step_of_the_one_turned_round() -> None:
    grad = torch.randn(16, 4)
    plain, turned = torch.nn.Parameter(torch.zeros(16, 4)), torch.nn.Parameter(torch.zeros(4, 16))
    plain.grad, turned.grad = grad, grad.T.contiguous()
    Muon([plain], 0.1, 0.0, turned=[turned]).step()
    assert torch.allclose(plain, turned.T, atol=1e-6)


def test_decay_shrinks_the_weights_by_rate_times_decay() -> None:
    weight = torch.nn.Parameter(torch.eye(4))
    weight.grad = torch.zeros(4, 4)
    Muon([weight], 0.1, 0.5).step()
    assert torch.allclose(weight, 0.95 * torch.eye(4))
