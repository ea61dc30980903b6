"""Which steps of pretraining are skipped, and when it goes back."""

from typing import Any

import pytest
import torch

from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.pretrain.health import Health


def health(state: dict[str, Any] | None = None, **fields: Any) -> Health:
    return Health(PretrainSettings.load({"data": "x.txt", **fields}, "pretrain"), {} if state is None else state)


def step(one: Health, loss: float, skipped: bool = False) -> str | None:
    one.add(one.step + 1, torch.tensor([loss, 1.5, float(skipped)]))
    return one.read(all_steps=True)


def trained(losses: list[float], **fields: Any) -> Health:
    found = health(**fields)
    for loss in losses:
        assert step(found, loss) is None
    return found


def test_a_loss_is_a_spike_beyond_so_many_standard_deviations_above_the_mean() -> None:
    # The last one, 9, is no measure yet.
    assert trained([*[2.0, 4.0] * 20, 9.0], max_spike=8.0).limit == pytest.approx(3 + 8 * 1)


def test_the_first_losses_are_no_measure_yet() -> None:
    assert trained([2.0] * 20).limit == float("inf")
    assert trained([2.0] * 21).limit < 3


def test_a_loss_that_hardly_varies_may_move_by_a_few_hundredths() -> None:
    assert trained([2.0] * 50, max_spike=8.0).limit == pytest.approx(2 + 8 * 0.02)  # at least 1 % of the mean


def test_only_the_last_hundred_losses_count() -> None:
    assert trained([50.0] * 100 + [2.0] * 101).limit < 3
    assert trained([50.0] * 100 + [2.0] * 100).limit > 3


def test_a_skipped_step_is_told_of_and_its_loss_is_no_measure() -> None:
    one = trained([2.0] * 30)
    assert step(one, float("nan"), skipped=True) == "step 31: loss nan, gradient norm 1.5"
    assert one.limit == pytest.approx(2 + 8 * 0.02)
    assert one.state["num_skipped"] == 1


def test_skipped_steps_in_a_row_lead_back_and_a_good_one_breaks_the_row() -> None:
    one, lost = health(max_skipped=3), []
    for skipped in (True, True, False, True, True, True):
        step(one, 9.0, skipped)
        lost.append(one.is_lost)
    assert lost == [False, False, False, False, False, True]
    assert one.state["num_skipped"] == 5


def test_the_last_step_is_not_waited_for_unless_it_must_be_known() -> None:
    one = health()
    for number, loss in enumerate((3.0, 2.0, 1.0), start=1):
        one.add(number, torch.tensor([loss, 1.0, 0.0]))
    one.read(all_steps=False)
    assert (one.step, one.loss) == (2, 2.0)
    one.read(all_steps=True)
    assert (one.loss, one.state["losses"]) == (1.0, [3.0, 2.0, 1.0])


def test_when_a_step_is_read_changes_no_limit() -> None:
    at_once, later = health(), health()
    for number in range(1, 40):
        stats = torch.tensor([2 + number % 5, 1.0, float(number % 7 == 0)])
        limits = [one.limit for one in (at_once, later)]
        assert limits[0] == limits[1]
        for one in (at_once, later):
            one.add(number, stats)
            one.read(all_steps=one is at_once)
    assert limits[0] < 20


def test_when_steps_are_read_changes_no_way_back() -> None:
    for all_steps in (True, False):
        one = health(max_skipped=2)
        for number in range(1, 6):
            one.add(number, torch.tensor([9.0, 1.0, float(number >= 3)]))
            one.read(all_steps)
            if one.is_lost:
                break
        assert (one.step, one.state["num_skipped"]) == (4, 2)


def test_going_back_moves_the_data_on_past_what_was_seen() -> None:
    at_checkpoint = dict(trained([2.0] * 30).state)
    one = health(dict(at_checkpoint))
    for _ in range(3):
        step(one, 9.0, skipped=True)
    lost = dict(one.state)
    one.state |= at_checkpoint  # as a checkpoint's state is loaded
    one.step = 50
    one.went_back(40, lost, "loss nan")
    # Step 40 now sees the data that step 50 would have seen.
    assert one.state["data_offset"] == 10
    assert one.state["num_skipped"] == 3
    assert one.state["skipped_in_a_row"] == 0
    assert one.state["rollbacks"] == [{"to_step": 40, "because": "loss nan"}]
    one.step = 60
    one.went_back(40, dict(one.state), "loss inf")
    assert one.state["data_offset"] == 30
    assert len(one.state["rollbacks"]) == 2


def test_the_best_checkpoint_stays_the_best_when_the_run_goes_back_behind_it() -> None:
    one = health()
    lost = dict(one.state) | {"best_val_loss": 1.0, "best_step": 45, "num_tokens": 450}
    one.state |= {"best_val_loss": 2.0, "best_step": 30, "num_tokens": 300}
    one.went_back(40, lost, "loss nan")
    assert (one.state["best_val_loss"], one.state["best_step"], one.state["num_tokens"]) == (1.0, 45, 450)
