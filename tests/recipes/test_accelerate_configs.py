"""The shipped accelerate configs, read and turned into the environment of a stage by accelerate itself."""

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env

from rlhf.data.errors import RefusedError
from rlhf.pipeline.accelerate_config import (
    FSDP_KEYS,
    KEYS,
    TYPES,
    config_path,
    read_config,
    refuse_bad_configs,
    shipped_configs,
)
from rlhf.pipeline.recipe import Recipe
from rlhf.stages import sharding

NAMES = ("cpu2", "ddp", "fsdp2", "zero2")


def launched(name: str, *words: str) -> argparse.Namespace:
    """Accelerate's own options for a config."""
    parser = launch_command_parser()
    options = parser.parse_args(
        ["--config_file", str(config_path(name)), *words, "--main_process_port", "0", "-m", "stage"]
    )
    found, _, _ = _validate_launch_command(options)
    return found  # type: ignore[no-any-return]


def test_the_shipped_configs_are_those_that_the_documentation_names() -> None:
    assert tuple(shipped_configs()) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_reads_it_and_leaves_the_precision_to_the_stage(name: str) -> None:
    config = load_config_from_file(str(shipped_configs()[name]))
    assert config.mixed_precision == "no"
    assert config.num_machines == 1
    assert config.num_processes == (2 if name == "cpu2" else -1)  # −1: to be said


def test_the_config_at_the_top_of_the_repository_is_ddp() -> None:
    top = Path(__file__).parents[2] / "accelerate_config.yaml"
    assert yaml.safe_load(top.read_text(encoding="utf-8")) == read_config("ddp")
    options = launched("ddp", "--num_processes", "4")
    assert (options.multi_gpu, options.num_processes, options.use_cpu) == (True, 4, False)


def test_cpu2_is_two_processes_of_a_group_and_not_one() -> None:
    options = launched("cpu2")
    assert (options.multi_gpu, options.cpu, options.num_processes) == (True, False, 2)
    prepare_multi_gpu_env(options)
    assert options.nproc_per_node == "2"


def test_fsdp2_is_version_2_in_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = prepare_multi_gpu_env(launched("fsdp2", "--num_processes", "2"))
    assert environment["ACCELERATE_USE_FSDP"] == "true"
    for variable, value in environment.items():
        if variable.startswith("FSDP_"):
            monkeypatch.setenv(variable, value)
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, True)
    assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
    assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"
    assert not plugin.cpu_ram_efficient_loading
    assert not plugin.activation_checkpointing


@pytest.mark.parametrize(
    "asked",
    [
        {}, {"fsdp_version": 1}, {"fsdp_version": 2}, {"fsdp_version": "2"}, {"version": 2},
        {"fsdp_version": 2, "fsdp_offload_params": True}, {"fsdp_version": 2, "offload_params": "no"},
        {"fsdp_version": 2, "fsdp_activation_checkpointing": True}, {"fsdp_version": 2, "activation_checkpointing": 0},
    ],
)  # fmt: skip
def test_a_config_is_refused_before_a_run_if_and_only_if_a_stage_would_refuse_it(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": asked}))
    recipe = Recipe.load({"accelerate_config": str(path), "sft": {"data": "d.jsonl"}}, "")
    for variable, value in prepare_multi_gpu_env(launched(str(path))).items():
        if variable.startswith(("FSDP_", "ACCELERATE_USE_FSDP")):
            monkeypatch.setenv(variable, value)
    said = []
    sharding.asked_for.cache_clear()
    for refuse in (sharding.asked_for, lambda: refuse_bad_configs(recipe, ["sft"], 2, print)):
        try:
            refuse()
        except RefusedError as error:
            said.append(str(error))
    sharding.asked_for.cache_clear()
    assert len(said) in (0, 2)
    refused_by_accelerates_default = asked.get("fsdp_version", asked.get("version", 1)) not in (2, "2")
    assert bool(said) == (refused_by_accelerates_default or True in asked.values())


def test_we_know_the_keys_that_the_installed_accelerate_knows() -> None:
    """Ours are refused by name; a key that accelerate has gained must not be."""
    assert set(KEYS) == {field.name for field in fields(ClusterConfig)} | {"fp16", "dynamo_backend"}
    assert set(TYPES) == {kind.value for kind in DistributedType}
    options = {action.dest for action in launch_command_parser()._actions}
    assert set(FSDP_KEYS) - {"fsdp_ignored_modules"} == {name for name in options if name.startswith("fsdp_")}
