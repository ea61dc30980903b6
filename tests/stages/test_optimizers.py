"""The learning rate of each step, by hand."""

import math

import pytest
import torch

from rlhf.stages.optimizers import learning_rate_at, scaled_step


def rates(schedule: str, num_steps: int, warmup: int = 0, end_share: float = 0.0, **more: float) -> list[float]:
    return [learning_rate_at(step, num_steps, 8.0, warmup, end_share, schedule, **more) for step in range(num_steps)]


def test_a_line_goes_up_and_down_again() -> None:
    assert rates("linear", 7, warmup=2) == pytest.approx([4, 8, 8, 6, 4, 2, 0])


def test_a_line_ends_at_its_share_of_the_peak() -> None:
    assert rates("linear", 5, end_share=0.5) == pytest.approx([8, 7, 6, 5, 4])


def test_a_cosine_is_half_way_down_in_the_middle() -> None:
    assert rates("cosine", 5) == pytest.approx([8, 8 * 0.853553, 4, 8 * 0.146447, 0], rel=1e-5)


def test_constant_stays() -> None:
    assert rates("constant", 4, warmup=2) == pytest.approx([4, 8, 8, 8])


def test_wsd_is_stable_and_then_decays_over_its_share_of_all_steps() -> None:
    assert rates("wsd", 10, warmup=2, decay_share=0.4) == pytest.approx([4, 8, 8, 8, 8, 8, 6, 4, 2, 0])


def test_noam_is_the_papers_formula() -> None:
    # Step from 1: min(s^-0.5, s · 4^-1.5), times the peak.
    assert rates("noam", 9, warmup=4)[:4] == pytest.approx([1, 2, 3, 4])
    assert rates("noam", 9, warmup=4)[8] == pytest.approx(8 / 3)


def test_in_float16_each_optimizer_sees_gradients_that_are_unscaled_once_and_a_spike_is_left_out() -> None:
    weights = [torch.nn.Parameter(torch.tensor([1.0])) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def gradients() -> None:
        for weight, optimizer in zip(weights, optimizers, strict=True):
            scaler.scale(0.5 * weight.sum()).backward()
            scaler.unscale_(optimizer)  # as clipping does

    gradients()
    scaled_step(scaler, optimizers, take=True)
    assert [weight.item() for weight in weights] == [0.5, 0.5]
    gradients()
    scaled_step(scaler, optimizers, take=False)
    assert [weight.item() for weight in weights] == [0.5, 0.5]
    assert weights[0].grad is None
    gradients()
    weights[1].grad = torch.tensor([math.inf])
    scaler._per_optimizer_states.clear()
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    scaled_step(scaler, optimizers, take=True)  # the scaler leaves out the one that overflowed, and goes down
    assert weights[1].item() == 0.5
    assert scaler.get_scale() == 4.0
