"""The processes of a stage: how many there are, which one this is, and what they do together."""

import inspect
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DistributedDataParallelKwargs,
    DistributedType,
    broadcast_object_list,
    gather_object,
)
from torch.nn.parallel import DistributedDataParallel

from rlhf.data.errors import RefusedError
from rlhf.stages import sharding
from rlhf.stages.buckets import gradients_in_buckets
from rlhf.stages.settings import StageSettings
from rlhf.stages.sharding import Rows
from rlhf.stages.watchdog import collective, went_into

T = TypeVar("T")
Model = TypeVar("Model", bound=torch.nn.Module)


class DDP(DistributedDataParallelKwargs):
    """How Accelerate wraps models in DDP: gradients lie in what is sent (see `buckets`), and buffers, which decoders
    never change, stay where they are. They would be sent at the first microbatch of a step: processes that read two
    models in unlike numbers of microbatches would send in unlike orders, and wait for each other."""

    def to_kwargs(self) -> dict[str, Any]:
        """Arguments of torch's wrapper; one of them has another name since torch 2.13."""
        known = inspect.signature(DistributedDataParallel).parameters
        no_buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        return {"gradient_as_bucket_view": True, no_buffers: False}


def _goes_for_weights(*_: Any) -> None:
    """A sharded layer gathers its weights, in training together with those of the other processes; without gradients
    they may be there already (`sharding.gathered`), and each process reads as often as it likes."""
    if torch.is_grad_enabled():
        went_into("weights")


def _was_asked_for_more() -> bool:
    """Whether `accelerate launch`, by hand, was to start several processes on this machine and started this one alone.

    Its launcher of one process leaves where they would have met, and no WORLD_SIZE: a place that it was given itself,
    by a shell or a cluster, says nothing. Its `--cpu` takes the number of GPUs for that of processes where none is
    given. A run says how many it wants. Without /proc, all that cannot be told.
    """
    given, launcher = os.environ, Path(f"/proc/{os.getppid()}")
    if given.get("MASTER_ADDR") != "127.0.0.1" or "WORLD_SIZE" in given or "RLHF_NUM_PROCESSES" in given:
        return False
    with suppress(OSError):
        words, variables = ((launcher / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
        is_launcher = any(b"accelerate" in word for word in words)
        has_place = any(variable.startswith(b"MASTER_ADDR=") for variable in variables)
        is_told = b"--cpu" not in words or any(
            word.replace(b"_", b"-").startswith((b"--num-p", b"--config")) for word in words
        )
        return is_launcher and is_told and not has_place
    return False


class Processes:
    """Accelerate's view of them, in the words of the stages."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.device = accelerator.device
        self.rank, self.num_processes = accelerator.process_index, accelerator.num_processes
        self.is_main = accelerator.is_main_process
        self.sharding = sharding.asked_for() if self.num_processes > 1 else None
        """How models are spread over the processes; None where each has the whole of them."""
        self._reduces = False
        """Whether gradients are reduced in the backward pass of the microbatch at hand."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over all processes, element by element; float64 is welcome on the CPU (some devices lack it)."""
        if self.num_processes == 1:
            return values
        with collective("sum"):
            reduced = self.accelerator.reduce(values.to(self.device), reduction="sum")
        assert isinstance(reduced, torch.Tensor)
        return reduced

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Maximum over all processes, element by element, of a vector."""
        if self.num_processes == 1:
            return values
        with collective("max"):
            gathered = self.accelerator.gather(values.to(self.device)[None])
        assert isinstance(gathered, torch.Tensor)
        return gathered.amax(0)

    def shard(self, rows: list[T]) -> list[T]:
        """This process's share of some rows, or of their numbers; for training steps the shares are equal
        (`batch_size`)."""
        return rows[self.rank :: self.num_processes]

    def accumulate(self, microbatches: Sequence[Rows], *models: torch.nn.Module) -> Iterator[Rows]:
        """The microbatches of a step, one after the other; gradients are reduced over processes in the backward pass of
        the last, those of sharded models in that of each."""
        sharding.settle()
        for model in models:
            if isinstance(model, DistributedDataParallel):
                gradients_in_buckets(model)
        microbatches = sharding.evenly(microbatches, *models)
        for number, microbatch in enumerate(microbatches, start=1):
            with ExitStack() as stack:
                if number < len(microbatches):
                    for model in models:
                        stack.enter_context(self.accelerator.no_sync(model))
                self._reduces = number == len(microbatches) or self.sharding is not None
                yield microbatch

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of a microbatch's loss, which counts in a sum over all processes."""
        with self.reducing():
            self.accelerator.backward(loss * self.num_processes)  # DDP averages gradients over processes

    def reducing(self) -> AbstractContextManager[None]:
        """Around the backward pass of a microbatch, in which a process may wait for the others: not in the forward pass
        before it, or the one that hangs there would be taken for one that waits."""
        return collective("gradients") if self._reduces else nullcontext()

    @property
    def low_precision(self) -> torch.dtype | None:
        """The autocast type, which models that are not trained may be kept in; None where all is float32."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision)

    def spread(self, model: Model) -> Model:
        """Bring a model to the device, before its optimizer is made: spread over the processes if that is asked for.
        In place."""
        if self.sharding is None:
            model.to(self.device)
        else:
            sharding.spread(model, self.sharding, self.device, self.low_precision)
            for module in filter(sharding.is_sharded, model.modules()):
                module.register_forward_pre_hook(_goes_for_weights, prepend=True)
            if any(weight.requires_grad for weight in model.parameters()):
                self.accelerator.prepare_model(model, evaluation_mode=True)  # autocast, and not to be wrapped again
        return model

    def whole(self, model: Any, to_sample: bool = False) -> AbstractContextManager[Any]:
        """A model with all of its weights, for the main process to save, or to sample from; all ask for it together."""
        model = self.unwrap(model)
        if not sharding.is_sharded(model):
            return nullcontext(model)
        device, dtype = (self.device, self.low_precision) if to_sample else (torch.device("cpu"), None)
        return sharding.Whole(model, device, dtype, everywhere=False)

    def clip_gradients(self, model: torch.nn.Module, max_norm: float) -> torch.Tensor:
        """The norm that they had."""
        with nullcontext() if self.sharding is None else collective("gradient norm"):
            norm = self.accelerator.clip_grad_norm_(model.parameters(), max_norm)
        return sharding.full(torch.as_tensor(norm))

    def unwrap(self, model: Any) -> Any:
        """The model without the wrapper that accelerate put around it."""
        return self.accelerator.unwrap_model(model)

    def from_main(self, make: Callable[[], T]) -> T:
        """What `make` returns in the main process, in every process."""
        found: list[Any] = [make() if self.is_main else None]
        with collective("broadcast"):
            return broadcast_object_list(found)[0] if self.num_processes > 1 else found[0]

    def gather_objects(self, values: list[T]) -> list[T]:
        """The values of all processes in one list, those of the first process first, in every process."""
        if self.num_processes == 1:
            return values
        with collective("gather"):
            found: list[T] = gather_object(values)
        return found

    def wait_for_all(self) -> None:
        """A barrier."""
        with collective("barrier"):
            self.accelerator.wait_for_everyone()

    def others(self) -> list[int]:
        """Ids of the stage's other processes on this machine."""
        if self.num_processes == 1:
            return []
        here = (socket.gethostname(), os.getpid())
        return [pid for host, pid in self.gather_objects([here]) if host == here[0] and pid != here[1]]

    @property
    def in_words(self) -> str:
        """How many they are, and how they share the models."""
        if self.num_processes == 1:
            return "1 process"
        how = "ddp"
        if self.sharding is not None:
            how = "fsdp2" if self.sharding.reshard_after_forward else "zero2"
        return f"{self.num_processes} processes, {how}"

    def check(self, settings: StageSettings) -> None:
        """Refuse what a stage cannot work with, and processes that do not see each other."""
        stage, kind = settings.stage, self.accelerator.distributed_type
        if kind == DistributedType.DEEPSPEED:
            raise RefusedError(
                f"{stage}: the accelerate config asks for DEEPSPEED, which is not supported; use distributed_type FSDP "
                "with fsdp_version: 2 (the shipped fsdp2), which does what ZeRO-3 does, or with "
                "fsdp_reshard_after_forward: false (zero2), which does what ZeRO-2 does"
            )
        if kind != DistributedType.NO and not kind.value.startswith("MULTI_"):
            raise RefusedError(
                f"{stage}: the accelerate config asks for {kind.value}; NO, MULTI_GPU, MULTI_CPU and FSDP (version 2) "
                "are supported"
            )
        if self.sharding is not None and self.accelerator.mixed_precision == "fp16":
            raise RefusedError(f"{stage}.precision: fp16 is not supported for sharded models; use bf16 or fp32")
        if self.num_processes == 1 and _was_asked_for_more():
            raise RefusedError(
                f"{stage}: `accelerate launch` was asked for several processes and started one, as it does with --cpu, "
                "or where there is no GPU; on CPUs set ACCELERATE_USE_CPU=true and pass --multi_gpu, or take torchrun; "
                "for one process pass --num_processes 1"
            )
        world = int(os.environ.get("WORLD_SIZE", "1"))
        asked = int(os.environ.get("RLHF_NUM_PROCESSES", world))
        if not world == asked == self.accelerator.num_processes:
            raise RefusedError(
                f"{asked} processes were asked for and WORLD_SIZE is {world}, but Accelerate sees "
                f"{self.accelerator.num_processes}: each would train alone and all would write; on CPUs set "
                "ACCELERATE_USE_CPU=true and pass --multi_gpu"
            )
        of_parts = () if self.sharding is None else settings.why_not_spread()
        for problem in (settings.why_alone(self.num_processes), *of_parts):
            if problem:
                raise RefusedError(problem)

    def refuse_unlike(self, stage: str, digests: dict[str, str]) -> None:
        """Refuse processes that found other contents under a name of `digests`: they would train on a mixture, or wait
        for each other for ever."""
        for rank, others in enumerate(self.gather_objects([digests])):
            if unlike := [name for name, digest in digests.items() if others.get(name) != digest]:
                raise RefusedError(
                    f"{stage}.{unlike[0]}: is not the same in rank {self.rank} and rank {rank}; leave its files as "
                    "they are while processes start, and let a function give the same rows in the same order in each "
                    "of them (that of a set differs)"
                )
