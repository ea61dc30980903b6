"""What the stages are said to hold and to get through."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from estimate_world import PRETRAIN, SFT, case, ppo_settings, shape
from torch import nn
from transformers import BertConfig, BertForSequenceClassification, LlamaForCausalLM, LlamaForSequenceClassification

from rlhf.stages import budget, budget_ppo, budget_stages
from rlhf.stages.budget import GIB, Phase
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.layout import Roles
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.profile import cache_bytes_per_token
from rlhf.stages.reward.config import RewardSettings
from rlhf.stages.settings import LoraSettings
from rlhf.stages.sft.config import SFTSettings


@pytest.fixture
def sampling_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the passes of an iteration none but those of the rollout are traced."""
    monkeypatch.setattr(budget_ppo, "_score", lambda footprint, *_: footprint.at("scoring"))
    monkeypatch.setattr(budget_ppo, "_update", lambda footprint, *_: footprint.at("update"))


LAYER = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192 + 2 * 64  # attention, feed-forward, norms
POLICY = 3 * LAYER + 2 * 2048 * 64 + 64  # three layers, embeddings and head, the last norm
SCALAR = 3 * LAYER + 2048 * 64 + 2 * 64  # a score's head instead


def test_a_token_has_a_key_and_a_value_for_each_layer_and_head_that_has_its_own() -> None:
    assert cache_bytes_per_token(shape(), 4) == 2 * 3 * 2 * 16 * 4


def roles_of(settings: PPOSettings, precision: str) -> Roles:
    models = budget_ppo.models_of(settings, case(precision), [shape(), shape()])
    return Roles(models.policy, models.reference, models.critic, nn.ModuleList(models.rewards))  # type: ignore[arg-type]


@pytest.mark.parametrize(("precision", "frozen"), [("fp32", 4), ("bf16", 2)])
def test_what_ppos_roles_hold_is_said_before_they_are_trained(precision: str, frozen: int) -> None:
    settings = ppo_settings(generation_batch_size=6, ema_decay=0.99)
    found = {name: gib * GIB for name, gib in budget_ppo.memory(roles_of(settings, precision), settings, 8).items()}
    assert found == pytest.approx({
        "reference": frozen * POLICY, "policy": 16 * POLICY, "critic": 16 * SCALAR, "reward models": frozen * SCALAR,
        "moving average": 4 * POLICY,
        "rollout cache": 6 * 64 * 2 * 3 * 2 * 16 * frozen,  # rows, tokens, keys and values of 3 layers' 2 heads of 16
    }, rel=2e-3)  # fmt: skip


def test_what_is_offloaded_or_on_a_server_is_not_held() -> None:
    settings = ppo_settings(offload=True, rollout={"engine": "vllm", "server_url": "http://127.0.0.1:8000"})
    assert list(budget_ppo.memory(roles_of(settings, "fp32"), settings, 8)) == ["policy", "critic"]
    line = budget_ppo.described({"policy": 2.0, "critic": 1.5})
    assert line == "about 3.5 GiB and the activations of a microbatch (policy 2, critic 1.5)"


def test_roles_on_one_base_count_it_once() -> None:
    settings = ppo_settings(layout="adapters")
    found = budget_ppo.memory(roles_of(settings, "bf16"), settings, 8)
    assert found["base"] * GIB == pytest.approx(2 * POLICY, rel=2e-3)
    of_lora = 3 * 16 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 192))  # layers, rank, inputs and outputs
    assert found["policy"] * GIB == found["critic"] * GIB - 16 * 64 == 16 * of_lora  # the critic has a head besides


@pytest.mark.usefixtures("untraced")
def test_more_decoders_of_the_rewards_are_kept_in_the_autocast_type_and_encoders_in_float32() -> None:
    alone = budget_ppo.ppo(ppo_settings(), case("bf16"))[1]
    encoder = BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16, vocab_size=99
    )
    decoder = shape()
    decoder.num_labels = 1
    both = budget_ppo.ppo(ppo_settings(), replace(case("bf16"), other_rewards=[decoder, encoder]))[1]
    of_encoder = 4 * sum(p.numel() for p in BertForSequenceClassification(encoder).parameters())
    assert (both.total - alone.total) * GIB == 2 * SCALAR + 2 * 64 + of_encoder  # its head stays in float32


@pytest.mark.usefixtures("sampling_alone")
def test_a_rollouts_cache_has_room_for_the_longest_answers_of_all_rows() -> None:
    rollout = budget_ppo.ppo(ppo_settings(rollout_batch_size=64, max_new_tokens=128), case())[0]
    # Keys and values of 3 layers and 2 heads of 16 in float32, for 64 rows of 32 + 128 tokens.
    assert rollout.gib["cache"] * GIB == 64 * (2 * 3 * 2 * 16 * 4) * 160
    assert rollout.recorded
    fewer = ppo_settings(rollout_batch_size=64, max_new_tokens=128, generation_batch_size=16)
    assert budget_ppo.ppo(fewer, case())[0].gib["cache"] == rollout.gib["cache"] / 4


@pytest.mark.usefixtures("sampling_alone")
def test_a_server_samples_without_memory_of_ours() -> None:
    ours, server = (
        budget_ppo.ppo(ppo_settings(rollout=rollout), case())[0]
        for rollout in ({"engine": "static"}, {"engine": "vllm", "server_url": "http://127.0.0.1:8000"})
    )
    assert (server.gib["cache"], server.gib["activations"], server.num_bytes) == (0, 0, 0)
    assert ours.gib["cache"] > 0


@pytest.mark.usefixtures("untraced")
def test_answers_that_are_sampled_in_parts_read_each_prompt_once_and_the_weights_for_each_part() -> None:
    whole, parts = (budget_ppo.ppo(ppo_settings(generation_batch_size=size), case())[0] for size in (8, 2))
    assert parts.flops == whole.flops
    of_weights = 32 * 4 * (3 * LAYER + 64 + 2048 * 64)  # tokens, bytes of all that is multiplied with
    assert parts.num_bytes == pytest.approx(whole.num_bytes + 3 * of_weights)


@pytest.mark.usefixtures("sampling_alone")
def test_generates_cache_counts() -> None:
    phase = budget_ppo.ppo(ppo_settings(rollout={"engine": "transformers"}, max_new_tokens=128), case())[0]
    assert (phase.steps, phase.recorded) == (128 * 3, False)  # tokens × layers, each of which is launched
    assert phase.gib["cache"] * GIB == pytest.approx(8 * (2 * 3 * 2 * 16 * 4) * 160, rel=0.05)


@pytest.mark.usefixtures("untraced")
def test_offloaded_models_are_there_for_scoring_alone() -> None:
    here, away = (budget_ppo.ppo(ppo_settings(offload=offload), case()) for offload in (False, True))
    waiting = sum(p.nbytes for p in LlamaForCausalLM(shape()).parameters())
    waiting += sum(p.nbytes for p in LlamaForSequenceClassification(shape()).model.parameters()) + 4 * 64
    for before, after, gained in zip(here, away, (waiting, 0, waiting), strict=True):
        assert (before.total - after.total) * GIB == pytest.approx(gained, rel=0.01, abs=1)


SECOND_GPU = {"placement": "second_gpu", "precision": "bf16"}


@pytest.mark.usefixtures("sampling_alone")
def test_a_copy_that_samples_ahead_has_its_room_on_the_second_gpu_beside_the_models_that_only_read() -> None:
    settings = ppo_settings(**SECOND_GPU, rollout={"one_step_off": True})
    rollout, scoring, update = budget_ppo.ppo(settings, case("bf16"))
    assert [phase.beside for phase in (rollout, scoring, update)] == [True, False, False]
    assert (rollout.gib["optimiser"], rollout.gib["gradients"]) == (0, 0)
    assert rollout.gib["cache"] * GIB == 8 * (2 * 3 * 2 * 16 * 2) * 64
    # The copy, reference and reward model in bf16, with a head in float32; and rows of products put together.
    assert 2 * (2 * POLICY + SCALAR) < rollout.gib["weights"] * GIB < 2 * (2 * POLICY + SCALAR) + 2 * POLICY
    assert update.gib["weights"] * GIB == pytest.approx(4 * (POLICY + SCALAR), rel=1e-3)
    assert "rollout is sampled on the second GPU of each process" in budget_ppo.notes(settings)[0]
    spread = budget_ppo.ppo(settings, case("bf16", 4, "fsdp2"))
    assert spread[0].gib["weights"] == rollout.gib["weights"]  # there they are whole
    assert spread[0].sent == (3 / 4) * 2 * (POLICY)


@pytest.mark.usefixtures("untraced")
def test_scoring_on_two_gpus_takes_the_longer_of_the_two() -> None:
    one, two = (budget_ppo.ppo(ppo_settings(**more), case("bf16"))[1] for more in ({}, SECOND_GPU))
    assert two.flops == pytest.approx(one.flops / 2)  # policy and critic; reference and reward model
    larger = [shape(12)]
    more = budget_ppo.ppo(ppo_settings(**SECOND_GPU), replace(case("bf16"), other_rewards=larger))[1]
    assert more.flops == two.flops  # what other rewards read is left out, and said to be


@pytest.mark.usefixtures("untraced")
def test_several_processes_reduce_copies_of_the_gradients_and_share_the_rows() -> None:
    settings = ppo_settings(microbatch_size=2)
    alone, one_of_two = (budget_ppo.ppo(settings, case(num_processes=number))[2] for number in (1, 2))
    trained = sum(p.numel() for p in LlamaForCausalLM(shape()).parameters())
    trained += sum(p.numel() for p in LlamaForSequenceClassification(shape()).model.parameters()) + 64
    assert (one_of_two.gib["gradients"] - alone.gib["gradients"]) * GIB == pytest.approx(4 * trained, rel=0.01)
    assert one_of_two.flops == pytest.approx(alone.flops / 2)


def test_four_bits_take_half_a_byte_and_a_scale_for_64_weights() -> None:
    base = budget.causal(shape(), torch.bfloat16)
    linear_weights = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192)
    assert budget_ppo.bytes_saved(base, "4bit") == linear_weights * (2 - 0.5625)
    assert budget_ppo.bytes_saved(base, "8bit") == linear_weights * 1


def test_lora_keeps_no_moments_of_the_base() -> None:
    settings = RewardSettings.load({"data": "x", "max_length": 32, "global_batch_size": 4}, "reward")
    whole = budget_stages.reward(settings, case())[0]
    adapters = budget_stages.reward(settings.model_copy(update={"lora": LoraSettings()}), case())[0]
    assert adapters.gib["optimiser"] < 0.3 * whole.gib["optimiser"]


def test_a_step_on_more_rows_takes_as_much_memory_where_the_microbatch_is_the_same() -> None:
    def peak(rows: int) -> Phase:
        fields = {"data": "x", "max_length": 64, "global_batch_size": rows, "microbatch_size": 4}
        return budget_stages.sft(SFTSettings.load(fields, "sft"), replace(case(), num_rows=640))[0]

    sixteen, sixtyfour = peak(16), peak(64)
    assert sixteen.total == sixtyfour.total
    assert (sixteen.times, sixtyfour.times) == (40, 10)
    assert sixtyfour.flops == pytest.approx(4 * sixteen.flops)


def test_what_is_compiled_is_counted_as_its_stage_compiles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """(What, whether layers are computed again): pretraining compiles a model as a whole, but its layers if sharded."""
    found: list[tuple[str | None, bool]] = []

    def note(_configs: Any, _run: Any, fused: str | None, recomputed: bool = False) -> Any:
        found.append((fused, recomputed))
        return {name: {} for name in ("rollout", "scoring", "update")}

    for module in (budget_ppo, budget_stages):
        monkeypatch.setattr(module, "traced", note)
    pretrain = PretrainSettings.load({**PRETRAIN, "compile": True}, "pretrain")
    stages = [budget_stages.pretrain(pretrain, of) for of in (case("bf16"), case("bf16", 2), case("bf16", 2, "fsdp2"))]
    sft = {**SFT, "model": "x", "compile": True}
    for more in ({}, {"args": {"activation_checkpointing": True}}):
        stages.append(budget_stages.sft(SFTSettings.load({**sft, **more}, "sft"), case("bf16")))
    ppo = ppo_settings(compile=True, gradient_checkpointing=True)
    stages += [budget_ppo.ppo(ppo, of) for of in (case("bf16"), replace(case("bf16"), is_gpu=False))]
    assert found == [
        ("whole", False), ("whole", False), ("layers", False), ("all", False), ("all", True), ("layers", True),
        (None, True),
    ]  # fmt: skip
    assert [{phase.fused for phase in phases} for phases in stages] == [{fused} for fused, _ in found]
