"""Where the roles of PPO are, and threads beside the main one: for scoring on a second GPU, and for sampling ahead."""

import atexit
import os
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from contextvars import copy_context
from threading import Event, Thread
from typing import TypeVar
from weakref import WeakSet

import torch

from rlhf.data.errors import RefusedError, Stopped
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.runtime import Runtime

T = TypeVar("T")
SECONDS_TO_END = 20.0
"""How long an interpreter that ends waits for a thread that has not heard of it: torch would abort the process."""


def scorers_device(run: Runtime[PPOSettings]) -> torch.device:
    """Where this process has reference and reward models. Raises RefusedError where that GPU is not there."""
    return second_gpu(run) if run.settings.placement == "second_gpu" else run.device


def second_gpu(run: Runtime[PPOSettings]) -> torch.device:
    """The one that a process has beside its own: of n processes on a machine, those after the first n GPUs."""
    num = int(os.environ.get("LOCAL_WORLD_SIZE", run.num_processes))
    seen = torch.cuda.device_count() if run.device.type == "cuda" else 0
    if seen < 2 * num:
        raise RefusedError(
            f"ppo.placement: second_gpu takes two GPUs for each process, {2 * num} for the {num} on this machine, and "
            f"{seen} are seen{'' if seen else f' (the run is on {run.device.type})'}; use fewer processes, or leave it "
            "out"
        )
    return torch.device("cuda", num + run.accelerator.local_process_index)


def begun(work: Callable[[], T], device: torch.device) -> "Future[T]":
    """What `work` will return, which is done on `device` in a thread of its own, without gradients and in the caller's
    autocast. What it raises, `result` raises.

    It may neither wait for other processes nor say what is being done (`doing`), which is for the main thread.
    """
    found: Future[T] = Future()
    autocast = torch.autocast(
        device.type, torch.get_autocast_dtype(device.type), torch.is_autocast_enabled(device.type)
    )

    def act() -> None:
        try:
            with torch.no_grad(), autocast, torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                result = work()
        except BaseException as error:  # whatever it is, the main thread waits for it
            found.set_exception(error)
        else:
            found.set_result(result)

    # Settings of torch's compiler belong to a context, in which a new thread would not be.
    thread = Thread(target=copy_context().run, args=(act,), daemon=True)
    _running.add(thread)
    thread.start()
    return found


_running: WeakSet[Thread] = WeakSet()
_ending = Event()


def end_at_exit(*_: object) -> None:
    """For a thread to call now and then: raises Stopped when the interpreter ends."""
    if _ending.is_set():
        raise Stopped(0)


@atexit.register
def _wait_for_threads() -> None:
    _ending.set()
    for thread in list(_running):
        thread.join(SECONDS_TO_END)
