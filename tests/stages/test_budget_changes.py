"""What is told to change in a stage that does not fit: settings alone, and several together."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from estimate_world import PPO, PRETRAIN, SFT, request, shape

from rlhf.stages import budget_changes, budget_ppo, devices
from rlhf.stages.budget import Phase
from rlhf.stages.devices import named
from rlhf.stages.estimate import answer

H100 = named("h100")


def test_what_may_be_advised_for_ppo_can_be_traced_and_takes_less(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shape().save_pretrained(tmp_path)
    ppo = {**PPO, "model": str(tmp_path), "reward_model": str(tmp_path)}
    less = {"microbatch_size": 1, "gradient_checkpointing": True, "generation_batch_size": 2}
    changes: list[dict[str, Any]] = [
        {**less, "layout": "shared_trunk", "weights": "bf16", "offload": True},
        {**less, "layout": "adapters", "quantization": "4bit"},
    ]
    peaks = [answer(request(ppo=ppo | changed))["stages"]["ppo"]["peak_gib"] for changed in changes]
    monkeypatch.setattr(budget_ppo, "traced", lambda *_: {"rollout": {}, "scoring": {}, "update": {}})
    assert max(peaks) < answer(request(ppo=ppo))["stages"]["ppo"]["peak_gib"]  # of which the passes are left out


def test_the_same_settings_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []

    def peak_of(settings: Any) -> float:
        traced.append(settings)
        return of_ppo(settings)

    changes_of(monkeypatch, 1.0, peak_of, ppo={**PPO, "rollout_batch_size": 64})
    assert [settings for number, settings in enumerate(traced) if settings in traced[:number]] == []


def changes_of(
    monkeypatch: pytest.MonkeyPatch, gib: float, peaks_of: Callable[[Any], Any], layout: str = "ddp", **stages: Any
) -> Any:
    """What is told to change in the last of `stages`, on a device of which `gib` can be used, where settings take what
    `peaks_of` says: GiB of each phase, or of the only one. Spread in a `layout`, over two of them."""
    stage = list(stages)[-1]
    device = replace(H100, gib=gib / devices.USABLE)

    def phases(_request: Any, _stage: Any, settings: Any, _device: Any) -> Any:
        peaks = peaks_of(settings)
        named = peaks if isinstance(peaks, dict) else {"update": peaks}
        return [Phase(name, {"weights": peak}, 1) for name, peak in named.items()], "bf16"

    monkeypatch.setattr(budget_changes, "phases_of", phases)
    wanted = request(**stages)
    if layout != "ddp":
        wanted = replace(wanted, num_processes={stage: 2}, layouts={stage: layout})
    return budget_changes.changes(wanted, stage, wanted.section(stage), device)


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


@pytest.mark.parametrize("is_gpu", [True, False])
def test_to_compile_is_told_where_that_does_something(monkeypatch: pytest.MonkeyPatch, is_gpu: bool) -> None:
    monkeypatch.setattr("test_budget_changes.H100", replace(H100, is_gpu=is_gpu))
    found = changes_of(monkeypatch, 20.0, lambda settings: 20.0 - 5 * settings.compile, ppo=PPO)
    told = {"settings": {"ppo.compile": True}, "peak_gib": 15.0, "fits": True}
    assert found == ([told] if is_gpu else [])


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


def of_two_phases(settings: Any) -> dict[str, float]:
    """A rollout of 26 GiB and an update of 72, beside one another."""
    models = {"separate": 10.0, "shared_trunk": 9.0, "adapters": 3.0}[settings.layout]
    update = (settings.microbatch_size or 64) / (2 if settings.compile else 1)
    return {"rollout": models + (settings.generation_batch_size or 64) / 4, "update": models - 2 + update}


def test_what_mends_a_phase_that_is_not_the_largest_is_told_with_what_mends_the_largest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ppo = {**PPO, "rollout_batch_size": 64}
    *alone, together = changes_of(monkeypatch, 20.0, of_two_phases, ppo=ppo)
    assert not any("ppo.generation_batch_size" in change["settings"] for change in alone)  # the update takes more
    assert together == {  # 8 + 8 and 10 + 8 GiB: the layout is left alone, and no batch is smaller than it has to be
        "settings": {"ppo.microbatch_size": 8, "ppo.generation_batch_size": 32}, "peak_gib": 18.0, "fits": True
    }  # fmt: skip
    together = changes_of(monkeypatch, 7.0, of_two_phases, ppo=ppo)[-1]  # adapters, beside which no need to compile
    settings = {"ppo.microbatch_size": 4, "ppo.generation_batch_size": 16, "ppo.layout": "adapters"}
    assert together == {"settings": settings, "peak_gib": 7.0, "fits": True}


def test_all_that_helps_is_told_where_nothing_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    *alone, together = changes_of(monkeypatch, 2.0, of_two_phases, ppo={**PPO, "rollout_batch_size": 64})
    assert not any(change["fits"] for change in [*alone, together])
    helping = {"ppo.microbatch_size", "ppo.generation_batch_size", "ppo.compile", "ppo.layout"}
    assert (set(together["settings"]), together["peak_gib"]) == (helping, 3.25)


def test_what_brings_little_of_much_that_lacks_is_one_of_several_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputing brings 5 GiB of 590 that lack, before the layout brings the rest."""

    def of_large_models(settings: Any) -> float:
        models = 600.0 if settings.layout != "adapters" else 9.0
        return models + (1.0 if settings.gradient_checkpointing else 6.0)

    together = changes_of(monkeypatch, 11.0, of_large_models, ppo=PPO)[-1]
    settings = {"ppo.gradient_checkpointing": True, "ppo.layout": "adapters"}
    assert together == {"settings": settings, "peak_gib": 10.0, "fits": True}


@pytest.mark.parametrize(("stage", "told"), [("sft", True), ("ppo", False)])  # ppo takes no fp16
def test_half_precision_is_told_for_a_card_without_bf16(
    monkeypatch: pytest.MonkeyPatch, stage: str, told: bool
) -> None:
    monkeypatch.setattr("test_budget_changes.H100", replace(H100, flops={"fp32": 8.0, "fp16": 65.0}))
    given = {"sft": SFT, "ppo": PPO}[stage]
    found = changes_of(monkeypatch, 20.0, lambda settings: 30.0 - 15 * (settings.precision == "fp16"), **{stage: given})
    assert ({f"{stage}.precision": "fp16"} in [change["settings"] for change in found]) == told


@pytest.mark.parametrize("layout", ["ddp", "fsdp2"])
def test_a_model_that_no_process_can_hold_whole_is_advised_to_be_sampled_by_a_server(
    monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    def spread(settings: Any) -> dict[str, float]:
        return {"rollout": 5.0 if settings.rollout.engine == "vllm" else 90.0, "update": 6.0}

    found = changes_of(monkeypatch, 10.0, spread, layout, ppo=PPO)
    server = {"settings": {"ppo.rollout": budget_changes.SERVER}, "peak_gib": 6.0, "fits": True}
    assert found == ([server] if layout == "fsdp2" else [])
