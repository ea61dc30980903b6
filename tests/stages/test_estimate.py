"""What a recipe is said to take: traced bytes beside counted and allocated ones, devices, time, what to change."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stages_world import TINY
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from rlhf.data.errors import RefusedError, SettingsError
from rlhf.stages import budget, budget_ppo, budget_stages, devices, estimate
from rlhf.stages.budget import GIB, Case, Phase
from rlhf.stages.devices import Device, known, named
from rlhf.stages.estimate import Request, answer, config_of, seconds
from rlhf.stages.footprint import ATTENTION, Footprint, Moments, at_depth, learn, traced
from rlhf.stages.head_loss import head_loss
from rlhf.stages.models import PolicyModel, ScalarModel
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.layout import Roles, memory
from rlhf.stages.reward.config import RewardSettings
from rlhf.stages.settings import LoraSettings
from rlhf.stages.sft.config import SFTSettings

H100 = named("h100")
SMALL: dict[str, Any] = {
    "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip


def shape(num_layers: int = 3) -> LlamaConfig:
    return LlamaConfig(**SMALL, num_hidden_layers=num_layers)


def ppo_settings(**fields: Any) -> PPOSettings:
    given = {"data": "x", "rollout_batch_size": 8, "max_prompt_length": 32, "max_new_tokens": 32}
    return PPOSettings.load({**given, **fields}, "ppo")


def case(precision: str = "fp32", num_processes: int = 1) -> Case:
    return Case(precision, precision != "fp32", num_processes, shape(), shape())


def most(moments: Moments) -> float:
    return max(sum(kinds.values()) for kinds in moments.values())


# --- the trace


def linear(size: int = 256) -> nn.Linear:
    with torch.device("meta"):
        return nn.Linear(size, size, bias=False)


def test_the_most_that_is_alive_at_one_time_counts_and_weights_do_not() -> None:
    layer, footprint = linear(), Footprint(vocabulary=0)
    with footprint.of(layer), torch.no_grad():
        footprint.at("it")
        x = torch.zeros(4, 256)  # 4096 bytes
        y = layer(x)  # and 4096 more
        del x
        del y
        torch.zeros(1, 256)
    assert footprint.moments["it"] == {"activations": 8192}


def test_what_autograd_keeps_is_alive_until_the_backward_pass() -> None:
    layer, footprint = linear(), Footprint(vocabulary=0)
    with footprint.of(layer):
        footprint.at("forward")
        loss = layer(torch.zeros(4, 256)).square().sum()
        footprint.at("kept")
        torch.zeros(())
        loss.backward()
        del loss
        footprint.at("after")
    # The input, the output, the loss; squares are gone.
    assert footprint.moments["kept"]["activations"] >= 2 * 4096 + 512
    assert {kind: size for kind, size in footprint.moments["after"].items() if size} == {"gradients": 4 * 256 * 256}


def test_copies_of_weights_for_autocast_are_told_as_weights_and_take_half() -> None:
    layer, footprint = linear(), Footprint(vocabulary=0)
    with footprint.of(layer):
        footprint.at("it")
        with torch.autocast("cpu", torch.bfloat16):
            kept = layer(torch.zeros(4, 256))
        del kept
    assert footprint.moments["it"]["weights"] == 2 * 256 * 256


def test_what_has_the_width_of_the_vocabulary_is_told_as_logits() -> None:
    layer, footprint = linear(), Footprint(vocabulary=256)
    with footprint.of(layer):
        footprint.at("it")
        layer(torch.zeros(8, 256, device="cpu")[:, :256])
    assert footprint.moments["it"]["logits"] == 2 * 8 * 256 * 4  # the input is as wide


def test_shares_of_a_weights_gradient_are_added_in_place() -> None:
    """As autograd does with tensors that have contents."""
    layer, footprint = linear(1024), Footprint(vocabulary=0)
    with footprint.of(layer):
        loss = sum(layer(torch.zeros(1, 1024)).sum() for _ in range(4))
        footprint.at("backward")
        loss.backward()  # type: ignore[union-attr]
    weight = 4 * 1024 * 1024
    assert 2 * weight <= sum(footprint.moments["backward"].values()) < 2.2 * weight  # the sum, and the newest share


def update_of(num: int, recompute: bool = False) -> Callable[[Any, Footprint], None]:
    def run(configs: Any, footprint: Footprint) -> None:
        with torch.device("meta"):
            model = LlamaForCausalLM._from_config(configs[0], attn_implementation=ATTENTION).train()
        if recompute:
            model.activation_checkpointing_enable()
        policy = PolicyModel(model)
        with footprint.of(policy):
            learn(footprint, "update", {model: lambda: loss_of(policy)}, num)

    return run


def loss_of(policy: PolicyModel) -> Tensor:
    ids = torch.zeros(4, 64, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16):
        return policy(ids, torch.ones_like(ids).bool(), 32, 1.0)[0].sum()


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("recompute", [False, True])
def test_layers_that_were_not_traced_add_what_those_add_that_were(num: int, recompute: bool) -> None:
    config, footprint = shape(6), Footprint(vocabulary=2048)
    update_of(num, recompute)([config], footprint)
    whole = {moment: kinds for moment, kinds in footprint.moments.items() if moment}
    assert most(traced([config], update_of(num, recompute))) == pytest.approx(most(whole), rel=0.02)


def test_models_of_two_depths_are_traced_apart() -> None:
    def run(configs: Any, footprint: Footprint) -> None:
        with footprint.of():
            footprint.at("it")
            kept = [torch.zeros(configs[0].num_hidden_layers, 128), torch.zeros(10 * configs[1].num_hidden_layers, 128)]
            del kept

    assert most(traced([shape(3), shape(8)], run)) == 512 * (3 + 80)


def test_recomputed_layers_keep_less() -> None:
    assert most(traced([shape()], update_of(1, recompute=True))) < 0.6 * most(traced([shape()], update_of(1)))


# --- beside what torch allocates


def allocated(step: Callable[[], Any]) -> int:
    """Most bytes that a step had from the CPU's allocator at one time, as torch's profiler saw it."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    now = peak = 0
    for event in found.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def test_the_trace_of_ppos_update_is_what_torch_allocates() -> None:
    settings, num = ppo_settings(), 1

    def of_policy(policy: PolicyModel) -> Tensor:
        ids = torch.zeros(8, 64, dtype=torch.long)
        return policy(ids, torch.ones_like(ids).bool(), settings.max_new_tokens, 1.0)[0].sum()

    def run(configs: Any, footprint: Footprint) -> None:
        with torch.device("meta"):
            model = LlamaForCausalLM._from_config(configs[0], attn_implementation=ATTENTION).eval()
        policy = PolicyModel(model)
        with footprint.of(policy):
            learn(footprint, "update", {model: lambda: of_policy(policy)}, num)

    real = PolicyModel(LlamaForCausalLM(shape()).eval())
    found = allocated(lambda: of_policy(real).backward())
    assert most(traced([shape()], run)) == pytest.approx(found, rel=0.1)


def test_the_trace_of_a_reward_models_step_is_what_torch_allocates() -> None:
    def of_scores(scalar: ScalarModel) -> Tensor:
        ids = torch.zeros(6, 48, dtype=torch.long)
        values = scalar(ids, torch.ones_like(ids).bool())
        assert isinstance(values, Tensor)
        return values.sum()

    def run(configs: Any, footprint: Footprint) -> None:
        scalar = budget.scalar_of(configs[0])
        with footprint.of(scalar):
            learn(footprint, "update", {scalar.classifier: lambda: of_scores(scalar)}, 1)

    config = shape()
    config.num_labels = 1
    real = ScalarModel(LlamaForSequenceClassification(config).eval())
    found = allocated(lambda: of_scores(real).backward())
    assert most(traced([config], run)) == pytest.approx(found, rel=0.15)


# --- the stages


@pytest.mark.parametrize("layout", ["separate", "shared_trunk", "adapters"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_ppo_holds_is_what_its_own_estimate_says(layout: str, precision: str) -> None:
    settings = ppo_settings(layout=layout)
    of_case = case(precision)
    models = budget_ppo.models_of(settings, of_case, [of_case.config, shape()])
    roles = Roles(models.policy, models.reference, models.critic, nn.ModuleList(models.rewards))  # type: ignore[arg-type]
    theirs = memory(roles, settings, 8)
    del theirs["rollout cache"]
    scoring = next(phase for phase in budget_ppo.ppo(settings, of_case) if phase.name == "scoring")
    held = budget.Held().add(*budget_ppo.all_models(models))
    assert (held.weights + held.moments + held.gradients) / GIB == pytest.approx(sum(theirs.values()), rel=1e-3)
    assert scoring.gib["optimiser"] == held.moments / GIB


def test_a_rollouts_cache_has_room_for_the_longest_answers_of_all_rows() -> None:
    rollout = budget_ppo.ppo(ppo_settings(rollout_batch_size=64, max_new_tokens=128), case())[0]
    # Keys and values of 3 layers and 2 heads of 16 in float32, for 64 rows of 32 + 128 tokens.
    assert rollout.gib["cache"] * GIB == 64 * (2 * 3 * 2 * 16 * 4) * 160
    fewer = ppo_settings(rollout_batch_size=64, max_new_tokens=128, generation_batch_size=16)
    assert budget_ppo.ppo(fewer, case())[0].gib["cache"] == rollout.gib["cache"] / 4


def test_a_server_samples_without_memory_of_ours() -> None:
    ours, server = (
        budget_ppo.ppo(ppo_settings(rollout=rollout), case())[0]
        for rollout in ({"engine": "static"}, {"engine": "vllm", "server_url": "http://127.0.0.1:8000"})
    )
    assert (server.gib["cache"], server.gib["activations"], server.num_bytes) == (0, 0, 0)
    assert ours.gib["cache"] > 0


def test_generates_cache_and_its_second_reading_count() -> None:
    phase = budget_ppo.ppo(ppo_settings(rollout={"engine": "transformers"}), case())[0]
    assert phase.steps == 32 * 3  # tokens × layers, each of which is launched
    assert phase.total > 0


def test_offloaded_models_are_there_for_scoring_alone() -> None:
    here, away = (budget_ppo.ppo(ppo_settings(offload=offload), case()) for offload in (False, True))
    waiting = sum(p.nbytes for p in LlamaForCausalLM(shape()).parameters())
    waiting += sum(p.nbytes for p in LlamaForSequenceClassification(shape()).model.parameters()) + 4 * 64
    for before, after, gained in zip(here, away, (waiting, 0, waiting), strict=True):
        assert (before.total - after.total) * GIB == pytest.approx(gained, rel=0.01, abs=1)


def test_several_processes_reduce_copies_of_the_gradients_and_share_the_rows() -> None:
    settings = ppo_settings(microbatch_size=2)
    alone, one_of_two = (budget_ppo.ppo(settings, case(num_processes=number))[2] for number in (1, 2))
    trained = sum(p.numel() for p in LlamaForCausalLM(shape()).parameters())
    trained += sum(p.numel() for p in LlamaForSequenceClassification(shape()).model.parameters()) + 64
    assert (one_of_two.gib["gradients"] - alone.gib["gradients"]) * GIB == pytest.approx(4 * trained, rel=0.01)
    assert one_of_two.flops == pytest.approx(alone.flops / 2)


def test_four_bits_take_half_a_byte_and_a_scale_for_64_weights() -> None:
    base = budget.causal(shape(), ATTENTION, torch.bfloat16)
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


# --- a recipe


def request(**stages: Any) -> Request:
    return Request(stages, {}, 1, "h100")


PRETRAIN = {
    "data": "x", "vocab_size": 300, "hidden_size": 32, "num_layers": 3, "num_heads": 2, "context_length": 96,
    "global_batch_size": 4, "num_steps": 7,
}  # fmt: skip
SFT, REWARD = {"data": "x", "max_length": 64, "global_batch_size": 4}, {"data": "x", "max_length": 64}
PPO = {"data": "x", "rollout_batch_size": 8, "max_prompt_length": 32, "max_new_tokens": 16}


def test_models_that_are_not_trained_yet_have_the_shape_that_pretrain_will_give_them() -> None:
    config = config_of(request(pretrain=PRETRAIN, sft=SFT, reward=REWARD, ppo=PPO), "ppo", None)
    assert (config.num_hidden_layers, config.hidden_size) == (3, 32)
    assert config.vocab_size == 320  # 300, rounded up to a multiple of 64


def test_every_stage_of_a_recipe_is_told_with_phases_memory_and_time() -> None:
    found = answer(request(pretrain=PRETRAIN, sft=SFT, reward=REWARD, ppo=PPO))
    assert {stage: [phase["name"] for phase in of["phases"]] for stage, of in found["stages"].items()} == {
        "pretrain": ["update"], "sft": ["update"], "reward": ["update"], "ppo": ["rollout", "scoring", "update"],
    }  # fmt: skip
    assert found["fits"]
    assert found["stages"]["pretrain"]["precision"] == "bf16"
    for of_stage in found["stages"].values():
        assert of_stage["changes"] == []
        assert of_stage["peak_gib"] == max(phase["total_gib"] for phase in of_stage["phases"])
        for phase in of_stage["phases"]:
            assert phase["total_gib"] == pytest.approx(sum(phase["gib"].values()), abs=4e-4)
            assert phase["seconds"] > 0
    pretrain = found["stages"]["pretrain"]
    assert pretrain["seconds"] == pytest.approx(7 * pretrain["phases"][0]["seconds"])
    assert found["stages"]["sft"]["seconds"] is None  # its rows were not counted


def test_the_demos_stages_can_be_told() -> None:
    rows = {"sft": {"rows": 60}, "reward": {"rows": 40, "answers": 3}}
    found = estimate.answer(Request({stage: dict(TINY[stage]) for stage in TINY}, rows, 1, "cpu"))
    sampling, update = found["stages"]["reward"]["phases"]
    assert (sampling["name"], sampling["times"]) == ("sampling", 1)
    assert update["times"] == 7  # 40 rankings, six a step
    assert found["stages"]["sft"]["phases"][0]["times"] == 6
    assert found["device"]["name"] == "cpu"
    assert found["stages"]["ppo"]["phases"][0]["gib"]["process"] == estimate.PROCESS


def test_a_hub_ids_or_folders_config_alone_is_read(tmp_path: Path) -> None:
    shape().save_pretrained(tmp_path)  # no weights, no tokenizer
    found = answer(request(sft={**SFT, "model": str(tmp_path)}))
    assert found["stages"]["sft"]["peak_gib"] > 0


def test_a_model_that_is_not_there_is_refused_by_its_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"sft\.model: no config of a model in '.*nowhere'"):
        answer(request(sft={**SFT, "model": str(tmp_path / "nowhere")}))
    with pytest.raises(SettingsError, match=r"sft\.model: not set, and the recipe has no pretrain section"):
        answer(request(sft=SFT))


def test_a_precision_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"pretrain\.precision: bf16 is not supported by T4; use auto or fp32"):
        answer(Request({"pretrain": {**PRETRAIN, "precision": "bf16"}}, {}, 1, "t4"))
    assert answer(Request({"pretrain": PRETRAIN}, {}, 1, "t4"))["stages"]["pretrain"]["precision"] == "fp16"
    chain = Request({"pretrain": PRETRAIN, "sft": SFT}, {}, 1, "t4")
    assert answer(chain)["stages"]["sft"]["precision"] == "fp32"


# --- what to change


def changes_of(monkeypatch: pytest.MonkeyPatch, gib: float, peak_of: Callable[[Any], float], **stages: Any) -> Any:
    """What is told to change in the last of `stages`, on a device of which `gib` can be used, where settings take what
    `peak_of` says."""
    stage = list(stages)[-1]
    device = replace(H100, gib=gib / estimate.USABLE)

    def phases(_request: Any, _stage: Any, settings: Any, _device: Any) -> Any:
        return [Phase("update", {"weights": peak_of(settings)}, 1)], "bf16"

    monkeypatch.setattr(estimate, "phases_of", phases)
    wanted = request(**stages)
    return estimate.changes(wanted, stage, wanted.section(stage), device)


def of_ppo(settings: Any) -> float:
    models = {"separate": 40, "shared_trunk": 30, "adapters": 6}[settings.layout]
    models -= 4 * (settings.quantization == "4bit") + 8 * settings.offload + 15 * (settings.weights == "bf16")
    rows = settings.microbatch_size or 64
    return models + rows * (0.1 if settings.gradient_checkpointing else 0.5)


def test_changes_are_told_with_those_first_that_gain_most(monkeypatch: pytest.MonkeyPatch) -> None:
    ppo = {**PPO, "rollout_batch_size": 64, "microbatch_size": 16}  # 48 GiB
    found = changes_of(monkeypatch, 41.0, of_ppo, ppo=ppo)
    adapters = {"ppo.layout": "adapters"}
    assert [(change["settings"], change["peak_gib"], change["fits"]) for change in found] == [
        ({**adapters, "ppo.quantization": "4bit"}, 10.0, True),
        (adapters, 14.0, True),
        ({"ppo.weights": "bf16"}, 33.0, True),
        ({"ppo.layout": "shared_trunk"}, 38.0, True),
        ({"ppo.offload": True}, 40.0, True),
        ({"ppo.microbatch_size": 2}, 41.0, True),
        ({"ppo.gradient_checkpointing": True}, 41.6, False),
    ]


def test_the_microbatch_that_is_named_is_the_largest_power_of_two_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_pretrain(settings: Any) -> float:
        return 10.0 + (settings.microbatch_size or 24)

    pretrain = {**PRETRAIN, "global_batch_size": 24, "gradient_checkpointing": True}
    for room, size in ((30.0, 16), (26.0, 16), (25.9, 8), (12.0, 2), (11.5, 1), (5.0, 1)):
        (change,) = changes_of(monkeypatch, room, of_pretrain, pretrain=pretrain)
        assert change == {
            "settings": {"pretrain.microbatch_size": size}, "peak_gib": 10.0 + size, "fits": 10.0 + size <= room
        }  # fmt: skip


def test_changes_are_put_together_where_none_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_sft(settings: Any) -> float:
        taken = 20.0 if settings.lora is None else 5.0
        recompute = "activation_checkpointing" in settings.args
        return taken + settings.max_length / 64 * (settings.microbatch_size or 4) * (1 if recompute else 4)

    found = changes_of(monkeypatch, 11.0, of_sft, sft=SFT)  # 36 GiB
    assert [change["peak_gib"] for change in found[:-1]] == [21.0, 24.0, 24.0, 28.0]
    assert found[-1] == {
        "settings": {"sft.lora": {}, "sft.microbatch_size": 1}, "peak_gib": 9.0, "fits": True
    }  # fmt: skip


def test_what_does_not_fit_is_told_so_and_what_to_change() -> None:
    wanted = Request({"pretrain": {**PRETRAIN, "hidden_size": 1024, "num_layers": 48, "vocab_size": 4096,
                                   "global_batch_size": 64, "context_length": 4096}}, {}, 1, "t4")  # fmt: skip
    found = answer(wanted)
    assert not found["fits"]
    *alone, together = found["stages"]["pretrain"]["changes"]
    assert {name for change in alone for name in change["settings"]} == set(together["settings"])
    assert set(together["settings"]) == {"pretrain.microbatch_size", "pretrain.gradient_checkpointing"}
    assert together["peak_gib"] < min(change["peak_gib"] for change in alone)


# --- time and devices


DEVICE = Device("it", 10.0, {"fp32": 1e12, "bf16": 1e13}, 1e11)


def test_seconds_are_operations_at_the_share_that_is_reached() -> None:
    phase = Phase("update", {}, 1, flops=6e12)
    assert seconds(phase, DEVICE, "bf16") == pytest.approx(6e12 / (1e13 * estimate.PLAIN))
    assert seconds(replace(phase, compiled=True), DEVICE, "fp32") == pytest.approx(6e12 / (1e12 * estimate.COMPILED))


def test_a_small_model_takes_the_time_to_launch_its_kernels() -> None:
    assert seconds(Phase("update", {}, 1, flops=1e6, passes=100), DEVICE, "bf16") == 100 * estimate.LAYER
    assert seconds(Phase("rollout", {}, 1, num_bytes=1e3, steps=100), DEVICE, "bf16") == 100 * estimate.DECODED


def test_decoding_a_large_model_takes_the_time_to_read_it() -> None:
    phase = Phase("rollout", {}, 1, num_bytes=9e12, steps=100)
    assert seconds(phase, DEVICE, "bf16") == pytest.approx(90 / estimate.BANDWIDTH)


@pytest.mark.parametrize(("name", "found"), [
    ("h100", "H100 80GB"), ("H100 80GB", "H100 80GB"), ("h100-pcie", "H100 PCIe"), ("a100-40gb", "A100 40GB"),
    ("rtx4090", "RTX 4090"), ("3090", "RTX 3090"), ("L4", "L4"), ("l40s", "L40S"), ("v100 16gb", "V100 16GB"),
])  # fmt: skip
def test_a_device_is_named_by_so_much_as_tells_it_apart(name: str, found: str) -> None:
    assert named(name).name == found


@pytest.mark.parametrize(("name", "message"), [
    ("a100", "may be A100 80GB or A100 40GB"), ("h9000", "no such device"), ("", "no such device"),
])  # fmt: skip
def test_a_device_that_is_not_told_apart_is_refused_with_those_that_there_are(name: str, message: str) -> None:
    with pytest.raises(SettingsError, match=f"--device {name}: {message}; give one of B200, H200"):
        named(name)


@pytest.mark.parametrize(("driver", "found"), [
    ("NVIDIA H100 80GB HBM3", "H100 80GB"), ("NVIDIA H100 PCIe", "H100 PCIe"), ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
    ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("Tesla T4", "T4"), ("NVIDIA L4", "L4"), ("NVIDIA L40S", "L40S"),
    ("NVIDIA RTX A6000", None), ("NVIDIA GB200", None),
])  # fmt: skip
def test_drivers_names_are_known(driver: str, found: str | None) -> None:
    device = known(driver)
    assert (device and device.name) == found


def test_data_sheets_are_of_dense_matrices_and_bf16_is_the_fastest() -> None:
    assert named("h100").flops == {"fp32": 67e12, "tf32": 494e12, "bf16": 989e12, "fp16": 989e12}
    for device in devices.DEVICES.values():
        assert max(device.flops, key=lambda kind: (device.flops[kind], kind)) in ("bf16", "fp16")


def test_a_shallower_model_is_the_same_otherwise() -> None:
    config = shape(8)
    cut = at_depth(config, 2)
    assert (cut.num_hidden_layers, config.num_hidden_layers) == (2, 8)
    assert cut.hidden_size == config.hidden_size


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
def test_compiled_steps_keep_what_products_read_and_make() -> None:
    def run(configs: Any, footprint: Footprint) -> None:
        with torch.device("meta"):
            model = LlamaForCausalLM._from_config(configs[0], attn_implementation=ATTENTION).train()

        def loss() -> Tensor:
            ids = torch.zeros(4, 64, dtype=torch.long)
            with torch.autocast("cpu", torch.bfloat16), torch.compiler.set_stance("force_eager"):
                hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
                return head_loss(hidden.flatten(0, 1), model.get_output_embeddings().weight, ids.flatten(), True)[0]

        with footprint.of(model):
            learn(footprint, "update", {model: loss}, 1)

    plain, fused = (most(traced([shape()], run, fused)) for fused in (None, "all"))
    assert fused < 0.8 * plain
