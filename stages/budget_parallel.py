"""What several processes change: what each of them holds, and what they send each other; see `budget`.

ddp           each process has the models whole, and gradients are summed up over all (all-reduce)
zero2         gradients are summed up into parts (reduce-scatter); each process has the moments of its part, makes the
              step there, and the new weights are gathered (all-gather)
fsdp2         weights lie in parts too: a layer's are gathered when it is its turn, forward and backward

Of n processes each sends (n - 1)/n of what is gathered or scattered, and twice as much of what all are to have the sum
of. What lies in parts is gathered and scattered in the precision of the stage, as Accelerate sets it up, and with every
microbatch; DDP reduces gradients in their own type, with the last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
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
    if case.weights_in_parts:  # gathered ones are in the precision of the stage already, and need no copies in it
        found["weights"] = held.weights / number + exchange.weights
    else:
        found["weights"] += held.weights
    if case.gradients_in_parts:
        found["optimiser"] = held.moments / number
        found["gradients"] = found["gradients"] / number + exchange.gradients
    else:
        found["optimiser"] = held.moments
        if number > 1:  # they lie in what DDP sends, which is there all the time
            found["gradients"] = max(found["gradients"], held.gradients)
    return found


def updating(models: Sequence[PreTrainedModel], case: Case, num_steps: int = 1, num: int = 1) -> Exchange:
    """Optimiser steps of `num` microbatches each, in which the models have their turns."""
    if not case.gradients_in_parts:
        gradients = sum(Held().add(model).gradients for model in models)
        return Exchange(sent=2 * num_steps * _of_others(case, gradients), hidden=BACKWARD / num)
    whole = max(max(_parts(model, case, trained=True)) for model in models)
    trained = sum(_size(model, case, trained=True) for model in models)
    if not case.weights_in_parts:
        sent = num_steps * _of_others(case, num * trained + trained)
        return Exchange(gradients=whole, sent=sent, hidden=BACKWARD / num)
    read = reading(models, case, 2 * num_steps * num)
    sent = read.sent + num_steps * _of_others(case, num * trained)
    return Exchange(read.weights, whole, sent, hidden=1.0)


def reading(models: Sequence[PreTrainedModel], case: Case, num: int) -> Exchange:
    """`num` passes through each model, forward or backward, one after the other."""
    if not case.weights_in_parts:
        return Exchange()
    sent = num * _of_others(case, sum(_size(model, case) for model in models))
    return Exchange(max(_whole_at_once(model, case) for model in models), sent=sent, hidden=1.0)


def sampling(model: PreTrainedModel, case: Case, engine: str) -> Exchange:
    """An engine in this process has the whole model for as long as it samples; a server has one of its own."""
    if not case.weights_in_parts or engine == "vllm":
        return Exchange()
    size = _size(model, case)
    return Exchange(size, sent=_of_others(case, size))


def _of_others(case: Case, num_bytes: float) -> float:
    return num_bytes * (case.num_processes - 1) / case.num_processes


def _size(model: nn.Module, case: Case, trained: bool = False) -> float:
    """Bytes in the precision of the stage: of all weights, or of those that are trained."""
    return float(case.num_bytes * sum(p.numel() for p in model.parameters() if p.requires_grad or not trained))


def _parts(model: PreTrainedModel, case: Case, trained: bool = False) -> tuple[float, float]:
    """The same of a layer, and of what is in none: embeddings, head."""
    layers = layers_of(model)
    of_all = sum(_size(layer, case, trained) for layer in layers)
    return of_all / len(layers), _size(model, case, trained) - of_all


def _whole_at_once(model: PreTrainedModel, case: Case) -> float:
    layer, rest = _parts(model, case)
    return LAYERS * layer + rest
