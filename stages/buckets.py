"""Gradients of a model that every process has a copy of: they lie in the buckets that DDP sends, once.

DDP can take a bucket's parts for the gradients, but gives them out in the backward pass that sends them, and an
optimizer that drops its gradients gives them back: until the next one is sent, what microbatches add up lies beside the
buckets and takes as much again. So weights get their parts before the first step, and get them back before each.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from rlhf.stages.watchdog import collective

_parts: WeakKeyDictionary[DistributedDataParallel, dict[nn.Parameter, Tensor]] = WeakKeyDictionary()
"""Of each model the part of the buckets that is a weight's."""


def gradients_in_buckets(model: DistributedDataParallel) -> None:
    """Before the first pass of a step: weights whose gradients were dropped have zeros in their parts. All processes do
    this together the first time, for all models in the same order."""
    if model not in _parts:
        _parts[model] = _given_out(model)
    dropped = [(weight, part) for weight, part in _parts[model].items() if weight.grad is None]
    if dropped:
        torch._foreach_zero_([part for _, part in dropped])
    for weight, part in dropped:
        weight.grad = part


def _given_out(model: DistributedDataParallel) -> dict[nn.Parameter, Tensor]:
    """The parts, after DDP has dealt its gradients out to the buckets for good.

    It does so once, before the pass after the first that was sent, and together with the other processes: left to it,
    of two models that processes read in unlike numbers of microbatches, some would be at the one's buckets and some at
    the other's gradients, and wait for ever.
    """
    reducer: Any = model.reducer
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    with collective("buckets"):
        for _ in range(2):
            for weight in weights:
                weight.grad = None
            reducer._rebuild_buckets()
            reducer.prepare_for_forward()
            reducer.prepare_for_backward([])
            for weight in reversed(weights):  # as a backward pass comes by them
                torch.autograd.backward(weight, weight.new_zeros(()).expand_as(weight))
    return {weight: weight.grad for weight in weights if weight.grad is not None}
