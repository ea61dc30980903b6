"""What several processes hold and send each other, by hand."""

from dataclasses import replace

import pytest
import torch
from estimate_world import case, ppo_settings, shape
from transformers import PreTrainedModel

from rlhf.data.errors import RefusedError
from rlhf.stages import budget, budget_ppo, budget_stages
from rlhf.stages.budget import GIB, Held
from rlhf.stages.budget_parallel import Exchange, phase_of, reading, sampling, updating
from rlhf.stages.sft.config import SFTSettings

LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192 + 2 * 64  # attention, feed-forward, norms
REST = 2 * 2048 * 64 + 64  # embeddings and head, the last norm
ALL = 3 * LAYER + REST
GATHERED = 2 * 3 * LAYER + 4 * REST
"""Bytes of weights in float32 where layers are gathered in bf16."""


def policy(dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return budget.causal(shape(), dtype)


def test_one_process_sends_nothing() -> None:
    assert updating([policy()], case("bf16"), 3).sent == 0
    assert reading([policy()], case("bf16", layout="fsdp2"), 3) == Exchange()
    assert sampling(policy(), case("bf16", layout="fsdp2"), "static") == Exchange()


def test_ddp_sums_gradients_up_in_their_own_type_behind_the_last_backward_pass() -> None:
    found = updating([policy()], case("bf16", 4), num_steps=3, num=2)
    # There and back, three quarters of four bytes for each weight; of two microbatches the last hides it.
    assert found == Exchange(sent=3 * 2 * (3 / 4) * 4 * ALL, hidden=(2 / 3) / 2)
    halves = updating([policy(torch.bfloat16), policy(torch.bfloat16)], case("bf16", 4))
    assert halves.sent == 2 * 2 * (3 / 4) * 2 * ALL


def test_weights_in_parts_are_gathered_twice_and_gradients_scattered_in_each_microbatch() -> None:
    found = updating([policy()], case("bf16", 4, "fsdp2"), num_steps=3, num=2)
    # Gradients are summed up in float32.
    assert found.sent == 3 * 2 * (3 / 4) * (2 * GATHERED + 4 * ALL)
    assert found.weights == 2 * 2 * LAYER + 4 * REST  # the layer under way and the next, and what is in no layer
    assert found.gradients == 4 * REST  # of what has more
    assert found.hidden == 1
    assert updating([policy()], case("fp32", 4, "fsdp2")).sent == (3 / 4) * 3 * 4 * ALL


def test_zero2_gathers_weights_once_in_a_microbatch_and_keeps_those_of_models_that_only_read() -> None:
    found = updating([policy(), policy()], case("bf16", 4, "zero2"), 3, 2, others=[policy(torch.bfloat16)])
    sent = 3 * 2 * (3 / 4) * 2 * (GATHERED + 4 * ALL)
    assert found == Exchange(weights=GATHERED + 2 * ALL, gradients=4 * REST, sent=sent, hidden=1)


def test_frozen_weights_are_gathered_and_have_no_gradients() -> None:
    model = policy().requires_grad_(False)
    model.get_output_embeddings().weight.requires_grad_(True)
    found = updating([model], case("bf16", 4, "fsdp2"))
    assert found.sent == (3 / 4) * (2 * GATHERED + 4 * 2048 * 64)
    assert updating([model], case("bf16", 4)).sent == 2 * (3 / 4) * 4 * 2048 * 64


def test_models_that_read_gather_their_weights_once_for_each_pass() -> None:
    found = reading([policy(), policy()], case("bf16", 4, "fsdp2"), num=5)
    assert found.sent == 5 * (3 / 4) * 2 * GATHERED
    assert found.weights == 2 * 2 * LAYER + 4 * REST  # one after the other
    kept = reading([policy(), policy()], case("bf16", 4, "zero2"), 5)
    assert kept == Exchange(2 * GATHERED, sent=(3 / 4) * 2 * GATHERED, hidden=1)


def test_an_engine_here_has_the_whole_model_and_waits_for_it() -> None:
    assert sampling(policy(), case("bf16", 4, "fsdp2"), "static") == Exchange(2 * ALL, sent=(3 / 4) * 2 * ALL)
    assert sampling(policy(), case("bf16", 4, "fsdp2"), "vllm") == Exchange()


HELD = Held(weights=800 * GIB, gradients=400 * GIB, moments=1600 * GIB)
MOST = {"update": {"weights": 100.0 * GIB, "gradients": 400.0 * GIB, "activations": 70.0 * GIB}}


@pytest.mark.parametrize(("layout", "weights", "gradients", "optimiser"), [
    ("ddp", 800 + 100, 400, 1600), ("fsdp2", 800 / 4 + 30, 400 / 4 + 5, 1600 / 4),
])  # fmt: skip
def test_a_process_holds_its_part_and_what_is_whole_at_one_time(
    layout: str, weights: float, gradients: float, optimiser: float
) -> None:
    exchange = Exchange(weights=30 * GIB, gradients=5 * GIB, sent=7, hidden=0.5)
    found = phase_of("update", HELD, case("bf16", 4, layout), MOST, 9, exchange, flops=3)
    assert found.gib == {
        "weights": weights, "optimiser": optimiser, "gradients": gradients, "activations": 70, "cache": 0, "logits": 0
    }  # fmt: skip
    assert (found.sent, found.hidden, found.times, found.flops) == (7, 0.5, 9, 3)


def test_ddp_keeps_room_for_gradients_in_a_phase_that_has_none() -> None:
    found = {n: phase_of("rollout", HELD, case("bf16", n), {"rollout": {}}, 1).gib["gradients"] for n in (1, 4)}
    assert found == {1: 0, 4: 400}


def test_the_moment_with_the_most_may_be_another_where_models_lie_in_parts() -> None:
    moments = {"update": {"activations": 300.0 * GIB}, "update, end": {"gradients": 400.0 * GIB}}
    whole, parts = (phase_of("update", Held(), case("bf16", 4, layout), moments, 1) for layout in ("ddp", "fsdp2"))
    assert (whole.gib["gradients"], parts.gib["activations"]) == (400, 300)


@pytest.mark.usefixtures("untraced")
def test_ppo_in_parts_has_the_whole_policy_while_it_samples_and_a_part_of_the_rest() -> None:
    settings = ppo_settings(num_epochs=2, num_minibatches=1, microbatch_size=1, rollout_batch_size=16)
    alone = budget_ppo.ppo(settings, case("bf16"))
    rollout, scoring, update = budget_ppo.ppo(settings, case("bf16", 8, "fsdp2"))
    assert update.gib["optimiser"] == alone[2].gib["optimiser"] / 8
    scalar = ALL - 2048 * 64 + 64
    held = 4 * (ALL + scalar) + 2 * ALL + 2 * scalar + 64 * 2  # in float32, in bf16 with a head in float32
    assert rollout.gib["weights"] * GIB == pytest.approx(held / 8 + 2 * ALL, rel=1e-3)
    assert rollout.sent == (7 / 8) * 2 * ALL
    # Two microbatches of one episode: policy, critic, reference and reward model read each of them.
    of_learners = 2 * 2 * 3 * LAYER + 4 * (REST + scalar - 3 * LAYER)
    assert scoring.sent == 2 * (7 / 8) * (of_learners + 2 * (ALL + scalar) + 2 * 64)
    assert update.sent == 2 * 2 * (7 / 8) * (2 * of_learners + 4 * (ALL + scalar))


@pytest.mark.usefixtures("untraced")
def test_each_role_of_adapters_has_a_base_of_its_own_where_models_lie_in_parts() -> None:
    settings = ppo_settings(layout="adapters", rollout_batch_size=16)
    asked = replace(case("bf16"), reward_lora=settings.lora)
    shared = budget_ppo.ppo(settings, asked)[1].gib["weights"] * GIB
    eighth, sixteenth = (
        budget_ppo.ppo(settings, replace(asked, num_processes=n, layout="fsdp2"))[1].gib["weights"] * GIB
        for n in (8, 16)
    )
    # Policy, reference, critic and reward model; the critic's and the reward model's has no head.
    bases = 2 * (4 * ALL - 2 * 2048 * 64)
    assert 16 * (eighth - sixteenth) == pytest.approx(shared - 2 * ALL + bases, rel=1e-3)


@pytest.mark.usefixtures("untraced")
def test_raw_text_is_read_in_microbatches_of_its_own() -> None:
    text = {"ptx_data": "x", "ptx_coef": 0.1, "ptx_batch_size": 24, "ptx_block_size": 32}
    # Episodes have 64 tokens, blocks 33, of which three come to a process.
    plain, with_text, in_two = (
        budget_ppo.ppo(ppo_settings(layout="shared_trunk", **more), case("bf16", 8, "fsdp2"))[2]
        for more in ({}, text, {**text, "microbatch_tokens": 66})
    )
    assert (with_text.sent, in_two.sent) == (2 * plain.sent, 3 * plain.sent)
    assert (with_text.passes, in_two.passes) == (2 * plain.passes, 3 * plain.passes)


@pytest.mark.parametrize(("fields", "message"), [
    ({"rollout_batch_size": 8, "num_minibatches": 2}, r"ppo\.rollout_batch_size / num_minibatches: 4 cannot be shared"),
    ({"ptx_data": "x", "ptx_coef": 1, "ptx_batch_size": 4}, r"ppo\.ptx_batch_size: 4 cannot be shared evenly by 8"),
])  # fmt: skip
def test_batches_that_cannot_be_shared_evenly_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        budget_ppo.ppo(ppo_settings(**fields), case(num_processes=8))


@pytest.mark.usefixtures("untraced")
def test_with_fewer_rows_than_a_batch_a_step_takes_those_that_there_are() -> None:
    fields = {"data": "x", "max_length": 32, "global_batch_size": 64}
    settings = SFTSettings.load(fields, "sft")
    (few,) = budget_stages.sft(settings, replace(case(num_processes=8), num_rows=16))
    (whole,) = budget_stages.sft(settings, case(num_processes=8))
    assert few.flops == pytest.approx(whole.flops / 4)
