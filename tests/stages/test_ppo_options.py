"""Every option of PPO does what its line in the settings says, in numbers worked out by hand."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ppo_world import World, flat, make_targets, model_folders, run_ppo, settings
from torch import Tensor

from rlhf.data.collate import Blocks
from rlhf.data.errors import SettingsError
from rlhf.stages.artifact import Artifact
from rlhf.stages.models import PolicyModel
from rlhf.stages.ppo import update as update_module
from rlhf.stages.ppo.objective import AdaptiveKL, loss_denominator, policy_loss
from rlhf.stages.ppo.rollout import Rollout
from rlhf.stages.ppo.shaping import Targets, shaped_scores, targets, update_moments
from rlhf.stages.runtime import Runtime

Given = dict[str, str]
NewWorld = Callable[..., World]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Given:
    return model_folders(tmp_path_factory.mktemp("models"), tokenizer)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, given: Given) -> Iterator[Runtime]:
    run = Runtime(settings(**given), tmp_path_factory.mktemp("ppo"))
    yield run
    run.close()


@pytest.fixture
def new_world(run: Runtime, given: Given) -> NewWorld:
    """Makes worlds; options of `World` by keyword, all else is a setting."""

    def make(**fields: Any) -> World:
        options = {name: fields.pop(name) for name in ("sgd", "ptx") if name in fields}
        run.settings = settings(**{**given, **fields})
        return World(run, **options)

    return make


def episodes(lengths: list[int], **fields: Any) -> Rollout:
    """Responses of known lengths in 8 slots; nothing else is known of them."""
    mask = torch.arange(8) < torch.tensor(lengths)[:, None]
    zeros, ids = torch.zeros(mask.shape), torch.ones(mask.shape).long()
    start = Rollout(
        input_ids=ids, attention_mask=mask, mask=mask, logprobs=zeros, sampled_logprobs=zeros, ref_logprobs=zeros,
        entropy=zeros, values=zeros, scores=torch.zeros(len(lengths)), reward_scores=torch.zeros(len(lengths), 1),
        ended=torch.ones(len(lengths)).bool(),
    )  # fmt: skip
    return replace(start, **fields)


def shaped(rollout: Rollout, state: dict[str, Any] | None = None, **fields: Any) -> list[float]:
    alone: Any = SimpleNamespace(settings=settings(max_new_tokens=8, **fields), state={} if state is None else state)
    alone.sum = lambda x: x
    return shaped_scores(alone, rollout).tolist()


def one_step(world: World, rollout: Rollout, learned: Targets, kl_coef: float = 0.0) -> Tensor:
    """How far one plain gradient step at rate 1 moves the policy: minus the gradient."""
    before = flat(world.policy)
    world.update(rollout, learned, kl_coef=kl_coef)
    return flat(world.policy) - before


STEP: dict[str, Any] = {
    "sgd": True, "learning_rate": 1.0, "critic_learning_rate": 0.0, "num_epochs": 1, "num_minibatches": 1,
    "max_grad_norm": 1e9,
}  # fmt: skip


def no_advantages(rollout: Rollout) -> Targets:
    zeros = torch.zeros(rollout.mask.shape)
    return Targets(zeros, zeros, rollout.mask)


# --- KL


@pytest.mark.parametrize("kind", [None, "k2", "k3"])
def test_kl_in_the_loss_adds_kl_coef_times_the_estimators_gradient(new_world: NewWorld, kind: str | None) -> None:
    world = new_world(**STEP, kl_in="loss", kl_estimator=kind)
    rollout = world.rollout()
    generator = torch.Generator().manual_seed(0)
    rollout.ref_logprobs = rollout.ref_logprobs + torch.randn(rollout.mask.shape, generator=generator)
    logprobs, _, _ = PolicyModel(world.policy)(rollout.input_ids, rollout.attention_mask, 6, 0.7)
    d = (logprobs - rollout.ref_logprobs)[rollout.mask]
    kl = (torch.exp(-d) - 1 + d if kind == "k3" else d.square() / 2).mean()  # k2 by default
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(kl, list(world.policy.parameters()))])
    moved = one_step(world, rollout, no_advantages(rollout), kl_coef=0.01)
    torch.testing.assert_close(moved, -0.01 * gradient, rtol=1e-3, atol=1e-6)


def test_kl_in_the_loss_is_reported_and_leaves_the_rewards_alone(new_world: NewWorld) -> None:
    world = new_world(kl_in="loss", learning_rate=0.0)
    rollout = world.rollout()
    rollout.ref_logprobs = rollout.ref_logprobs + 1
    assert world.update(rollout)["kl_loss"] == pytest.approx(0.5, abs=1e-4)  # k2 of a log-ratio of −1
    fields: dict[str, Any] = {"whiten_advantages": False}
    without = targets(rollout, rollout.scores, 0.0, settings(**fields))
    inside = targets(rollout, rollout.scores, 0.3, settings(kl_in="loss", **fields))
    assert torch.equal(inside.advantages, without.advantages)
    assert not torch.equal(targets(rollout, rollout.scores, 0.3, settings(**fields)).advantages, without.advantages)


@pytest.mark.parametrize(("fields", "message"), [
    ({"kl_in": "loss", "kl_estimator": "k1"}, "k1 as a loss has a gradient of zero on average"),
    ({"kl_in": "reward", "kl_estimator": "k2"}, "k2 in the reward leads to another optimum"),
    ({"kl_in": "reward", "kl_estimator": "k3"}, "k3 in the reward leads to another optimum"),
])  # fmt: skip
def test_an_estimator_that_does_not_do_its_work_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        settings(**fields)


VLLM = {"engine": "vllm", "server_url": "http://127.0.0.1:8000"}


@pytest.mark.parametrize(("rollout", "weights"), [
    (VLLM, [1.2, 0.5, 2]),  # 0.6 / 0.5, 0.2 / 0.4, and 0.9 / 0.3, which is too much
    (VLLM | {"importance_cap": 1.1}, [1.1, 0.5, 1.1]),
    (VLLM | {"importance_cap": None}, [1, 1, 1]),
    ({}, [1, 1, 1]),  # what samples here samples from the policy
])  # fmt: skip
def test_advantages_of_what_a_server_sampled_are_weighed_and_returns_are_not(
    rollout: dict[str, Any], weights: list[float]
) -> None:
    ours, theirs = (torch.tensor([[*probs, *[1.0] * 5]]).log() for probs in ([0.6, 0.2, 0.9], [0.5, 0.4, 0.3]))
    sampled = episodes([3], logprobs=ours, sampled_logprobs=theirs, ref_logprobs=ours, scores=torch.tensor([2.0]))
    chosen = settings(max_new_tokens=8, whiten_advantages=False, gae_lambda=1.0, rollout=rollout)
    learned = targets(sampled, sampled.scores, 0.0, chosen)
    assert learned.advantages[0].tolist() == pytest.approx([*(2 * weight for weight in weights), *[0] * 5])
    assert learned.returns[0, :3].tolist() == [2, 2, 2]


def test_the_adaptive_coefficient_is_updated_once_an_iteration_with_its_episodes(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    update = AdaptiveKL.update

    def watch(self: AdaptiveKL, kl: float, num_episodes: int) -> float:
        calls.append(num_episodes)
        return update(self, kl, num_episodes)

    monkeypatch.setattr(AdaptiveKL, "update", watch)
    run_ppo(
        tmp_path / "ppo", given, kl_coef=0.2, kl_target=0.5, kl_horizon=100, num_samples_per_prompt=4,
        learning_rate=1e-3,
    )  # fmt: skip
    assert calls == [8, 8, 8, 8]  # episodes, not prompts
    rows = Artifact(tmp_path / "ppo").metrics
    expected = 0.2
    for row in rows:
        assert row["kl_coef"] == pytest.approx(expected)
        expected *= 1 + min(max(row["kl"] / 0.5 - 1, -0.2), 0.2) * 8 / 100
    assert rows[1]["kl_coef"] == pytest.approx(0.2 * (1 - 0.2 * 0.08))  # no KL yet


def test_target_kl_ends_an_iterations_updates(new_world: NewWorld) -> None:
    for target, updates in ((None, 12), (1e9, 12), (1e-9, 1)):  # the second sees a KL, and is not made
        world = new_world(target_kl=target, num_epochs=3, num_minibatches=4)
        stats = world.update(world.rollout())
        assert stats["num_updates"] == updates
    world = new_world(target_kl=1e-9, learning_rate=0.0, num_epochs=3)
    assert world.update(world.rollout())["num_updates"] == 6


def test_a_step_that_led_too_far_counts_only_if_its_losses_are_numbers(
    new_world: NewWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the second, whose value loss is none: the statistics are the first step's."""
    losses: list[Any] = []
    value_loss = update_module.value_loss

    def spoilt(*given: Any) -> Any:
        loss, stats = value_loss(*given)
        losses.append(loss)
        return loss, {name: value * (torch.nan if len(losses) > 1 else 1) for name, value in stats.items()}

    monkeypatch.setattr(update_module, "value_loss", spoilt)
    world = new_world(target_kl=1e-9, num_epochs=1, num_minibatches=2)
    stats = world.update(world.rollout())
    assert len(losses) == 2
    assert stats["num_updates"] == 1
    assert stats["value_loss"] == pytest.approx(losses[0].item())
    assert world.updater.fault.startswith("policy loss ")
    assert "value loss nan" in world.updater.fault


# --- scores


def test_normalised_scores_use_the_moments_of_all_scores_so_far(run: Runtime) -> None:
    state: dict[str, Any] = {}
    first = shaped(episodes([1, 1, 1], scores=torch.tensor([1.0, 2.0, 3.0])), state, normalise_scores=True)
    assert first == pytest.approx([-math.sqrt(1.5), 0, math.sqrt(1.5)], abs=1e-5)
    # 1, 2, 3 and 6: mean 3, variance (4 + 1 + 0 + 9) / 4
    assert shaped(episodes([1], scores=torch.tensor([6.0])), state, normalise_scores=True) == pytest.approx(
        [3 / math.sqrt(3.5)], abs=1e-5
    )
    assert json.loads(json.dumps(state)) == state  # it goes into the checkpoint


def test_moments_of_large_scores_that_lie_close_together_are_exact() -> None:
    far = torch.tensor([10001.0, 10002.0, 10003.0])
    assert shaped(episodes([1] * 3, scores=far), normalise_scores=True) == pytest.approx(
        [-math.sqrt(1.5), 0, math.sqrt(1.5)], abs=1e-3
    )


def test_equal_scores_are_normalised_to_zero(run: Runtime) -> None:
    for score in (0.0, 3.7, -1e4):
        assert shaped(episodes([1, 1], scores=torch.full((2,), score)), normalise_scores=True) == pytest.approx([0, 0])
    assert update_moments(run, {"count": 0.0, "sum": 0.0, "squares": 0.0}, torch.full((4,), 5.0)) == (5.0, 1e-4)


def test_scores_are_normalised_then_clipped_then_charged_for_a_missing_eos() -> None:
    rollout = episodes([1] * 4, scores=torch.tensor([0.0, 0, 0, 100]), ended=torch.tensor([True, True, False, True]))
    # mean 25, standard deviation 43.3: −.577 thrice and 1.732
    fields: dict[str, Any] = {"normalise_scores": True, "score_clip": 1.0, "missing_eos_penalty": 5.0}
    assert shaped(rollout, **fields) == pytest.approx([-0.57735, -0.57735, -5, 1], abs=1e-4)
    subtracted = shaped(rollout, missing_eos="subtract", **fields)
    assert subtracted == pytest.approx([-0.57735, -0.57735, -5.57735, 1], abs=1e-4)


def test_clipping_scores_leaves_the_kl_part_of_the_reward_alone() -> None:
    chosen = settings(max_new_tokens=8, score_clip=1.0, whiten_advantages=False, gae_lambda=1.0)
    rollout = episodes([2], scores=torch.tensor([9.0]), logprobs=torch.tensor([[30.0, 10, 0, 0, 0, 0, 0, 0]]))
    scores = torch.tensor(shaped(rollout, score_clip=1.0))
    learned = targets(rollout, scores, 0.5, chosen)
    assert learned.returns[0, :3].tolist() == pytest.approx([1 - 20, 1 - 5, 0])


def test_the_price_of_length_grows_over_the_buffer() -> None:
    lengths = [1, 4, 5, 6, 7, 8]
    price = shaped(episodes(lengths), overlong_buffer=4, overlong_penalty=2.0)
    assert price == pytest.approx([0, 0, -0.5, -1, -1.5, -2])
    assert shaped(episodes(lengths)) == [0] * 6


# --- advantages


@pytest.mark.parametrize(("placement", "advantages", "returns"), [
    ("eos", [0.45125, 0.475, 0.5], [0.95125, 0.975, 1.0]),
    ("after_eos", [0.63175, 0.665, 0.7], [1.13175, 1.165, 1.2]),
])  # fmt: skip
def test_the_place_of_the_score(placement: str, advantages: list[float], returns: list[float]) -> None:
    values = torch.tensor([[0.5, 0.5, 0.5, 5, 9, 9, 9, 9]])
    rollout = episodes([3], values=values, logprobs=torch.full((1, 8), 7.0), ref_logprobs=torch.full((1, 8), 7.0))
    rollout.logprobs[:, 3:] = 99  # no KL after the end
    chosen = settings(score_placement=placement, whiten_advantages=False)
    learned = targets(rollout, torch.tensor([1.0]), 0.1, chosen)
    assert learned.advantages[0].tolist() == pytest.approx([*advantages, 0, 0, 0, 0, 0], abs=1e-6)
    assert learned.returns[0, :3].tolist() == pytest.approx(returns, abs=1e-6)
    assert learned.value_mask[0].tolist() == [True] * 3 + [placement == "after_eos"] + [False] * 4


def test_both_places_agree_in_a_response_without_room_after_it() -> None:
    rollout = episodes([8], values=torch.full((1, 8), 0.5))
    found = [
        targets(rollout, torch.tensor([1.0]), 0.1, settings(score_placement=place, whiten_advantages=False))
        for place in ("eos", "after_eos")
    ]
    assert torch.equal(found[0].advantages, found[1].advantages)


def test_the_critics_lambda_changes_returns_and_not_advantages() -> None:
    rollout = episodes([3], values=torch.tensor([[0.5, 0.5, 0.5, 0, 0, 0, 0, 0]]))
    learned = targets(rollout, torch.tensor([1.0]), 0.0, settings(critic_gae_lambda=1.0, whiten_advantages=False))
    assert learned.advantages[0, :3].tolist() == pytest.approx([0.45125, 0.475, 0.5])
    assert learned.returns[0].tolist() == pytest.approx([1, 1, 1, 0, 0, 0, 0, 0])  # reward to go


def test_whitening_of_advantages_leaves_the_returns_alone_and_can_be_left_out() -> None:
    rollout = episodes([3, 1], values=torch.full((2, 8), 0.5))
    scores = torch.tensor([1.0, -1.0])
    white = targets(rollout, scores, 0.0, settings())
    plain = targets(rollout, scores, 0.0, settings(whiten_advantages=False))
    assert torch.equal(white.returns, plain.returns)
    assert plain.advantages[1, 0].item() == -1.5
    counted = white.advantages[rollout.mask]
    assert counted.mean().item() == pytest.approx(0, abs=1e-6)
    assert counted.std(unbiased=False).item() == pytest.approx(1, abs=1e-5)
    assert not white.advantages[~rollout.mask].any()


def test_whitened_rewards_have_standard_deviation_one_and_their_mean() -> None:
    rollout = episodes([2, 2])
    scores = torch.tensor([3.0, 1.0])  # rewards 0, 3, 0, 1: mean 1, variance 1.5
    learned = targets(rollout, scores, 0.0, settings(whiten_rewards=True, whiten_advantages=False, gae_lambda=1.0))
    std = math.sqrt(1.5)
    last = [1 + 2 / std, 1]
    assert learned.returns[:, 1].tolist() == pytest.approx(last, abs=1e-5)
    assert learned.returns[:, 0].tolist() == pytest.approx([x + 1 - 1 / std for x in last], abs=1e-5)


# --- losses


def test_aggregation_decides_what_a_token_weighs() -> None:
    mask = torch.tensor([[True, False, False, False], [True] * 4])  # one token of loss +1, four of −1
    advantages, zeros = torch.tensor([[-1.0, 9, 9, 9], [1.0] * 4]), torch.zeros(2, 4)
    for aggregation, expected in (("token_mean", -3 / 5), ("sequence_mean", 0.0), ("constant", -3 / 8)):
        denominator = loss_denominator(mask, aggregation, 5, 2, 4)  # type: ignore[arg-type]
        loss, _ = policy_loss(zeros, zeros, advantages, mask, denominator=denominator)
        assert loss.item() == pytest.approx(expected), aggregation


def test_dual_clip_and_value_clip_reach_the_losses(new_world: NewWorld) -> None:
    fields = {"learning_rate": 0.0, "critic_learning_rate": 0.0}
    world = new_world(**fields, dual_clip=3.0)
    rollout = world.rollout()
    rollout.logprobs, rollout.values = rollout.logprobs - 2, rollout.values - 1  # ratios e², values moved by 1
    bad = Targets(torch.where(rollout.mask, -1.0, 0.0), rollout.values + 3, rollout.mask)
    stats = world.update(rollout, bad)
    assert stats["policy_loss"] == pytest.approx(3, abs=1e-4)
    assert stats["dual_clip_fraction"] == pytest.approx(1)
    assert stats["value_loss"] == pytest.approx((3 - 0.2) ** 2 / 2, abs=1e-3)
    assert stats["value_clip_fraction"] == pytest.approx(1)
    stats = new_world(**fields, value_clip_range=None).update(rollout, bad)
    assert stats["policy_loss"] == pytest.approx(math.exp(2), rel=1e-4)
    assert "dual_clip_fraction" not in stats
    assert stats["value_loss"] == pytest.approx((3 - 1) ** 2 / 2, abs=1e-3)
    assert stats["value_clip_fraction"] == 0


def test_an_entropy_bonus_raises_the_entropy(new_world: NewWorld) -> None:
    found = []
    for coef in (0.0, 1.0):
        world = new_world(entropy_coef=coef, learning_rate=1e-2, num_epochs=4)
        rollout = world.rollout()
        world.update(rollout, no_advantages(rollout))
        found.append((rollout.entropy[rollout.mask].mean(), world.rollout().entropy[rollout.mask].mean()))
    assert found[0][1] == pytest.approx(found[0][0].item(), abs=1e-5)
    assert found[1][1] > found[1][0] + 0.1


@pytest.mark.parametrize("size", [1, 4])
def test_ptx_adds_its_weight_times_the_language_modelling_gradient(new_world: NewWorld, size: int) -> None:
    stream = Blocks(np.arange(1, 34), 8, "text")
    blocks = stream[range(4)]
    fields = {**STEP, "microbatch_size": size}
    rollout = new_world(**fields).rollout()
    plain = one_step(new_world(**fields), rollout, make_targets(rollout))
    text = {"ptx_coef": 0.3, "ptx_data": "unused.jsonl", "ptx_batch_size": 4, "ptx_block_size": 8}
    world = new_world(**fields, **text, ptx=stream)
    loss = world.policy(input_ids=blocks, labels=blocks).loss
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(world.policy.parameters()))])
    both = one_step(world, rollout, make_targets(rollout))
    torch.testing.assert_close(both, plain - 0.3 * gradient, rtol=1e-3, atol=1e-5)
    assert (new_world(**fields, **text, ptx=stream).update(rollout)["ptx_loss"]) == pytest.approx(loss.item(), rel=1e-4)


@pytest.mark.parametrize("fields", [{"ptx_coef": 0.3}, {"ptx_data": "text.jsonl"}])
def test_ptx_needs_weight_and_text(fields: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="ptx_coef and ptx_data go together"):
        settings(**fields)
