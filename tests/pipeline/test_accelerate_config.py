"""Which accelerate config a stage is launched with, how many processes it gets, and what is refused before."""

from pathlib import Path

import pytest
from pipeline_world import FakeStages

from rlhf.data.errors import SettingsError
from rlhf.pipeline import launch, runner
from rlhf.pipeline.accelerate_config import config_path, num_processes, read_config, refuse_bad_configs
from rlhf.pipeline.recipe import Recipe, load_recipe, to_yaml

RUN = Path("run")
MULTI = 'distributed_type: "MULTI_GPU"\n'
FSDP2 = "distributed_type: FSDP\nfsdp_config: {{fsdp_version: 2, {}}}\n"


def recipe_with(*overrides: str) -> Recipe:
    return load_recipe("recipe.yaml", overrides)


def words_of(recipe: Recipe, stage: str, gpus: int, monkeypatch: pytest.MonkeyPatch) -> tuple[str, dict[str, str]]:
    monkeypatch.setattr(launch, "visible_gpus", lambda: gpus)
    words, environment = launch.command(stage, Path("run/it"), recipe)
    return " ".join(words), environment


def refused(config: str, *overrides: str) -> str:
    """Why a run with this config is refused."""
    Path("mine.yaml").write_text(config)
    with pytest.raises(SettingsError) as error:
        runner.run(recipe_with("accelerate_config=mine.yaml", *overrides), RUN, None, lambda _: None)
    assert not RUN.exists()
    return str(error.value)


def test_one_config_and_number_for_all_stages_or_one_per_stage(world: Path) -> None:
    one = recipe_with("accelerate_config=ddp", "num_processes=4")
    assert [(one.config_of(stage), one.processes_of(stage)) for stage in ("pretrain", "ppo")] == [("ddp", 4)] * 2
    each = recipe_with("accelerate_config={pretrain: fsdp2}", "num_processes={pretrain: 8, reward: 1}")
    assert (each.config_of("pretrain"), each.config_of("reward")) == ("fsdp2", None)
    assert [each.processes_of(stage) for stage in ("pretrain", "reward", "ppo")] == [8, 1, None]
    Path("again.yaml").write_text(to_yaml(each))
    assert load_recipe("again.yaml") == each
    assert recipe_with("num_processes.sft=2").processes_of("sft") == 2


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("num_processes=0", "num_processes: 0 is no number of processes; give a whole number from 1 on"),
        ("num_processes=two", "num_processes: 'two' is no number"),
        ("num_processes=true", "num_processes: True is no number"),
        ("num_processes={reward: 1.5}", "num_processes: reward: 1.5 is no number"),
        ("num_processes={rewards: 1}", "num_processes: no stage 'rewards'; did you mean 'reward'"),
        ("accelerate_config=3", "accelerate_config: 3 names no accelerate config; give a file, or the name"),
        ("accelerate_config={ppo: null}", "accelerate_config: ppo: None names no"),
        ("accelerate_config={critic: ddp}", "accelerate_config: no stage 'critic'; there are feedback, ppo, pretrain"),
        ("stop_hung_after=0", "stop_hung_after: input should be greater than 0"),
        ("sft.stop_hung_after=-1", "sft.stop_hung_after: input should be greater than 0"),
    ],
)
def test_bad_values_are_refused_with_key_and_cure(world: Path, override: str, message: str) -> None:
    with pytest.raises(SettingsError) as error:
        recipe_with(override)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_shipped_config_goes_by_name_unless_there_is_a_file_of_that_name(world: Path) -> None:
    assert config_path("fsdp2").is_file()
    Path("fsdp2").write_text(MULTI)
    assert config_path("fsdp2") == Path("fsdp2")


def test_a_shipped_config_takes_the_gpus_that_are_there(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ddp", "fsdp2"):
        recipe = recipe_with(f"accelerate_config={name}")
        words, environment = words_of(recipe, "sft", 3, monkeypatch)
        assert f" --config_file {config_path(name)} --num_processes 3 --main_process_port 0 " in words
        assert "ACCELERATE_USE_CPU" not in environment
        assert environment["RLHF_NUM_PROCESSES"] == "3"
        _, environment = words_of(recipe, "sft", 0, monkeypatch)
        assert environment["ACCELERATE_USE_CPU"] == "true"
    recipe = recipe_with("accelerate_config=cpu2")
    words, environment = words_of(recipe, "sft", 3, monkeypatch)
    assert "--num_processes" not in words
    assert (environment["ACCELERATE_USE_CPU"], environment["RLHF_NUM_PROCESSES"]) == ("true", "2")


def test_each_stage_is_launched_with_its_own(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_with("accelerate_config={pretrain: fsdp2}", "num_processes={pretrain: 8, reward: 1}")
    assert " --num_processes 8 " in words_of(recipe, "pretrain", 4, monkeypatch)[0]
    assert " --num_processes 1 " in words_of(recipe, "reward", 4, monkeypatch)[0]
    words, _ = words_of(recipe, "sft", 4, monkeypatch)
    assert " --num_processes 4 --multi_gpu " in words
    assert "--config_file" not in words


def test_without_a_number_all_gpus_of_all_machines_count(world: Path) -> None:
    Path("mine.yaml").write_text(MULTI + "num_machines: 2\nmain_process_ip: a\nmain_process_port: 1\n")
    recipe = recipe_with("accelerate_config=mine.yaml")
    assert num_processes(recipe, "sft", 8) == 16
    assert num_processes(recipe_with("accelerate_config=mine.yaml", "num_processes=4"), "sft", 8) == 4
    Path("mine.yaml").write_text('distributed_type: "NO"\n')
    assert num_processes(recipe, "sft", 8) == 1


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[1]", "not an accelerate config; it must be a mapping"),
        (MULTI + "num_proceses: 2", "mine.yaml: no key 'num_proceses'; did you mean 'num_processes'"),
        (MULTI + "num_processes: many", "num_processes: 'many' is no number of them"),
        (MULTI + "use_cpu: maybe", "use_cpu: found 'maybe'; write true or false"),
        (MULTI + "compute_environment: AMAZON_SAGEMAKER", "compute_environment: only LOCAL_MACHINE"),
        (MULTI + "num_machines: 2", "main_process_ip: not set, and several machines have to meet there"),
        ("num_processes: 2", "distributed_type: found None; there are"),
        ("distributed_type: NO", 'distributed_type: NO without quotes means false; write "NO"'),
        ("distributed_type: FDSP", "distributed_type: found 'FDSP'; did you mean 'FSDP'"),
        ("distributed_type: FSDP\nfsdp_config: 2", "fsdp_config: 2 has no parts"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_verson: 2}", "no key 'fsdp_verson'; did you mean 'fsdp_version'"),
        ("distributed_type: DEEPSPEED", "DEEPSPEED is not supported; take fsdp2, which does what ZeRO-3 does"),
        ("distributed_type: MEGATRON_LM", "MEGATRON_LM is not supported; take MULTI_GPU (as in ddp) or FSDP (as in"),
        ("distributed_type: XLA", "distributed_type: XLA is not supported; take MULTI_GPU"),
        ("distributed_type: FSDP", "fsdp_config: asks for FSDP version 1, its default: set fsdp_version: 2"),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 1}", "asks for FSDP version 1: set fsdp_version: 2"),
        (FSDP2.format("fsdp_offload_params: true"), "fsdp_offload_params is not supported: leave it out, use more"),
        (FSDP2.format("offload_params: 'yes'"), "fsdp_offload_params is not supported"),
        (
            FSDP2.format("fsdp_activation_checkpointing: true"),
            "fsdp_activation_checkpointing is not supported: leave it out, set the stage's own gradient_checkpointing",
        ),
        ("distributed_type: MULTI_CPU\nnum_processes: 2", "MULTI_CPU starts one process, and 2 are asked for"),
    ],
)
def test_a_config_that_cannot_work_is_refused_before_anything_runs(
    world: Path, stages: FakeStages, config: str, message: str
) -> None:
    said = refused(config)
    assert message in said
    assert said.startswith("accelerate_config: mine.yaml: ")
    assert stages.trained == []


def test_a_number_that_the_config_cannot_have_is_refused(world: Path, stages: FakeStages) -> None:
    assert "NO starts one process, and 2 are asked for" in refused('distributed_type: "NO"', "num_processes=2")
    several = MULTI + "num_machines: 2\nmain_process_ip: a\nmain_process_port: 1\n"
    assert "3 processes cannot be shared evenly by 2 machines" in refused(several, "num_processes=3")


def test_a_name_that_is_not_there_is_told_with_its_stage_and_those_that_are(world: Path, stages: FakeStages) -> None:
    with pytest.raises(SettingsError) as error:
        runner.run(recipe_with("accelerate_config={sft: fsdp3}"), RUN, None, lambda _: None)
    found = "accelerate_config.sft: fsdp3: no such accelerate config; did you mean 'fsdp2'? give a YAML file or a"
    assert str(error.value) == f"{found} shipped name: cpu2, ddp, fsdp2, zero2"


def test_a_precision_in_the_config_is_said_to_have_no_effect(world: Path) -> None:
    said: list[str] = []
    Path("mine.yaml").write_text(MULTI + "mixed_precision: bf16\n")
    refuse_bad_configs(recipe_with("accelerate_config=mine.yaml"), ["sft", "ppo"], 2, said.append)
    assert said == ["accelerate_config: mine.yaml: mixed_precision has no effect; sft.precision decides"]


def test_batches_are_held_against_the_processes_of_their_own_stage(world: Path, stages: FakeStages) -> None:
    with pytest.raises(SettingsError) as error:
        runner.run(recipe_with("num_processes={pretrain: 2, reward: 3}"), RUN, None, lambda _: None)
    said = "reward.global_batch_size: 64 cannot be shared evenly by 3 processes; use a multiple"
    assert str(error.value) == f"{said}: reward.global_batch_size=66"


def test_who_asks_for_zero3_is_told_what_does_the_same(world: Path) -> None:
    with pytest.raises(SettingsError, match="zero3: no such accelerate config; take fsdp2, which does what"):
        read_config("zero3")
