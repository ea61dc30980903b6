"""One iteration's updates: how many steps, on what, and what may not change them."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from ppo_world import LENGTHS, World, flat, make_targets, model_folders, settings
from torch import Tensor
from torch.nn.functional import pad

from rlhf.stages.microbatches import Piece
from rlhf.stages.models import PolicyModel
from rlhf.stages.ppo import update as update_module
from rlhf.stages.ppo.objective import policy_loss
from rlhf.stages.ppo.rollout import Rollout
from rlhf.stages.ppo.shaping import Targets
from rlhf.stages.runtime import Runtime

NewWorld = Callable[..., World]
JUNK = (float("nan"), float("inf"), float("-inf"), 9e9)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, str]:
    return model_folders(tmp_path_factory.mktemp("models"), tokenizer)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, given: dict[str, str]) -> Iterator[Runtime]:
    run = Runtime(settings(**given), tmp_path_factory.mktemp("ppo"))
    yield run
    run.close()


@pytest.fixture
def new_world(run: Runtime, given: dict[str, str]) -> NewWorld:
    """Makes worlds; options of `World` by keyword, all else is a setting."""

    def make(**fields: Any) -> World:
        options = {name: fields.pop(name) for name in ("shape", "sgd", "dropout", "ptx") if name in fields}
        run.settings = settings(**{**given, **fields})
        return World(run, **options)

    return make


def updated(world: World, rollout: Rollout | None = None, targets: Targets | None = None) -> Tensor:
    """Weights after one iteration's updates."""
    world.update(rollout or world.rollout(), targets)
    return world.weights()


# --- ratio


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_at_learning_rate_zero_every_ratio_is_one_in_every_epoch_whatever_dropout_the_config_names(
    new_world: NewWorld, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[float] = []

    def watch(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, *more: Any) -> Any:
        moved.append(torch.where(mask, logprobs - old, 0.0).abs().max().item())
        return policy_loss(logprobs, old, advantages, mask, *more)

    monkeypatch.setattr(update_module, "policy_loss", watch)
    world = new_world(shape=shape, dropout=0.3, learning_rate=0.0, num_epochs=3, microbatch_size=2)
    stats = world.update(world.rollout())
    assert len(moved) == 12
    assert max(moved) < 1e-5
    assert (stats["clip_fraction"], stats["approx_kl"]) == (0, pytest.approx(0, abs=1e-9))


def test_the_first_update_sees_minus_the_mean_advantage(new_world: NewWorld) -> None:
    world = new_world(num_epochs=1, num_minibatches=1)
    rollout = world.rollout()
    targets = make_targets(rollout)
    mean = targets.advantages[rollout.mask].mean().item()
    assert world.update(rollout, targets)["policy_loss"] == pytest.approx(-mean, abs=1e-5)


# --- steps


def test_steps_are_epochs_times_minibatches_for_policy_and_critic_each(
    new_world: NewWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = new_world(num_epochs=3, num_minibatches=4, microbatch_size=1)
    calls = Counter[int]()
    for number, optimizer in enumerate(world.optimizers):
        optimizer.register_step_post_hook(lambda *_, number=number: calls.update([number]))
    assert world.update(world.rollout())["num_updates"] == 12
    assert calls == {0: 12, 1: 12}


@pytest.mark.parametrize("packing", [False, True])
def test_between_its_first_pass_and_its_last_an_update_waits_for_no_device(
    new_world: NewWorld, monkeypatch: pytest.MonkeyPatch, packing: bool
) -> None:
    """What waits is to read a number, and to ask where a mask is True."""
    world = new_world(num_epochs=2, num_minibatches=2, microbatch_size=2, packing=packing)
    rollout, happened = world.rollout(), list[str]()
    of_models = {"find_packed_sequence_indices", "_attend_in_pack"}  # of what is not packed, and on a CPU of what is

    def noted(call: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*given: Any) -> Any:
            if (caller := sys._getframe(1).f_code.co_name) not in of_models:
                happened.append(f"{call.__name__} in {caller}")
            return call(*given)

        return calling

    for name in ("item", "tolist", "nonzero", "__bool__", "__float__", "cpu"):
        monkeypatch.setattr(Tensor, name, noted(getattr(Tensor, name)))
    monkeypatch.setattr(world.run, "backward", noted(world.run.backward))
    assert world.update(rollout)["num_updates"] == 4
    passes = [place for place, what in enumerate(happened) if what.startswith("backward")]
    assert len(passes) == 16  # two models read two microbatches in each step
    assert {what.split()[0] for what in happened[passes[0] : passes[-1]]} == {"backward"}
    assert any(what.startswith("tolist") for what in happened[passes[-1] :])


def test_every_episode_is_used_once_an_epoch_in_an_order_of_its_own(
    new_world: NewWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    cut = Rollout.cut

    def watch(self: Rollout, piece: Piece) -> Rollout:
        used.extend(piece.rows)
        return cut(self, piece)

    monkeypatch.setattr(Rollout, "cut", watch)
    world = new_world(num_epochs=3, num_minibatches=2, microbatch_size=2)
    for iteration in range(2):
        world.update(world.rollout(), iteration=iteration)
    epochs = [tuple(used[i : i + 8]) for i in range(0, len(used), 8)]
    assert len(epochs) == 6
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    # Within a minibatch the longest come first, so an order is told by what lies in the first half.
    assert len({frozenset(epoch[:4]) for epoch in epochs}) > 3


def test_gradients_are_forgotten_between_steps(new_world: NewWorld) -> None:
    """At learning rate 0 with one minibatch all steps are the same; a gradient that stayed would add up."""
    norms = []
    for epochs in (1, 3):
        world = new_world(num_epochs=epochs, num_minibatches=1, learning_rate=0.0, critic_learning_rate=0.0)
        stats = world.update(world.rollout())
        norms.append((stats["policy_grad_norm"], stats["critic_grad_norm"]))
        assert all(p.grad is None for p in (*world.policy.parameters(), *world.critic.parameters()))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_microbatches_change_neither_weights_nor_statistics(
    new_world: NewWorld, minibatches: int, aggregation: str
) -> None:
    found = []
    for size in (1, 2, 8):
        world = new_world(
            sgd=True, num_minibatches=minibatches, microbatch_size=size, aggregation=aggregation, kl_in="loss",
            entropy_coef=0.1, dual_clip=3.0, target_kl=1e3, max_grad_norm=1e9, learning_rate=1e-3,
        )  # fmt: skip
        stats = world.update(world.rollout())
        found.append((world.weights(), stats))
    for weights, stats in found[1:]:
        torch.testing.assert_close(weights, found[0][0], rtol=1e-5, atol=2e-6)
        assert stats == pytest.approx(found[0][1], rel=1e-4, abs=1e-5)


def test_the_gradient_norm_is_that_before_clipping_and_clipping_acts_on_the_whole_step(new_world: NewWorld) -> None:
    reported, moved = [], []
    for limit, size in ((1e6, 8), (0.01, 8), (0.01, 1)):
        world = new_world(
            sgd=True, learning_rate=1.0, critic_learning_rate=1.0, num_epochs=1, num_minibatches=1,
            max_grad_norm=limit, microbatch_size=size,
        )  # fmt: skip
        before = [flat(world.policy).double(), flat(world.critic).double()]
        stats = world.update(world.rollout())
        after = [flat(world.policy).double(), flat(world.critic).double()]
        reported.append([stats["policy_grad_norm"], stats["critic_grad_norm"]])
        moved.append([(x - y).norm().item() for x, y in zip(after, before, strict=True)])
    assert reported[0] == pytest.approx(moved[0], rel=1e-4)
    assert reported[1] == pytest.approx(reported[0], rel=1e-4)
    assert reported[2] == pytest.approx(reported[0], rel=1e-4)
    assert moved[1] == pytest.approx([0.01, 0.01], rel=1e-2)
    assert moved[2] == pytest.approx([0.01, 0.01], rel=1e-2)


def test_statistics_of_an_update_are_means_over_all_tokens_of_all_steps(new_world: NewWorld) -> None:
    """At learning rate 0 the mean of two minibatches' means is known: each over the minibatch's own tokens."""
    world = new_world(learning_rate=0.0, critic_learning_rate=0.0, num_epochs=1, num_minibatches=1, microbatch_size=1)
    rollout = world.rollout()
    targets = make_targets(rollout)
    stats = world.update(rollout, targets)
    mask = rollout.mask
    assert stats["ratio"] == pytest.approx(1, abs=1e-6)
    assert stats["return_mean"] == pytest.approx(targets.returns[mask].mean().item(), abs=1e-5)
    assert stats["value_mean"] == pytest.approx(rollout.values[mask].mean().item(), abs=1e-5)
    errors = (rollout.values - targets.returns)[mask].square() / 2
    assert stats["value_loss"] == pytest.approx(errors.mean().item(), rel=1e-4)


# --- what may not matter


def test_ids_after_the_end_change_not_one_bit(new_world: NewWorld) -> None:
    plain = updated(new_world())
    world = new_world()
    rollout = world.rollout()
    spoiled = replace(rollout, input_ids=torch.where(rollout.attention_mask, rollout.input_ids, 99))
    assert not torch.equal(spoiled.input_ids, rollout.input_ids)
    assert torch.equal(updated(world, spoiled), plain)


@pytest.mark.parametrize("junk", JUNK)
def test_junk_in_masked_slots_changes_not_one_bit(new_world: NewWorld, junk: float) -> None:
    fields: dict[str, Any] = {"kl_in": "loss", "entropy_coef": 0.1, "aggregation": "sequence_mean"}
    plain = updated(new_world(**fields))
    world = new_world(**fields)
    rollout = world.rollout()
    spoil = {
        name: torch.where(rollout.mask, getattr(rollout, name), junk)
        for name in ("logprobs", "ref_logprobs", "values", "entropy")
    }
    targets = make_targets(rollout)
    targets.advantages, targets.returns = (
        torch.where(rollout.mask, x, junk) for x in (targets.advantages, targets.returns)
    )
    assert torch.equal(updated(world, replace(rollout, **spoil), targets), plain)


def test_more_padding_on_either_side_changes_nothing(new_world: NewWorld) -> None:
    for aggregation in ("token_mean", "sequence_mean", "constant"):
        fields = {"sgd": True, "aggregation": aggregation, "max_grad_norm": 1e9, "learning_rate": 1e-3}
        plain = updated(new_world(**fields))
        world = new_world(**fields)
        rollout = world.rollout()
        wide = {name: pad(getattr(rollout, name), (7, 9)) for name in ("input_ids", "attention_mask")}
        slots = ("mask", "logprobs", "ref_logprobs", "entropy", "values")
        wider = replace(rollout, **wide, **{name: pad(getattr(rollout, name), (0, 9)) for name in slots})
        targets = make_targets(rollout)
        padded = Targets(*(pad(x, (0, 9)) for x in (targets.advantages, targets.returns, targets.value_mask)))
        torch.testing.assert_close(updated(world, wider, padded), plain, rtol=1e-5, atol=2e-6)


def test_the_token_mean_counts_tokens_and_not_slots(new_world: NewWorld) -> None:
    world = new_world(num_epochs=1, num_minibatches=1, learning_rate=0.0)
    rollout = world.rollout()
    ones = torch.where(rollout.mask, 1.0, 0.0)
    stats = world.update(rollout, Targets(ones, ones, rollout.mask))
    assert sum(LENGTHS) == 28  # of 48 slots
    assert stats["policy_loss"] == pytest.approx(-1, abs=1e-5)


def test_empty_responses_are_one_action_each_and_leave_everything_finite(new_world: NewWorld) -> None:
    world = new_world()
    rollout = world.rollout()
    first = torch.zeros_like(rollout.mask)
    first[:, 0] = True
    before = world.weights()
    stats = world.update(replace(rollout, mask=first), Targets(first.float(), first.float(), first))
    assert world.weights().isfinite().all()
    assert not torch.equal(world.weights(), before)
    assert all(torch.tensor(value).isfinite() for value in stats.values())


def test_log_ratios_of_a_hundred_leave_everything_finite(new_world: NewWorld) -> None:
    world = new_world(kl_in="loss", kl_estimator="k3", dual_clip=3.0)
    rollout = world.rollout()
    away = torch.where(torch.arange(8)[:, None] % 2 == 0, 100.0, -100.0)
    stats = world.update(replace(rollout, logprobs=rollout.logprobs + away, ref_logprobs=rollout.ref_logprobs + away))
    assert world.weights().isfinite().all()
    assert all(torch.tensor(value).isfinite() for value in stats.values())


# --- what stays


def test_ten_updates_leave_the_reference_as_it_was_and_move_policy_and_critic(new_world: NewWorld) -> None:
    world = new_world(num_epochs=1, num_minibatches=1)
    before = flat(world.reference), flat(world.policy), flat(world.critic)
    rollout = world.rollout()
    for iteration in range(10):
        world.update(rollout, iteration=iteration)
    assert torch.equal(flat(world.reference), before[0])
    for model, start in ((world.policy, before[1]), (world.critic, before[2])):
        assert not torch.equal(flat(model), start)
    assert world.policy.lm_head.weight is world.policy.model.embed_tokens.weight  # still tied
    assert world.critic.classifier.score.weight.requires_grad


def test_the_same_update_twice_is_equal_bit_for_bit(new_world: NewWorld) -> None:
    assert torch.equal(updated(new_world()), updated(new_world()))


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_values_do_not_depend_on_batch_mates(new_world: NewWorld, shape: str) -> None:
    rollout = new_world(shape=shape).rollout()
    world = new_world(shape=shape)
    for row in range(8):
        kept = rollout.input_ids[row][rollout.attention_mask[row]][None]
        with torch.no_grad():
            alone = world.critic(kept, torch.ones_like(kept).bool())[0, -LENGTHS[row] - 1 : -1]
            logprobs, _, _ = PolicyModel(world.policy)(kept, torch.ones_like(kept).bool(), LENGTHS[row], 0.7)
        assert torch.allclose(rollout.values[row, : LENGTHS[row]], alone, atol=1e-5)
        assert torch.allclose(rollout.logprobs[row, : LENGTHS[row]], logprobs[0], atol=1e-5)
