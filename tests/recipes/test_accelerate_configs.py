"""The shipped accelerate configs, read and turned into the environment of a stage by accelerate itself."""

import argparse
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_multi_gpu_env

from rlhf.pipeline.accelerate_config import FSDP_KEYS, KEYS, TYPES, read_config, shipped_configs

NAMES = ("cpu2", "ddp", "fsdp2", "zero2")


def launched(name: str, *words: str) -> argparse.Namespace:
    """Accelerate's own options for a shipped config."""
    parser = launch_command_parser()
    options = parser.parse_args(
        ["--config_file", str(shipped_configs()[name]), *words, "--main_process_port", "0", "-m", "stage"]
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


def test_we_know_the_keys_that_the_installed_accelerate_knows() -> None:
    """Ours are refused by name; a key that accelerate has gained must not be."""
    assert set(KEYS) == {field.name for field in fields(ClusterConfig)} | {"fp16", "dynamo_backend"}
    assert set(TYPES) == {kind.value for kind in DistributedType}
    options = {action.dest for action in launch_command_parser()._actions}
    assert set(FSDP_KEYS) - {"fsdp_ignored_modules"} == {name for name in options if name.startswith("fsdp_")}
