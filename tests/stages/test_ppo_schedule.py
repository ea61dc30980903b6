"""Options that act over a whole PPO run: schedules, warm-up, the moving average, which checkpoint is kept."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from ppo_world import flat, model_folders, run_ppo, settings
from safetensors.torch import load_file
from stages_world import tiny_policy

from rlhf.data.errors import SettingsError
from rlhf.stages.artifact import Artifact
from rlhf.stages.models import PolicyModel
from rlhf.stages.ppo.evaluate import Answer
from rlhf.stages.ppo.selection import Selection, over_optimised
from rlhf.stages.ppo.train import schedule
from rlhf.stages.ppo.update import MovingAverage
from rlhf.stages.runtime import Runtime

Given = dict[str, str]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Given:
    return model_folders(tmp_path_factory.mktemp("models"), tokenizer)


def rates(**fields: Any) -> list[float]:
    chosen = settings(num_iterations=8, **fields)
    return [schedule(iteration, chosen) for iteration in range(8)]


def test_learning_rates_fall_to_zero_or_stay() -> None:
    assert rates() == pytest.approx([1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8])
    assert rates(schedule="constant") == [1] * 8
    cosine = rates(schedule="cosine")
    assert cosine[0] == 1
    assert cosine[4] == pytest.approx(0.5)
    assert cosine[2] == pytest.approx((1 + math.sqrt(0.5)) / 2)
    assert cosine == sorted(cosine, reverse=True)


def test_warm_up_rises_in_a_straight_line_to_what_the_schedule_says() -> None:
    constant = rates(schedule="constant", warmup_iterations=4)
    assert constant == pytest.approx([0.25, 0.5, 0.75, 1, 1, 1, 1, 1])
    warm = rates(warmup_iterations=2)
    assert warm[:3] == pytest.approx([0.5, 7 / 8, 6 / 8])


def test_only_the_critic_learns_in_its_warm_up(given: Given, tmp_path: Path) -> None:
    run_ppo(tmp_path / "ppo", given, critic_warmup_iterations=3, num_iterations=5, eval_every=5)
    rows = Artifact(tmp_path / "ppo").metrics
    assert [abs(row["kl"]) < 1e-5 for row in rows] == [True, True, True, True, False]  # the KL is the rollout's
    assert ["ratio" in row for row in rows] == [False, False, False, True, True]
    assert all(row["critic_grad_norm"] > 0 for row in rows)
    assert rows[1]["value_loss"] != rows[0]["value_loss"]
    with pytest.raises(SettingsError, match="leaves no policy update"):
        settings(critic_warmup_iterations=4, num_iterations=4)


def test_the_moving_average_of_five_steps_towards_one() -> None:
    policy = PolicyModel(tiny_policy().double())
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.zero_()
    average = MovingAverage(policy, 0.992)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(1)
    for _ in range(5):
        average.update(policy)
    for weights in average.weights.values():
        assert weights.flatten()[0].item() == pytest.approx(0.03936510, abs=1e-7)


def test_the_moving_average_of_bfloat16_weights_is_float32_and_moves() -> None:
    policy = PolicyModel(tiny_policy().bfloat16())
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(1)
    average = MovingAverage(policy, 0.992)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.fill_(1.1)
    average.update(policy)
    for weights in average.weights.values():
        assert weights.dtype == torch.float32
        assert 1.0007 < weights.flatten()[0].item() < 1.0009


def test_swapping_the_moving_average_twice_changes_nothing() -> None:
    policy = PolicyModel(tiny_policy())
    average = MovingAverage(policy, 0.5)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(1)
    before = flat(policy)
    average.swap(policy)
    assert torch.allclose(flat(policy), before - 1, atol=1e-5)
    average.swap(policy)
    assert torch.equal(flat(policy), before)


def test_a_moving_average_does_not_touch_the_run_itself(given: Given, tmp_path: Path) -> None:
    for name, decay in (("with", 0.9), ("without", None)):
        run_ppo(tmp_path / name, given, ema_decay=decay, num_iterations=2)
    ours, theirs = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("with", "without"))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


# --- which checkpoint is kept


def answer(score: float, kl: float) -> Answer:
    return Answer("prompt", "response", score, None, kl, True, 3)


@pytest.mark.parametrize(("seen", "kept"), [
    ([(1.0, 5.0), (3.0, 60.0), (2.0, 6.0)], 3),  # the best score lies over the budget
    ([(1.0, 5.0), (3.0, 6.0), (2.0, 7.0)], 2),
    ([(1.0, 60.0), (3.0, 70.0), (2.0, 80.0)], 3),  # nothing within it: the last
    ([(9.0, 60.0), (1.0, 5.0), (8.0, 60.0)], 2),
    ([(1.0, 5.0), (1.0, 1.0)], 1),  # the earlier of two equal ones
])  # fmt: skip
def test_the_best_score_within_the_kl_budget_is_kept(
    given: Given, tmp_path: Path, tokenizer: Any, seen: list[tuple[float, float]], kept: int
) -> None:
    (tmp_path / "ppo").mkdir()
    run = Runtime(settings(**given, kl_budget=50.0), tmp_path / "ppo")
    selection = Selection(run, tokenizer, sft=[answer(0.0, 0.0)])
    for step, (score, kl) in enumerate(seen, 1):
        policy = tiny_policy(seed=step)
        evaluator: Any = lambda _, score=score, kl=kl: [answer(score, kl)]  # noqa: E731
        row = selection.consider(step, PolicyModel(policy), evaluator)
        assert (row["eval_score"], row["eval_kl"]) == (score, kl)
    metrics = selection.finish(tmp_path / "ppo")
    run.close()
    assert metrics["best_step"] == kept
    assert (metrics["score"], metrics["kl"]) == seen[kept - 1]
    assert metrics["over_optimised"] is (seen[-1][1] > 50)
    saved = load_file(tmp_path / "ppo" / "model" / "model.safetensors")["model.norm.weight"]
    embedding = load_file(tmp_path / "ppo" / "model" / "model.safetensors")["model.embed_tokens.weight"]
    assert saved.shape == (16,)
    assert torch.equal(embedding, tiny_policy(seed=kept).model.embed_tokens.weight)


def evaluation(step: int, score: float, kl: float, quality: float | None = None) -> dict[str, Any]:
    judged = {} if quality is None else {"true_quality": quality}
    return {"step": step, "within_budget": kl <= 50, "score": float(score), "kl": float(kl), **judged}


@pytest.mark.parametrize(("evaluations", "reason"), [
    ([evaluation(1, 1, 5), evaluation(2, 2, 85)], "KL ended at 85.0 nats per response, over kl_budget 50"),
    ([evaluation(1, 1, 5, 0.6), evaluation(2, 2, 9, 0.5)], "from iteration 1 to 2 the score rose from 1.00 to 2.00 "
                                                           "while the quality by the judge fell from 0.600 to 0.500"),
    ([evaluation(1, 1, 85), evaluation(2, 2, 20)], None),  # it came back
    ([evaluation(1, 1, 5, 0.6), evaluation(2, 2, 9, 0.58)], None),  # noise
    ([evaluation(1, 3, 5, 0.6), evaluation(2, 2, 9, 0.3)], None),  # worse in both is no over-optimisation
    ([evaluation(1, 1, 5, 0.5), evaluation(2, 2, 9, 0.6)], None),
    ([evaluation(1, 1, 5)], None),
])  # fmt: skip
def test_a_run_that_went_too_far_is_marked_with_the_reason(
    evaluations: list[dict[str, Any]], reason: str | None
) -> None:
    found = over_optimised(evaluations, 50.0)
    assert (found is None) if reason is None else (found is not None and reason in found)


def test_an_over_optimised_run_says_so_in_its_manifest(given: Given, tmp_path: Path) -> None:
    run_ppo(tmp_path / "ppo", given, kl_budget=0.01)
    metrics = Artifact(tmp_path / "ppo").manifest["metrics"]
    assert metrics["over_optimised"] is True
    assert "over kl_budget 0.01" in metrics["over_optimised_because"]
