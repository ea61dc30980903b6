"""Steps without numbers are never taken, but named and counted; too many in a row end the stage."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ppo_world import World, make_targets, model_folders
from ppo_world import settings as ppo_settings
from reward_world import marked, new_run, policy_folder, ranking, rankings_file, run_reward, tokenised
from stages_world import inputs, run_stage
from test_train import Killed, at_step
from torch import Tensor

from rlhf.stages import judge, microbatches
from rlhf.stages.artifact import Artifact
from rlhf.stages.bad_numbers import leave_out_overflow
from rlhf.stages.late import decides_on_device
from rlhf.stages.models import load_scalar, load_tokenizer
from rlhf.stages.ppo import update as ppo_update
from rlhf.stages.reward import train as reward_stage
from rlhf.stages.reward.evaluate import scores_of_others
from rlhf.stages.runtime import Runtime
from rlhf.stages.sft.train import CheckpointedTrainer

Chain = dict[str, Path]
NAN, INF = float("nan"), float("inf")


def rows(folder: Path) -> dict[int, dict[str, Any]]:
    return {row["step"]: row for row in Artifact(folder).metrics}


class Spoiler:
    """Calls of a function, counted from 1, whose first result is multiplied by something that is no number."""

    def __init__(self, function: Callable[..., Any], by: float = NAN) -> None:
        self.function, self.by, self.calls, self.bad = function, by, 0, set[int]()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        found = self.function(*arguments, **named)
        if self.calls not in self.bad:
            return found
        return (found[0] * self.by, *found[1:]) if isinstance(found, tuple) else found * self.by


# --- reward


@pytest.fixture
def rankings(tmp_path: Path) -> dict[str, str]:
    return {"model": policy_folder(tmp_path), "data": rankings_file(tmp_path / "rows.jsonl", marked(64))}


@pytest.fixture
def loss(monkeypatch: pytest.MonkeyPatch) -> Spoiler:
    """The ranking loss, which is called once a step."""
    spoiler = Spoiler(reward_stage.ranking_loss)
    monkeypatch.setattr(reward_stage, "ranking_loss", spoiler)
    return spoiler


def one_step(run: Runtime) -> tuple[dict[str, Tensor], bool]:
    """Figures of a step, and whether it moved the weights; no gradient may be left."""
    tokenizer = load_tokenizer(run.settings.model)
    model = load_scalar(run.settings.model, tokenizer, new_head=True)
    before = [p.detach().clone() for p in model.parameters()]
    batch = tokenised(run, tokenizer, [ranking(r["prompt"], r["responses"], r["ranks"]) for r in marked(8)])
    found = reward_stage.optimise(run, model, torch.optim.SGD(model.parameters(), lr=0.1), batch, 0)
    assert all(p.grad is None for p in model.parameters())
    return found, any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("by", [NAN, INF])
def test_a_step_whose_loss_is_no_number_moves_no_weight(tmp_path: Path, loss: Spoiler, by: float) -> None:
    run = new_run(tmp_path / "run")
    assert one_step(run)[1]
    loss.bad, loss.by = {2}, by
    found, moved = one_step(run)
    run.close()
    assert not moved
    assert not found["loss"].isfinite()


def test_all_processes_leave_out_a_step_in_which_one_of_them_has_no_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path / "run")
    monkeypatch.setattr(run, "sum", lambda values: values + NAN)  # what another one adds
    moved = one_step(run)[1]
    run.close()
    assert not moved


def test_a_skipped_step_is_named_counted_and_its_numbers_are_in_no_row(
    tmp_path: Path, rankings: dict[str, str], loss: Spoiler, capsys: pytest.CaptureFixture[str]
) -> None:
    loss.bad = {2, 4}
    metrics = run_reward(tmp_path / "reward", **rankings)
    told = [line for line in capsys.readouterr().out.splitlines() if "skipped" in line]
    assert told == [f"reward: step {step} skipped: loss nan, gradient norm nan" for step in (2, 4)]
    assert metrics["num_skipped"] == 2
    found = rows(tmp_path / "reward")
    assert [step for step, row in found.items() if "loss" not in row] == [2, 4]
    assert [row.get("num_skipped") for row in found.values()][:4] == [None, 1, 1, 2]


def test_too_many_in_a_row_stop_the_stage_and_running_again_goes_on_from_the_last_good_checkpoint(
    tmp_path: Path, rankings: dict[str, str], loss: Spoiler, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run_reward(tmp_path / "whole", **rankings, save_every=2)
    loss.calls, loss.bad = 0, {4, 5}
    message = (
        r"2 steps in a row were skipped, the last of them step 5 \(loss nan, gradient norm nan\): training diverged; "
        r"lower reward\.learning_rate\. The last good checkpoint is step 2; run again to go on from it"
    )
    with pytest.raises(RuntimeError, match=message):
        run_reward(tmp_path / "reward", **rankings, save_every=2, max_skipped=2)
    loss.bad = set()
    again = run_reward(tmp_path / "reward", **rankings, save_every=2, max_skipped=2)
    assert "resuming from step 2 of " in capsys.readouterr().out
    assert {k: v for k, v in again.items() if k != "peak_gib"} == {k: v for k, v in whole.items() if k != "peak_gib"}


def test_a_checkpoint_from_which_no_step_could_be_taken_is_not_called_good(
    tmp_path: Path, rankings: dict[str, str], loss: Spoiler
) -> None:
    loss.bad = {5, 6}
    with pytest.raises(RuntimeError, match="The last good checkpoint is step 2"):
        run_reward(tmp_path / "reward", **rankings, save_every=2, max_skipped=2)
    assert [path.name for path in (tmp_path / "reward" / "checkpoints").glob("step-*")] == ["step-00000002"]
    loss.calls, loss.bad = 0, {1, 2}
    with pytest.raises(RuntimeError, match="There is no good checkpoint: run again to start over"):
        run_reward(tmp_path / "other", **rankings, max_skipped=2)


def test_no_checkpoint_is_written_after_a_skipped_step(
    tmp_path: Path, rankings: dict[str, str], loss: Spoiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved: list[int] = []
    monkeypatch.setattr(Runtime, "save", lambda self, step: saved.append(step))
    loss.bad = {4}
    run_reward(tmp_path / "reward", **rankings, save_every=1)
    assert saved == [1, 2, 3, 5]


def test_a_resumed_run_counts_on(
    tmp_path: Path, rankings: dict[str, str], loss: Spoiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss.bad = {2}

    def die() -> None:
        raise Killed

    with monkeypatch.context() as patch:
        at_step(patch, 5, die)
        with pytest.raises(Killed):
            run_reward(tmp_path / "reward", **rankings, save_every=3)
    loss.bad = {loss.calls + 2}  # step 5
    assert run_reward(tmp_path / "reward", **rankings, save_every=3)["num_skipped"] == 2


def test_a_judge_that_gives_no_number_is_named_with_the_row_and_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = [1.0, None, NAN]
    monkeypatch.setattr(judge, "load_function", lambda _: lambda prompts, responses: given)
    with pytest.raises(ValueError, match=r"judge a:b: None for row 2, not a finite number: 'q' / 'y'; so are 1 more"):
        judge.judge_answers("a:b", ["p", "q", "r"], ["x", "y", "z"])
    given[:] = [1.0, 2]
    with pytest.raises(ValueError, match="judge a:b: 2 qualities for 3 responses"):
        judge.judge_answers("a:b", ["p", "q", "r"], ["x", "y", "z"])


def test_another_reward_models_scores_that_are_no_numbers_are_counted_and_not_compared(
    tmp_path: Path, rankings: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_reward(tmp_path / "reward", **rankings)
    run = new_run(tmp_path / "run", compare_with=[str(tmp_path / "reward" / "model")])
    texts = [ranking(r["prompt"], r["responses"], r["ranks"]) for r in marked(3)]
    data = tokenised(run, load_tokenizer(run.settings.model), texts)
    monkeypatch.setattr("rlhf.stages.reward.evaluate.all_scores", lambda *_: [[1.0], [INF], [2.0]])
    ((first, second, third),) = scores_of_others(run, data).values()
    run.close()
    assert (first, second, third) == ([1.0], None, [2.0])
    assert "gives no finite scores to answers in 1 of 3 held-out rankings; left out" in capsys.readouterr().out


# --- sft


@pytest.fixture
def sft_loss(monkeypatch: pytest.MonkeyPatch) -> Spoiler:
    """The loss of SFT's trainer, which is called once a microbatch; all rows of a step are one, if no setting cuts."""
    monkeypatch.setattr(microbatches, "PASS_TOKENS", 10**6)
    spoiler = Spoiler(CheckpointedTrainer.compute_loss)
    monkeypatch.setattr(CheckpointedTrainer, "compute_loss", lambda *arguments, **named: spoiler(*arguments, **named))
    return spoiler


def test_sft_skips_a_step_and_the_means_of_its_log_are_those_of_the_other_steps(
    chain: Chain, tmp_path: Path, sft_loss: Spoiler, capsys: pytest.CaptureFixture[str]
) -> None:
    sft_loss.bad = {2}
    metrics = run_stage("sft", tmp_path / "each", **inputs("sft", chain))
    sft_loss.calls = 0
    run_stage("sft", tmp_path / "by-two", **inputs("sft", chain), log_every=2)
    each, by_two = rows(tmp_path / "each"), rows(tmp_path / "by-two")
    assert metrics["num_skipped"] == 1
    assert "sft: step 2 skipped: loss nan, gradient norm nan" in capsys.readouterr().out
    assert 2 not in each
    assert by_two[2]["num_skipped"] == 1
    for name in ("loss", "mean_token_accuracy"):
        assert by_two[2][name] == pytest.approx(each[1][name])  # of step 1 alone
        assert by_two[4][name] == pytest.approx((each[3][name] + each[4][name]) / 2)
    assert "grad_norm" not in by_two[2]


def test_a_step_that_sft_skips_moves_no_weight(
    chain: Chain, tmp_path: Path, sft_loss: Spoiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Tensor] = []
    spoiled = CheckpointedTrainer.training_step

    def watch(self: Any, model: torch.nn.Module, *more: Any) -> Tensor:
        seen.append(torch.cat([p.detach().flatten() for p in model.parameters()]).clone())
        return spoiled(self, model, *more)

    monkeypatch.setattr(CheckpointedTrainer, "training_step", watch)
    sft_loss.bad = {4}  # the second of two microbatches: the first of step 2 has made gradients
    run_stage("sft", tmp_path / "sft", **inputs("sft", chain), microbatch_size=5, weight_decay=0.1)
    assert torch.equal(seen[1], seen[2])
    assert not torch.equal(seen[2], seen[3])


def test_sft_stops_after_too_many_and_keeps_the_last_good_checkpoint(
    chain: Chain, tmp_path: Path, sft_loss: Spoiler
) -> None:
    sft_loss.bad = {4, 5}
    with pytest.raises(RuntimeError, match=r"lower sft\.learning_rate\. The last good checkpoint is step 2"):
        run_stage("sft", tmp_path / "sft", **inputs("sft", chain), max_skipped=2)
    sft_loss.bad = set()
    assert run_stage("sft", tmp_path / "sft", **inputs("sft", chain), max_skipped=2)["num_skipped"] == 0


# --- ppo


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, str]:
    return model_folders(tmp_path_factory.mktemp("models"), tokenizer)


@pytest.fixture(params=["decides on the device", "is asked to step"])
def world(tmp_path: Path, given: dict[str, str], request: pytest.FixtureRequest) -> Iterator[World]:
    """With either kind of optimizer."""
    (tmp_path / "run").mkdir()
    run = Runtime(ppo_settings(**given, num_epochs=1, num_minibatches=2, ema_decay=0.5), tmp_path / "run")
    world = World(run, sgd=request.param == "is asked to step")
    assert decides_on_device(world.optimizers[0]) == (request.param == "decides on the device")
    yield world
    run.close()


@pytest.fixture
def ppo_loss(monkeypatch: pytest.MonkeyPatch) -> Spoiler:
    """The policy's loss, which is called once an optimiser step."""
    spoiler = Spoiler(ppo_update.policy_loss)
    monkeypatch.setattr(ppo_update, "policy_loss", spoiler)
    return spoiler


def test_an_optimiser_step_of_ppo_without_numbers_is_left_out_of_weights_and_means(
    world: World, ppo_loss: Spoiler, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout = world.rollout()
    seen: list[Tensor] = []
    clip = world.run.accelerator.clip_grad_norm_

    def watch(*arguments: Any) -> Any:
        seen.append(world.weights())
        return clip(*arguments)

    world.run.accelerator.clip_grad_norm_ = watch
    ppo_loss.bad = {1}
    found = world.update(rollout, make_targets(rollout))
    told = "ppo: iteration 1: optimiser step 1 of 2 skipped: policy loss "
    said = capsys.readouterr().out
    assert told in said
    assert "policy gradient norm nan, critic gradient norm " in said
    assert torch.equal(seen[0], seen[2])  # neither policy nor critic has moved
    assert not torch.equal(seen[2], world.weights())
    assert (found["num_updates"], world.run.state["num_skipped"]) == (1, 1)
    assert all(map(torch.isfinite, map(torch.tensor, found.values())))
    # The ratio of a first step is 1, and so is the mean over the steps that were made.
    assert found["ratio"] == pytest.approx(1, abs=1e-5)
    assert found["ratio_var"] == pytest.approx(0, abs=1e-4)


def test_an_update_without_any_step_says_nothing(world: World, ppo_loss: Spoiler) -> None:
    ppo_loss.bad = {1, 2}
    before = world.weights()
    assert world.update(world.rollout()) == {}
    assert torch.equal(before, world.weights())


def test_a_moving_average_counts_the_steps_that_were_taken(world: World, ppo_loss: Spoiler) -> None:
    """Of decay 0.5: half way from the start to where one step leads, however many more are left out."""
    ppo_loss.bad = {2}
    start = world.weights()
    world.update(world.rollout())
    average = torch.cat([x.flatten() for x in world.updater.ema.weights.values()])
    moved = world.weights()[: len(average)] - start[: len(average)]
    assert moved.abs().max() > 0
    torch.testing.assert_close(average - start[: len(average)], moved / 2)


def test_an_iteration_without_a_step_is_skipped_as_a_whole_and_so_many_stop_ppo(
    chain: Chain, tmp_path: Path, ppo_loss: Spoiler
) -> None:
    ppo_loss.bad = {5, 6, 7, 8, *range(13, 30)}  # four steps an iteration: the second, and from the fourth on all
    message = r"2 steps in a row .* step 5 \(of its optimiser steps none could be taken: .* policy gradient norm nan"
    with pytest.raises(RuntimeError, match=message + r".*lower ppo\.learning_rate or .*\. The last good checkpoint"):
        run_stage("ppo", tmp_path / "ppo", **inputs("ppo", chain), max_skipped=2, save_every=1)
    lines = (tmp_path / "ppo" / "metrics.jsonl").read_text().splitlines()
    found = {row["step"]: row for row in map(json.loads, lines)}
    assert ["score" in found[step] for step in (1, 2, 3, 4)] == [True, False, True, False]
    assert found[2]["num_skipped"] == 4
    assert found[2]["kl_coef"] == found[3]["kl_coef"]


def test_a_scaler_that_looks_for_its_scale_makes_no_bad_step_of_an_overflow() -> None:
    numbers = {"policy_loss": 1.0, "policy_grad_norm": math.inf, "critic_grad_norm": 2.0}
    leave_out_overflow(torch.amp.GradScaler("cpu"), numbers)
    assert numbers == {"policy_loss": 1.0, "critic_grad_norm": 2.0}
    numbers = {"loss": math.nan, "grad_norm": math.inf}
    leave_out_overflow(None, numbers)
    assert numbers.keys() == {"loss", "grad_norm"}
