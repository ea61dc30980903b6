"""The processes of a stage: how many there are, which one this is, and what they do together."""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, broadcast_object_list, gather_object

from rlhf.data.errors import RefusedError
from rlhf.stages.watchdog import collective

T = TypeVar("T")


class Processes:
    """Accelerate's view of them, in the words of the stages."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.device = accelerator.device
        self.rank, self.num_processes = accelerator.process_index, accelerator.num_processes
        self.is_main = accelerator.is_main_process
        checkpoint_unwrapped(accelerator)

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

    def shard(self, indices: list[int]) -> list[int]:
        """This process's share of some rows; for training steps the shares are equal (`batch_size`)."""
        return indices[self.rank :: self.num_processes]

    def accumulate(self, microbatches: Sequence[T], *models: torch.nn.Module) -> Iterator[T]:
        """The microbatches of a step, one after the other; gradients are reduced over processes at the last."""
        for number, microbatch in enumerate(microbatches, start=1):
            with ExitStack() as stack:
                if number < len(microbatches):
                    for model in models:
                        stack.enter_context(self.accelerator.no_sync(model))
                yield microbatch

    def unwrap(self, model: Any) -> Any:
        """The model without the wrapper that accelerate put around it."""
        return self.accelerator.unwrap_model(model)

    def from_main(self, make: Callable[[], T]) -> T:
        """What `make` returns in the main process, in every process."""
        found: list[Any] = [make() if self.is_main else None]
        with collective("broadcast"):
            return broadcast_object_list(found)[0] if self.num_processes > 1 else found[0]

    def wait_for_all(self) -> None:
        """A barrier."""
        with collective("barrier"):
            self.accelerator.wait_for_everyone()

    def others(self) -> list[int]:
        """Ids of the stage's other processes on this machine."""
        if self.num_processes == 1:
            return []
        here = (socket.gethostname(), os.getpid())
        return [pid for host, pid in gather_object([here]) if host == here[0] and pid != here[1]]

    def check(self, stage: str) -> None:
        """Refuse what a stage cannot work with, and processes that do not see each other."""
        kind = self.accelerator.distributed_type
        if kind != DistributedType.NO and not kind.value.startswith("MULTI_"):
            raise RefusedError(
                f"{stage}: the accelerate config asks for {kind.value}; only data parallelism "
                "(distributed_type NO, MULTI_GPU, MULTI_CPU) is supported so far"
            )
        world = int(os.environ.get("WORLD_SIZE", "1"))
        asked = int(os.environ.get("RLHF_NUM_PROCESSES", world))
        if not world == asked == self.accelerator.num_processes:
            raise RefusedError(
                f"{asked} processes were asked for and WORLD_SIZE is {world}, but Accelerate sees "
                f"{self.accelerator.num_processes}: each would train alone and all would write; on CPUs set "
                "ACCELERATE_USE_CPU=true and pass --multi_gpu"
            )


def checkpoint_unwrapped(accelerator: Accelerator) -> None:
    """Let checkpoints name the weights as one process does: the wrapper of several puts a word before each name."""

    def on_save(models: list[torch.nn.Module], states: list[Any], _folder: str) -> None:
        states[:] = [accelerator.unwrap_model(model).state_dict() for model in models]

    def on_load(models: list[torch.nn.Module], _folder: str) -> None:
        models[:] = [accelerator.unwrap_model(model) for model in models]

    accelerator.register_save_state_pre_hook(on_save)
    accelerator.register_load_state_pre_hook(on_load)
