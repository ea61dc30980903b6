"""What a recipe is said to take: of each stage phases, memory and time, in which layout; what to change is in
test_budget_changes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs_world import blocks
from estimate_world import PPO, PRETRAIN, REWARD, SFT, request, shape
from stages_world import TINY
from torch import nn
from transformers import FalconConfig, MambaConfig, MixtralConfig, Qwen3Config

from rlhf.data.errors import RefusedError, SettingsError
from rlhf.stages import budget_changes, budget_ppo, budget_recipe, devices, estimate
from rlhf.stages.adapters import save_head
from rlhf.stages.budget import Phase
from rlhf.stages.budget_recipe import Request, config_of
from rlhf.stages.budget_seconds import BANDWIDTH, COMPILED, LINKS, PLAIN, seconds, sending
from rlhf.stages.devices import Device, named
from rlhf.stages.estimate import answer
from rlhf.stages.footprint import Fused, Moments

H100 = named("h100")


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


def test_a_stage_of_one_process_is_told_without_others() -> None:
    found = answer(replace(request(pretrain=PRETRAIN), layouts={"pretrain": None}))["stages"]["pretrain"]
    assert (found["num_processes"], found["machines"], found["layout"]) == (1, 1, "ddp")
    assert found["peak_gib_in"] == {"ddp": found["peak_gib"]}
    assert [phase["seconds_sending"] for phase in found["phases"]] == [0.0]


def in_layout(layout: str | None, num_processes: int = 8) -> Request:
    return replace(request(pretrain=PRETRAIN), num_processes={"pretrain": num_processes}, layouts={"pretrain": layout})


@pytest.mark.parametrize(("asked", "usable", "layout", "fits", "peaks"), [
    (None, 50.0, "ddp", True, {"ddp": 40.0}),
    (None, 39.0, "fsdp2", True, {"ddp": 40.0, "fsdp2": 10.0}),
    (None, 9.0, "fsdp2", False, {"ddp": 40.0, "fsdp2": 10.0}),
    ("ddp", 39.0, "ddp", False, {"ddp": 40.0}),
    ("zero2", 50.0, "zero2", True, {"zero2": 20.0}),
])  # fmt: skip
def test_several_processes_take_the_layout_that_is_asked_for_or_the_first_that_fits(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, usable: float, layout: str, fits: bool, peaks: dict[str, float]
) -> None:
    def phases(wanted: Request, stage: str, settings: Any, _device: Any) -> Any:
        size = {"ddp": 40.0, "zero2": 20.0, "fsdp2": 10.0}[str(wanted.layouts[stage])]
        return [Phase("update", {"weights": size / (2 if settings.gradient_checkpointing else 1)}, 1)], "bf16"

    for module in (estimate, budget_changes):
        monkeypatch.setattr(module, "phases_of", phases)
    monkeypatch.setattr(estimate, "chosen", lambda _: replace(H100, gib=usable / devices.USABLE))
    found = answer(in_layout(asked))["stages"]["pretrain"]
    assert (found["layout"], found["fits"], found["peak_gib_in"]) == (layout, fits, peaks)
    assert (found["num_processes"], found["machines"]) == (8, 1)
    changes = [] if fits else [(list(peaks.values())[-1] / 2, True)]  # in the layout that was tried last
    assert [(change["peak_gib"], change["fits"]) for change in found["changes"]] == changes


def test_a_batch_that_processes_cannot_share_evenly_is_refused_as_the_stage_does() -> None:
    with pytest.raises(RefusedError, match=r"pretrain\.global_batch_size: 4 cannot be shared evenly by 16 processes"):
        answer(in_layout("fsdp2", 16))


def ppo_in(layout: str | None, **fields: Any) -> Request:
    asked = request(pretrain=PRETRAIN, sft=SFT, reward=REWARD, ppo={**PPO, **fields})
    return replace(asked, num_processes={"ppo": 2}, layouts={"ppo": layout})


@pytest.mark.usefixtures("untraced")
def test_settings_that_want_whole_models_are_refused_where_models_lie_in_parts() -> None:
    with pytest.raises(RefusedError, match=r"ppo\.offload: not with models that are spread over processes"):
        answer(ppo_in("fsdp2", offload=True))
    assert list(answer(ppo_in(None, offload=True))["stages"]["ppo"]["peak_gib_in"]) == ["ddp"]


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize(("layout", "advised"), [("ddp", True), ("fsdp2", False)])
def test_nothing_is_advised_that_the_stage_refuses(monkeypatch: pytest.MonkeyPatch, layout: str, advised: bool) -> None:
    moments: Moments = {"rollout": {}, "scoring": {}, "update": {"activations": 1e6}}  # the update takes most
    monkeypatch.setattr(budget_ppo, "traced", lambda *_: moments)
    monkeypatch.setattr(estimate, "chosen", lambda _: replace(H100, gib=1e-6))
    changes = answer(ppo_in(layout))["stages"]["ppo"]["changes"]
    assert any("ppo.offload" in change["settings"] for change in changes) == advised
    assert any("ppo.layout" in change["settings"] for change in changes)


def test_sequences_that_the_models_have_no_positions_for_are_refused_all_at_once(tmp_path: Path) -> None:
    """As a run refuses them. What pretrain will make has its context_length, 96; the shape in the folder 256."""
    long = {
        "pretrain": PRETRAIN, "sft": {**SFT, "max_length": 97}, "reward": {**REWARD, "max_length": 96},
        "ppo": {**PPO, "max_prompt_length": 64, "max_new_tokens": 64},
    }  # fmt: skip
    with pytest.raises(SettingsError) as refused:
        answer(request(**long))
    assert str(refused.value).splitlines() == [
        "sft.max_length is 97, but the model has 96 positions; lower it",
        "ppo.max_prompt_length + ppo.max_new_tokens is 128, but the model has 96 positions; lower it",
    ]
    shape().save_pretrained(tmp_path)
    going_on = {"data": "x", "num_steps": 7, "model": str(tmp_path), "block_size": 257}
    with pytest.raises(SettingsError, match=r"pretrain\.block_size is 257, but the model has 256 positions; lower it"):
        answer(request(pretrain=going_on))


@pytest.mark.usefixtures("untraced")
def test_each_stage_is_told_when_it_begins() -> None:
    said: list[str] = []
    answer(request(pretrain=PRETRAIN, sft=SFT), said.append)
    assert said == ["pretrain", "sft"]


def test_the_demos_stages_can_be_told() -> None:
    rows = {"sft": {"rows": 60}, "reward": {"rows": 40, "answers": 3}}
    found = estimate.answer(Request({stage: dict(TINY[stage]) for stage in TINY}, rows, "cpu"))
    sampling, update = found["stages"]["reward"]["phases"]
    assert (sampling["name"], sampling["times"]) == ("sampling", 1)
    assert update["times"] == 7  # 40 rankings, six a step
    assert found["stages"]["sft"]["phases"][0]["times"] == 6
    assert found["device"]["name"] == "cpu"
    assert found["stages"]["ppo"]["phases"][0]["gib"]["process"] == budget_recipe.PROCESS


def test_a_hub_ids_or_folders_config_alone_is_read(tmp_path: Path) -> None:
    shape().save_pretrained(tmp_path)  # no weights, no tokenizer
    found = answer(request(sft={**SFT, "model": str(tmp_path)}))
    assert found["stages"]["sft"]["peak_gib"] > 0


def test_a_model_that_is_not_there_is_refused_by_its_setting(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"sft\.model: no folder '.*nowhere'"):
        answer(request(sft={**SFT, "model": str(tmp_path / "nowhere")}))
    with pytest.raises(SettingsError, match=r"sft\.model: not set, and the recipe has no pretrain section"):
        answer(request(sft=SFT))


@pytest.mark.parametrize("config", [
    MixtralConfig(vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                  num_key_value_heads=1, num_local_experts=2),
    MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1),
    FalconConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore")  # of kernels for state-space layers that are not there
def test_a_model_whose_layers_cannot_be_traced_is_refused_with_what_to_do_instead(config: Any, tmp_path: Path) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(RefusedError, match=rf"sft\.model: a model of type {config.model_type} cannot be traced"):
        answer(request(sft={**SFT, "model": str(tmp_path)}))


@pytest.mark.usefixtures("untraced")
def test_a_precision_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(RefusedError, match=r"pretrain\.precision: bf16 is not supported by T4; use auto or fp32"):
        answer(Request({"pretrain": {**PRETRAIN, "precision": "bf16"}}, {}, "t4"))
    assert answer(Request({"pretrain": PRETRAIN}, {}, "t4"))["stages"]["pretrain"]["precision"] == "fp16"
    chain = Request({"pretrain": PRETRAIN, "sft": SFT}, {}, "t4")
    assert answer(chain)["stages"]["sft"]["precision"] == "fp32"


@pytest.mark.usefixtures("untraced")
def test_a_reward_model_counts_as_an_adapter_where_it_can_be_loaded_as_one(tmp_path: Path) -> None:
    shape().save_pretrained(tmp_path)
    ppo = {**PPO, "model": str(tmp_path), "reward_model": str(tmp_path), "layout": "adapters"}
    whole = answer(request(ppo=ppo))["stages"]["ppo"]["peak_gib"]
    (tmp_path / "adapter").mkdir()  # empty
    assert answer(request(ppo=ppo))["stages"]["ppo"]["peak_gib"] == whole
    save_head(tmp_path / "adapter", nn.Linear(4, 1))
    assert answer(request(ppo=ppo))["stages"]["ppo"]["peak_gib"] < whole


def test_the_recipe_of_the_readme_fits_on_the_gpu_that_it_is_said_to_be_for(tmp_path: Path) -> None:
    [text] = [block.text for block in blocks("yaml") if block.page == "README.md"]
    recipe = yaml.safe_load(text)
    Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True,
    ).save_pretrained(tmp_path)  # fmt: skip
    assert recipe["sft"]["model"] == "Qwen/Qwen3-0.6B"
    recipe["sft"]["model"] = str(tmp_path)
    found = answer(Request({stage: recipe[stage] for stage in ("sft", "reward", "ppo")}, {}, "h100"))
    assert {stage: of_stage["fits"] for stage, of_stage in found["stages"].items()} == {
        "sft": True, "reward": True, "ppo": True
    }  # fmt: skip


# --- time


DEVICE = Device("it", 10.0, {"fp32": 1e12, "bf16": 1e13}, 1e11)


def test_seconds_are_operations_at_the_share_that_is_reached() -> None:
    phase = Phase("update", {}, 1, flops=6e12)
    assert seconds(phase, DEVICE, "bf16") == pytest.approx(6e12 / (1e13 * PLAIN))
    assert seconds(replace(phase, fused="layers"), DEVICE, "fp32") == pytest.approx(6e12 / (1e12 * COMPILED))


@pytest.mark.parametrize(("fused", "each"), [(None, 1.5e-3), ("layers", 8e-4), ("all", 8e-4), ("whole", 0.0)])
def test_a_small_model_takes_the_time_to_launch_its_kernels(fused: Fused, each: float) -> None:
    phase = Phase("update", {}, 1, flops=1e6, passes=100, fused=fused)
    assert seconds(phase, DEVICE, "bf16") == pytest.approx(100 * each or 1e6 / (1e13 * COMPILED))
    assert seconds(phase, replace(DEVICE, is_gpu=False), "bf16") == pytest.approx(100 * 3e-4)


def test_a_token_that_is_decoded_takes_the_time_to_launch_its_layers_or_what_is_recorded_of_them() -> None:
    phase = Phase("rollout", {}, 1, num_bytes=1e3, steps=100)
    assert seconds(phase, DEVICE, "bf16") == pytest.approx(100 * 8e-4)
    assert seconds(replace(phase, recorded=True), DEVICE, "bf16") == pytest.approx(100 * 5e-5)
    assert seconds(phase, replace(DEVICE, is_gpu=False), "bf16") == pytest.approx(100 * 3e-4)


JOINED = replace(DEVICE, link=1e10, network=1e9)


@pytest.mark.parametrize(("hidden", "expected"), [(1.0, 3.0), (2 / 3, 3 + 1 / 3), (0.0, 4.0)])
def test_what_is_sent_takes_time_so_far_as_it_is_not_hidden_behind_the_work(hidden: float, expected: float) -> None:
    phase = Phase("update", {}, 1, flops=1e13 * PLAIN, sent=3 * 1e10 * LINKS, hidden=hidden)
    assert sending(phase, JOINED, 8) == pytest.approx(3.0)
    assert seconds(phase, JOINED, "bf16", 8) == pytest.approx(expected)  # a second of work, and three of sending


def test_work_that_takes_longer_hides_all_that_is_sent() -> None:
    phase = Phase("update", {}, 1, flops=5e13 * PLAIN, sent=3 * 1e10 * LINKS, hidden=1.0)
    assert seconds(phase, JOINED, "bf16", 8) == pytest.approx(5.0)


def test_between_machines_it_takes_longer() -> None:
    phase = Phase("update", {}, 1, sent=1e10 * LINKS)
    assert sending(phase, JOINED, 16) == pytest.approx(10 / 8)  # eight ports of a tenth of the link's bandwidth
    assert sending(phase, DEVICE, 16) == 0.0  # of which nothing is known


def test_what_goes_on_beside_other_phases_takes_no_time_of_its_own_unless_it_is_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(estimate, "chosen", lambda _: DEVICE)
    for beside, expected in ((2.0, 30.0), (5.0, 50.0)):
        phases = [
            Phase(name, {"weights": 1.0}, 10, flops=1e13 * PLAIN * length, beside=name == "rollout")
            for name, length in (("rollout", beside), ("scoring", 1.0), ("update", 2.0))
        ]
        monkeypatch.setattr(estimate, "phases_of", lambda *_, phases=phases: (phases, "bf16"))
        ppo = {**PPO, "rollout": {"one_step_off": True}, "placement": "second_gpu"}
        asked = request(pretrain=PRETRAIN, sft=SFT, ppo=ppo)
        found = answer(replace(asked, layouts=dict.fromkeys(asked.stages, "ddp")))["stages"]["ppo"]
        assert found["seconds"] == pytest.approx(expected)
        assert [note.split(":")[0] for note in found["notes"]][1:] == ["left out"]


def test_decoding_a_large_model_takes_the_time_to_read_it() -> None:
    phase = Phase("rollout", {}, 1, num_bytes=9e12, steps=100)
    assert seconds(phase, DEVICE, "bf16") == pytest.approx(90 / BANDWIDTH)
