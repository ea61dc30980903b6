"""Settings that do not go with several processes, spread models or the CPU are refused before a stage trains."""

from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest
from pipeline_world import FakeStages

from rlhf.data.errors import SettingsError
from rlhf.pipeline import preflight, runner
from rlhf.pipeline.fits import misfits, uneven
from rlhf.pipeline.recipe import load_recipe
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.sft import config

RUN = Path("run")
TWO = "num_processes=2"
SPREAD = ("accelerate_config=fsdp2", TWO)
AHEAD = "ppo.rollout={engine: vllm, server_url: 'http://127.0.0.1:1', one_step_off: true}"
SECOND = "ppo.placement=second_gpu"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many are seen; its last number counts."""
    seen = [8]
    monkeypatch.setattr(preflight, "visible_gpus", lambda: seen[-1])
    return seen


def refused(*overrides: str) -> str:
    """Why a run is refused, which leaves nothing behind."""
    with pytest.raises(SettingsError) as error:
        runner.run(load_recipe("recipe.yaml", overrides), RUN, None, lambda _: None)
    assert not RUN.exists()
    return str(error.value)


def problems(stage: str, gpus: int, *overrides: str) -> list[str]:
    recipe = load_recipe("recipe.yaml", overrides)
    settings = recipe.section(stage)
    assert settings is not None
    return list(misfits(settings, recipe, gpus))


@pytest.mark.parametrize("stage", ["pretrain", "sft", "reward", "ppo"])
def test_auto_microbatch_is_for_one_process(world: Path, stages: FakeStages, gpus: list[int], stage: str) -> None:
    said = refused(TWO, f"{stage}.auto_microbatch=true")
    assert said.startswith(f"{stage}.auto_microbatch: works with one process, there are 2: ")
    assert said.endswith(f"set {stage}.microbatch_size instead")
    assert stages.trained == []
    assert problems(stage, 8, "num_processes=1", f"{stage}.auto_microbatch=true") == []


@pytest.mark.parametrize(
    ("stage", "overrides", "message"),
    [
        ("pretrain", ("pretrain.precision=fp16",), "pretrain.precision: fp16 is not supported for sharded models; use"),
        ("reward", ("reward.precision=fp16",), "reward.precision: fp16 is not supported for sharded models"),
        ("pretrain", ("pretrain.optimizer=muon",), "pretrain.optimizer: muon: not with models that are spread over"),
        ("ppo", ("ppo.offload=true",), "ppo.offload: not with models that are spread over processes (FSDP): leave it"),
        ("ppo", ("ppo.layout=adapters", "ppo.quantization=8bit"), "ppo.quantization: not with models that are spread"),
    ],
)
def test_what_does_not_go_with_spread_models(
    world: Path, stages: FakeStages, gpus: list[int], stage: str, overrides: tuple[str, ...], message: str
) -> None:
    assert refused(*SPREAD, *overrides).startswith(message)
    assert stages.trained == []
    assert problems(stage, 8, *overrides, "accelerate_config=ddp", TWO) == []  # each has the whole of them
    assert problems(stage, 8, *overrides, "accelerate_config=fsdp2", "num_processes=1") == []


def test_a_precision_that_the_cpu_does_not_have(world: Path, stages: FakeStages, gpus: list[int]) -> None:
    cpu = "accelerate_config=cpu2"
    said = "sft.precision: fp16 needs a GPU, and the stage is on the CPU; use auto or fp32"
    assert refused(cpu, "sft.precision=fp16") == said
    assert stages.trained == []
    assert problems("sft", 8, cpu, "sft.precision=bf16") == []  # by the config alone, and torch does it
    assert problems("sft", 8, TWO, "sft.precision=fp16") == []
    gpus.append(0)
    for overrides in ((cpu,), (TWO,), ("accelerate_config=ddp", TWO)):
        assert refused(*overrides, "sft.precision=bf16").startswith("sft.precision: bf16 needs a GPU")
    assert problems("sft", 0, "sft.precision=fp16") == []  # the stage looks for a GPU itself


def test_kernels_of_liger_need_a_gpu_and_the_package(
    world: Path, stages: FakeStages, gpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    liger, specs = "sft.args={use_liger_kernel: true}", dict[str, ModuleSpec | None](liger_kernel=None)
    monkeypatch.setattr(config, "find_spec", lambda name: specs[name] if name in specs else find_spec(name))
    said = refused(liger)
    assert said.startswith("sft.args.use_liger_kernel: needs liger-kernel, which is not installed; `pip install rlhf-")
    specs["liger_kernel"] = find_spec("trl")
    assert problems("sft", 8, liger) == []
    for overrides in (("accelerate_config=cpu2",), ()):
        said = refused(liger, *overrides)
        assert said.startswith(
            "sft.args.use_liger_kernel: Liger's kernels need a GPU, and the stage is on the CPU; use"
        )
        gpus.append(0)
    assert stages.trained == []


def test_a_second_gpu_for_each_process_has_to_be_there(world: Path, stages: FakeStages, gpus: list[int]) -> None:
    said = "ppo.placement: second_gpu takes two GPUs for each process, 16 for the 8 on this machine, and 8 are seen; "
    assert refused(SECOND, "num_processes={pretrain: 1, sft: 1, reward: 1}").startswith(said)  # 8, if nothing is said
    assert stages.trained == []
    assert problems("ppo", 8, SECOND, "num_processes=4") == []
    assert "and 0 are seen" in problems("ppo", 8, SECOND, "accelerate_config=cpu2")[0]
    Path("mine.yaml").write_text(
        "distributed_type: MULTI_GPU\nnum_machines: 2\nmain_process_ip: a\nmain_process_port: 1\nnum_processes: 8\n"
    )
    assert problems("ppo", 8, SECOND, "accelerate_config=mine.yaml") == []  # four on each machine


def test_a_server_samples_ahead_for_one_process(world: Path, stages: FakeStages, gpus: list[int]) -> None:
    said = refused(TWO, AHEAD)
    assert said.startswith("ppo.rollout.one_step_off: with engine vllm it works with one process, there are 2, which")
    assert stages.trained == []
    assert problems("ppo", 8, "num_processes=1", AHEAD) == []


def test_blocks_of_raw_text_are_shared_evenly_too(world: Path, stages: FakeStages, gpus: list[int]) -> None:
    said = "ppo.ptx_batch_size: 3 cannot be shared evenly by 2 processes; use a multiple: ppo.ptx_batch_size=4"
    assert refused(TWO, "ppo.ptx_coef=1", "ppo.ptx_data=text.jsonl", "ppo.ptx_batch_size=3") == said
    assert stages.trained == []


@pytest.mark.parametrize(
    ("stage", "processes", "overrides", "found", "cure"),
    [
        ("sft", 64, ["sft.global_batch_size=32"], "sft.global_batch_size: 32", "sft.global_batch_size=64"),
        ("reward", 64, ["reward.global_batch_size=65"], "reward.global_batch_size: 65", "reward.global_batch_size=128"),
        # Two minibatches of 64 make 128; prompts of three answers each, 384.
        ("ppo", 64, ["ppo.rollout_batch_size=64", "ppo.num_minibatches=2"], "ppo.rollout_batch_size / num_minibatches: "
         "32", "ppo.rollout_batch_size=128"),
        ("ppo", 64, ["ppo.rollout_batch_size=66", "ppo.num_minibatches=2", "ppo.num_samples_per_prompt=3"],
         "ppo.rollout_batch_size / num_minibatches: 33", "ppo.rollout_batch_size=384"),
        # 100 tokens are three blocks of 32; four blocks are 128 tokens.
        ("pretrain", 4, ["pretrain.global_batch_tokens=100", "pretrain.block_size=32"],
         "pretrain.global_batch_tokens / block_size: 3", "pretrain.global_batch_tokens=128"),
    ],
)  # fmt: skip
def test_the_cure_for_an_uneven_batch_is_an_override_that_works(
    world: Path, stage: str, processes: int, overrides: list[str], found: str, cure: str
) -> None:
    def said(*more: str) -> list[str]:
        settings = load_recipe("recipe.yaml", [*overrides, *more]).section(stage)
        assert settings is not None
        return list(uneven(settings, processes))

    assert said() == [f"{found} cannot be shared evenly by {processes} processes; use a multiple: {cure}"]
    assert said(cure) == []


def test_blocks_as_long_as_a_model_takes_them_are_left_to_the_stage(world: Path) -> None:
    """Of 2,048 tokens a model with 512 positions makes four blocks, though context_length would make two."""

    def settings(*more: str) -> PretrainSettings:
        found = load_recipe("recipe.yaml", ["pretrain.model=./base", *more]).section("pretrain")
        assert isinstance(found, PretrainSettings)
        return found

    tokens = "pretrain.global_batch_tokens=2048"
    assert settings(tokens).global_batch(512) == ("global_batch_tokens / block_size", 4, 512)
    assert list(uneven(settings(tokens), 4)) == []
    [problem] = uneven(settings(tokens, "pretrain.block_size=1024"), 4)
    assert problem.startswith("pretrain.global_batch_tokens / block_size: 2 cannot be shared evenly by 4 processes")
    [problem] = uneven(settings("pretrain.global_batch_size=6"), 4)
    assert problem.startswith("pretrain.global_batch_size: 6 cannot be shared evenly by 4 processes")
