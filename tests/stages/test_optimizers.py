"""The learning rate of each step, by hand."""

import pytest

from rlhf.stages.optimizers import learning_rate_at


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
