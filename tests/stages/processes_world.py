"""A few processes of one group."""

import fcntl
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import forking
import torch


def in_two_processes(folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """What `function(rank, *arguments)` returns in each of them; what they return lies in the folder."""
    return in_processes(2, folder, function, *arguments)


def in_processes(number: int, folder: Path, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The same of so many processes."""
    forking.context()
    torch.multiprocessing.start_processes(
        _run, (number, forking.free_port(), folder, function, arguments), nprocs=number, start_method="forkserver"
    )
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(number)]


@contextmanager
def held_until(told: Event, lock: Path, how: int) -> Iterator[None]:
    """Somebody else has the lock until we are told so, or have been waiting in silence for long."""
    with lock.open("a+") as file:
        fcntl.flock(file, how)

        def let_go() -> None:
            told.wait(10)
            fcntl.flock(file, fcntl.LOCK_UN)

        other = Thread(target=let_go)
        other.start()
        try:
            yield
        finally:
            told.set()
            other.join()


def become_rank(rank: int, port: int, number: int = 2) -> None:
    """Be one of so many processes, as a launcher tells it."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    torch.set_num_threads(1)


def _run(
    rank: int, number: int, port: int, folder: Path, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    gc.freeze()  # as tests/conftest.py does
    become_rank(rank, port, number)
    torch.save(function(rank, *arguments), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()
