"""The accelerate config of a stage: a file, or one that is shipped; what it says of processes; what is wrong with it.

Accelerate itself would find out when the stage is launched, in words of its own, or pass over what it does not know.
"""

from collections.abc import Callable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from rlhf.data.errors import SettingsError
from rlhf.pipeline.recipe import Recipe, read_yaml, resolved
from rlhf.stages.settings import NOT_IN_FSDP, nearest

KEYS = (
    "compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes", "machine_rank",
    "num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend", "same_network",
    "main_training_function", "enable_cpu_affinity", "fp8_config", "deepspeed_config", "fsdp_config",
    "parallelism_config", "megatron_lm_config", "mpirun_config", "downcast_bf16", "tpu_name", "tpu_zone",
    "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env", "dynamo_config",
    "fp16", "dynamo_backend",
)  # fmt: skip
"""What a config may hold: the fields of accelerate's ClusterConfig, and two of older files that it still reads."""
FSDP_KEYS = (
    "fsdp_version", "fsdp_offload_params", "fsdp_min_num_params", "fsdp_sharding_strategy",
    "fsdp_reshard_after_forward", "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_backward_prefetch", "fsdp_state_dict_type", "fsdp_forward_prefetch", "fsdp_use_orig_params",
    "fsdp_cpu_ram_efficient_loading", "fsdp_sync_module_states", "fsdp_activation_checkpointing",
    "fsdp_activation_checkpointing_offload", "fsdp_ignored_modules",
)  # fmt: skip
"""What fsdp_config may hold: options of `accelerate launch`, where the first word may be left out."""
TYPES = (
    "NO", "MULTI_GPU", "FSDP", "DEEPSPEED", "MULTI_CPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA",
    "MULTI_XPU", "MULTI_HPU", "MULTI_NEURON", "XLA", "MEGATRON_LM",
)  # fmt: skip
"""Accelerate's distributed types."""


def shipped_configs() -> dict[str, Path]:
    """The configs that come with the package, by name."""
    folder = Path(str(resources.files("rlhf.recipes"))) / "accelerate"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def config_path(name: str) -> Path:
    """The file of that path, or else the shipped one of that name."""
    path = Path(name)
    return path if path.is_file() else shipped_configs().get(name, path)


def read_config(name: str | None) -> dict[str, Any]:
    """What a config says; nothing where there is none. SettingsError if it cannot be read."""
    if name is None:
        return {}
    if name == "zero3" and not Path(name).is_file():
        raise SettingsError("zero3: no such accelerate config; take fsdp2, which does what ZeRO-3 does")
    found = resolved(read_yaml(name, dict(shipped_configs()), "accelerate config"), name)
    if not isinstance(found, dict):
        raise SettingsError(f"{name}: not an accelerate config; it must be a mapping, as `accelerate config` writes it")
    return found


def num_processes(recipe: Recipe, stage: str, gpus: int) -> int:
    """How many processes a stage will have, on all machines, where `gpus` are visible on this one."""
    config = read_config(recipe.config_of(stage))
    machines = config.get("num_machines") or 1
    found = recipe.processes_of(stage) or config.get("num_processes")
    if found is None and config.get("distributed_type") == "NO":
        return 1
    return int(found or max(gpus, 1) * machines)


def on_cpu(recipe: Recipe, stage: str, gpus: int) -> bool:
    """Whether the launcher puts a stage on the CPU, where `gpus` are visible; else the stage looks for itself."""
    config = read_config(recipe.config_of(stage))
    if recipe.config_of(stage) is None:
        return num_processes(recipe, stage, gpus) > 1 and not gpus
    return bool(config.get("use_cpu") or (not gpus and config.get("distributed_type") in ("MULTI_GPU", "FSDP")))


def refuse_bad_configs(recipe: Recipe, stages: list[str], gpus: int, say: Callable[[str], None]) -> None:
    """Refuse accelerate configs with which a stage could not be launched; say what in them has no effect."""
    said: set[str] = set()
    for stage in stages:
        name = recipe.config_of(stage)
        if name is None:
            continue
        where = f"accelerate_config.{stage}" if isinstance(recipe.accelerate_config, dict) else "accelerate_config"
        try:
            config = read_config(name)
        except SettingsError as error:
            raise SettingsError(f"{where}: {error}") from None
        if problems := [f"{where}: {name}: {text}" for text in (*_unknown(config), *_wrong(config))]:
            raise SettingsError("\n".join(problems))
        processes = num_processes(recipe, stage, gpus)
        if problem := _not_so_many(config, processes):
            raise SettingsError(f"{where}: {name}: {problem}")
        if config.get("mixed_precision") not in (None, "no", False) and name not in said:
            said.add(name)
            say(f"{where}: {name}: mixed_precision has no effect; {stage}.precision decides")


def _unknown(config: Mapping[str, Any]) -> Iterator[str]:
    """Keys that accelerate would refuse in a traceback, or pass over."""
    for key in config:
        if key not in KEYS:
            yield f"no key '{key}'; {nearest(str(key), list(KEYS))}"
    section = config.get("fsdp_config") or {}
    if not isinstance(section, dict):
        yield f"fsdp_config: {section!r} has no parts; give a mapping"
        return
    for key in section:
        if key not in FSDP_KEYS and f"fsdp_{key}" not in FSDP_KEYS:
            yield f"fsdp_config: no key '{key}'; {nearest(str(key), list(FSDP_KEYS))}"


def _wrong(config: Mapping[str, Any]) -> Iterator[str]:
    """Values that cannot work on any machine."""
    kind = config.get("distributed_type")
    if config.get("compute_environment", "LOCAL_MACHINE") != "LOCAL_MACHINE":
        yield "compute_environment: only LOCAL_MACHINE can be launched from here, also on clusters"
    if kind is False:  # YAML's NO
        yield 'distributed_type: NO without quotes means false; write "NO"'
    elif kind not in TYPES:
        yield f"distributed_type: found {kind!r}; {nearest(str(kind), list(TYPES))}"
    elif kind == "DEEPSPEED":
        yield "distributed_type: DEEPSPEED is not supported; take fsdp2, which does what ZeRO-3 does, or zero2"
    elif kind == "FSDP":
        yield from _wrong_fsdp(config.get("fsdp_config") or {})
    elif kind != "NO" and not kind.startswith("MULTI_"):
        yield f"distributed_type: {kind} is not supported; take MULTI_GPU (as in ddp) or FSDP (as in fsdp2)"
    for key in ("num_processes", "num_machines"):
        found = config.get(key)
        if found is not None and (not isinstance(found, int) or isinstance(found, bool) or found < 1):
            yield f"{key}: {found!r} is no number of them; give a whole number from 1 on"
    if not isinstance(config.get("use_cpu", False), bool):
        yield f"use_cpu: found {config['use_cpu']!r}; write true or false"
    if config.get("num_machines") not in (None, 1):
        for key, example in (("main_process_ip", "10.0.0.1"), ("main_process_port", "29500")):
            if config.get(key) is None:
                yield f"{key}: not set, and several machines have to meet there; for instance {key}: {example}"


def _wrong_fsdp(section: Any) -> Iterator[str]:
    """What of FSDP is not done here, as `stages.sharding.asked_for` says it of a stage's environment."""
    if not isinstance(section, dict):  # which is told already
        return
    asked = {str(key).removeprefix("fsdp_"): str(value).lower() for key, value in section.items() if value is not None}
    if asked.get("version") != "2":
        version = asked.get("version", "1, its default")
        yield f"fsdp_config: asks for FSDP version {version}: set fsdp_version: 2"
    for name, cure in NOT_IN_FSDP:
        if asked.get(name) in ("true", "1", "yes"):
            yield f"fsdp_config: fsdp_{name} is not supported: leave it out, {cure}"


def _not_so_many(config: Mapping[str, Any], processes: int) -> str | None:
    """Why a config cannot have so many processes."""
    kind, machines = config["distributed_type"], config.get("num_machines") or 1
    if processes > 1 and kind in ("NO", "MULTI_CPU"):
        cure = "MULTI_GPU, for CPUs with use_cpu: true (as in the shipped cpu2)"
        return f"distributed_type: {kind} starts one process, and {processes} are asked for; take {cure}"
    if processes % machines:
        return f"num_machines: {processes} processes cannot be shared evenly by {machines} machines; use a multiple"
    return None
