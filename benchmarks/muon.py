"""A step of our Muon beside torch's, in turn, on a GPU if there is one.

    python benchmarks/muon.py

Milliseconds of a step over the matrices of a decoder's blocks, the median of several; then the largest difference
between the two after three steps, as a share of how far the weights went.
"""

import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from typing import Any

import torch

from rlhf.stages.pretrain.muon import Muon

SIZES = {"cpu": {"1M": (128, 352, 4)}, "cuda": {"11M": (384, 1024, 6), "85M": (768, 2048, 12)}}


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = (
        torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {torch.get_num_threads()} threads"
    )
    print(f"{date.today()}, {name}, torch {torch.__version__}")
    print(f"{'size':6}{'ours, ms':>12}{'torch, ms':>12}{'torch / ours':>14}{'difference':>12}")
    for size, (width, inner, layers) in SIZES[device].items():
        shapes = [(width, width)] * 4 * layers + [(inner, width)] * 2 * layers + [(width, inner)] * layers
        start = [torch.randn(shape, device=device) for shape in shapes]
        makers: list[Callable[[list[Any]], torch.optim.Optimizer]] = [
            lambda weights: Muon(weights, lr=0.02, weight_decay=0.1),
            lambda weights: torch.optim.Muon(weights, lr=0.02, weight_decay=0.1),
        ]
        sides: list[tuple[list[Any], torch.optim.Optimizer, list[float]]] = []
        for make in makers:
            weights = [torch.nn.Parameter(tensor.clone()) for tensor in start]
            sides.append((weights, make(weights), []))
        gap = 0.0
        for turn in range(13):
            torch.manual_seed(turn)
            grads = [torch.randn_like(tensor) for tensor in start]
            for weights, optimizer, times in sides:
                for weight, grad in zip(weights, grads, strict=True):
                    weight.grad = grad.clone()
                times.append(timed(optimizer, device))
            if turn == 2:
                gap = furthest(sides[0][0], sides[1][0]) / furthest(start, sides[1][0])
        ours, theirs = (statistics.median(times[3:]) for _, _, times in sides)
        print(f"{size:6}{ours:12.2f}{theirs:12.2f}{theirs / ours:14.1f}{gap:12.3f}")


def furthest(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The largest difference of any two weights."""
    return max((a.detach() - b.detach()).abs().max().item() for a, b in zip(some, others, strict=True))


def timed(optimizer: torch.optim.Optimizer, device: str) -> float:
    """Milliseconds of one step."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    optimizer.step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


if __name__ == "__main__":
    main()
