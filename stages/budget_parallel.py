"""What several processes change: what each of them holds, and what they send each other; see `budget`.

ddp           each process has the models whole, and gradients are summed up over all (all-reduce)
fsdp2         weights, gradients and moments lie in parts: a layer's weights are gathered when it is its turn, forward
              and backward, and its gradients are summed up into parts (reduce-scatter)
zero2         the same, but what was gathered stays until the backward pass has been through it, and of models that
              are only read for good

Of n processes each sends (n - 1)/n of what is gathered or scattered, and twice as much of what all are to have the sum
of. Layers are gathered in the precision of the stage and their gradients summed up in float32, with every microbatch;
the rest (embeddings, last norm, head) is both in its own type. DDP reduces gradients in their own type, with the last
microbatch. See `sharding.spread`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from rlhf.stages.budget import GIB, KINDS, Case, Held, Phase
from rlhf.stages.footprint import Moments, layers_of

LAYOUTS = ("ddp", "fsdp2")
"""Those that are tried where nothing says which, in this order."""
LAYERS = 2
"""Whose weights are gathered at one time: the one under way and the next."""
BACKWARD = 2 / 3
"""The backward pass's share of a step's work."""


@dataclass(frozen=True)
class Exchange:
    """What a phase has to do with other processes."""

    weights: float = 0.0
    """Bytes of weights that lie in parts, and are whole at one time."""
    gradients: float = 0.0
    """The same of gradients."""
    sent: float = 0.0
    """Bytes that each process sends."""
    hidden: float = 0.0
    """Share of the phase's own work that goes on meanwhile."""


def phase_of(
    name: str, held: Held, case: Case, moments: Moments, times: float | None, exchange: Exchange | None = None,
    **work: Any,
) -> Phase:  # fmt: skip
    """Of the moments that bear its name, the one in which a process has the most."""
    exchange = exchange or Exchange()
    of_it = [_of_one(held, case, most, exchange) for moment, most in moments.items() if moment.split(",")[0] == name]
    most = max(of_it, key=lambda kinds: sum(kinds.values()))
    gib = {kind: size / GIB for kind, size in most.items()}
    return Phase(name, gib, times, sent=exchange.sent, hidden=exchange.hidden, **work)


def _of_one(held: Held, case: Case, most: dict[str, float], exchange: Exchange) -> dict[str, float]:
    """Bytes of one process, by kind, from what a pass takes where the models are whole."""
    found, number = dict.fromkeys(KINDS, 0.0) | most, case.num_processes
    if case.in_parts:  # gathered weights are in the precision of the stage already, and need no copies in it
        found["weights"] = held.weights / number + exchange.weights
        found["optimiser"] = held.moments / number
        found["gradients"] = found["gradients"] / number + exchange.gradients
    else:
        found["weights"] += held.weights
        found["optimiser"] = held.moments
        if number > 1:  # they lie in what DDP sends, which is there all the time
            found["gradients"] = max(found["gradients"], held.gradients)
    return found


def updating(
    models: Sequence[PreTrainedModel], case: Case, num_steps: int = 1, num: int = 1,
    others: Sequence[PreTrainedModel] = (),
) -> Exchange:  # fmt: skip
    """Optimiser steps of `num` microbatches each, in which the models have their turns; `others` were read before."""
    if not case.in_parts:
        gradients = sum(Held().add(model).gradients for model in models)
        return Exchange(sent=2 * num_steps * _of_others(case, gradients), hidden=BACKWARD / num)
    weights, gradients = (sum(sum(of(model, case)) for model in models) for of in (_gathered, _scattered))
    passes, at_once = 2, max(_whole_at_once(model, case) for model in models)
    if case.layout == "zero2":
        passes = 1
        at_once = max(sum(_gathered(model, case)) for model in models) + sum(sum(_gathered(m, case)) for m in others)
    whole = max(max(_scattered(model, case, of_one=True)) for model in models)
    return Exchange(at_once, whole, num_steps * num * _of_others(case, passes * weights + gradients), hidden=1.0)


def reading(models: Sequence[PreTrainedModel], case: Case, num: int) -> Exchange:
    """`num` forward passes through each model, one after the other."""
    if not case.in_parts:
        return Exchange()
    size = sum(sum(_gathered(model, case)) for model in models)
    if case.layout == "zero2":
        return Exchange(size, sent=_of_others(case, size), hidden=1.0)
    return Exchange(max(_whole_at_once(model, case) for model in models), sent=num * _of_others(case, size), hidden=1.0)


def sampling(model: PreTrainedModel, case: Case, engine: str) -> Exchange:
    """An engine in this process has the whole model for as long as it samples; a server has one of its own."""
    if not case.in_parts or engine == "vllm":
        return Exchange()
    size = float(case.num_bytes * sum(p.numel() for p in model.parameters()))
    return Exchange(size, sent=_of_others(case, size))


def _of_others(case: Case, num_bytes: float) -> float:
    return num_bytes * (case.num_processes - 1) / case.num_processes


def _gathered(model: PreTrainedModel, case: Case, of_one: bool = False) -> tuple[float, float]:
    """Bytes of the weights of all layers, or of one, and of what is in none, as they are gathered."""
    return _bytes_of(model, case.num_bytes if case.half else None, of_one, trained=False)


def _scattered(model: PreTrainedModel, case: Case, of_one: bool = False) -> tuple[float, float]:
    """The same of gradients, as they are summed up."""
    return _bytes_of(model, 4 if case.half else None, of_one, trained=True)


def _bytes_of(model: PreTrainedModel, of_layers: int | None, of_one: bool, trained: bool) -> tuple[float, float]:
    """Bytes of layers, with so many for a number or as many as it has itself, and of the rest in its own type."""
    layers = layers_of(model)
    inside = {id(p) for p in layers.parameters()}
    found = [0.0, 0.0]
    for p in model.parameters():
        if p.requires_grad or not trained:
            of_layer = id(p) in inside
            found[not of_layer] += p.numel() * ((of_layer and of_layers) or p.element_size())
    return found[0] / (len(layers) if of_one else 1), found[1]


def _whole_at_once(model: PreTrainedModel, case: Case) -> float:
    layer, rest = _gathered(model, case, of_one=True)
    return LAYERS * layer + rest
