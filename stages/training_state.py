"""What training goes on from, on disk: the weights that learn, the optimizers' moments, and other tensors of a stage.

Through torch.distributed.checkpoint, in any layout: each process writes the parts that it has, and reads those that it
needs, whoever has written them. The files are safetensors and JSON, so that nothing is unpickled.
"""

import json
import logging
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.logger import _dcp_logger
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as read_together
from torch.distributed.checkpoint.state_dict_saver import save as write_together

from rlhf.stages.sharding import reshard
from rlhf.stages.watchdog import at_work, collective

_TENSORS, _NUMBERS = "tensors", "optimizers.json"
_FILE_SIZE = 2**32  # about, in bytes of whole tensors: a file is put together in memory

_dcp_logger.setLevel(logging.WARNING)  # else it makes a dictionary for each tensor


class _Writer(HuggingFaceStorageWriter):
    """Tells what a process does by itself, and may hang in, from where it waits for the others."""

    prepare_local_plan = at_work()(HuggingFaceStorageWriter.prepare_local_plan)  # makes a folder
    write_data = at_work()(HuggingFaceStorageWriter.write_data)
    finish = at_work()(HuggingFaceStorageWriter.finish)


class _Reader(HuggingFaceStorageReader):
    """The same."""

    read_metadata = at_work()(HuggingFaceStorageReader.read_metadata)
    read_data = at_work()(HuggingFaceStorageReader.read_data)


Others = Mapping[str, Mapping[str, Tensor]]
"""Further tensors, in groups."""


@torch.no_grad()
def save(folder: Path, models: Sequence[nn.Module], optimizers: Sequence[Any], others: Others, is_main: bool) -> None:
    """Write it into `folder`, all processes together. Frozen weights are left out: they are where they came from."""
    names = _names(models)
    tensors = {name: weight.detach() for weight, name in names.items()} | _flat(others)
    numbers: dict[str, Any] = {}
    for number, optimizer in enumerate(optimizers):
        for weight, moments in optimizer.state.items():
            for key, value in moments.items():
                place = tensors if isinstance(value, Tensor) else numbers
                place[f"optimizers.{number}.{names[weight]}.{key}"] = value
    writer = _Writer(str(folder / _TENSORS), _files(tensors), save_distributed=True)
    with collective("checkpoint"), _as_its_cause():
        write_together(tensors, storage_writer=writer)
    if is_main:  # last: where it fails, nobody waits for this process
        groups = [[_without_weights(group) for group in optimizer.param_groups] for optimizer in optimizers]
        (folder / _NUMBERS).write_text(json.dumps({"groups": groups, "numbers": numbers}), encoding="utf-8")


@torch.no_grad()
def load(folder: Path, models: Sequence[nn.Module], optimizers: Sequence[Any], others: Others) -> None:
    """Read what `save` wrote, by however many processes. Raises RuntimeError where it is of other weights."""
    names = _names(models)
    reader = _Reader(str(folder / _TENSORS))
    about = reader.read_metadata().state_dict_metadata
    saved = {name: part for name, part in about.items() if isinstance(part, TensorStorageMetadata)}
    numbers = json.loads((folder / _NUMBERS).read_text(encoding="utf-8"))
    tensors = {name: weight.detach() for weight, name in names.items()} | _flat(others)
    shapes = {name: part.size for name, part in saved.items() if not name.startswith("optimizers.")}
    if shapes != {name: tensor.shape for name, tensor in tensors.items()}:
        raise RuntimeError(f"{folder}: the checkpoint holds other weights than those that are trained now")
    moments: dict[str, dict[str, Any]] = defaultdict(dict)  # by optimizer and weight
    for name in [*saved, *numbers["numbers"]]:
        owner, _, key = name.rpartition(".")
        moments[owner][key] = saved[name] if name in saved else numbers["numbers"][name]
    for number, optimizer in enumerate(optimizers):
        optimizer.state.clear()
        for group, was in zip(optimizer.param_groups, numbers["groups"][number], strict=True):
            group |= {key: tuple(value) if isinstance(value, list) else value for key, value in was.items()}
            for weight in group["params"]:
                owner = f"optimizers.{number}.{names[weight]}"
                for key, value in moments[owner].items():
                    if isinstance(value, TensorStorageMetadata):
                        value = tensors[f"{owner}.{key}"] = _room(value, weight, group)
                    optimizer.state[weight][key] = value
    with collective("checkpoint"), _as_its_cause():
        read_together(tensors, storage_reader=reader)


def _names(models: Sequence[nn.Module]) -> dict[nn.Parameter, str]:
    """Of all weights that learn; one that several models share has the name that it has in the first."""
    found: dict[nn.Parameter, str] = {}
    for number, model in enumerate(models):
        reshard(model)
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                found.setdefault(weight, f"models.{number}.{name}")
    return found


def _flat(others: Others) -> dict[str, Tensor]:
    return {f"{group}.{name}": tensor for group, tensors in others.items() for name, tensor in tensors.items()}


def _without_weights(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """In which file, from 1, a process writes its part of each tensor."""
    found, size = {}, 0
    for name, tensor in tensors.items():
        size += tensor.nbytes
        found[name] = 1 + size // _FILE_SIZE
    return found


def _room(about: TensorStorageMetadata, weight: nn.Parameter, group: dict[str, Any]) -> Tensor:
    """A tensor to be filled, one of a weight's moments; the number of steps lies where the optimizer looks for it."""
    dtype = about.properties.dtype
    if about.size == weight.shape:
        return torch.zeros_like(weight, dtype=dtype)
    on_device = group.get("fused") or group.get("capturable")
    return torch.zeros(about.size, dtype=dtype, device=weight.device if on_device else "cpu")


@contextmanager
def _as_its_cause() -> Iterator[None]:
    """Raise what went wrong in any process as itself; one process alone is no reason for a warning."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
            yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from None
