"""Models whose weights are spread over the processes (FSDP2: torch's `fully_shard`), and what reads them whole.

Accelerate's config asks for it (`distributed_type: FSDP`, `fsdp_version: 2`) and Accelerate starts the processes; the
models are spread here. Accelerate's own way takes one model, none on a CPU, and keeps no head in float32.
"""

import copy
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf.data.errors import RefusedError
from rlhf.stages.engines import Engine, Responses
from rlhf.stages.settings import NOT_IN_FSDP
from rlhf.stages.watchdog import collective


@dataclass(frozen=True)
class Sharding:
    """What the accelerate config says of it."""

    reshard_after_forward: bool
    """Whether a layer's weights are let go after its forward pass and gathered again for the backward pass."""


@cache
def asked_for() -> Sharding | None:
    """What the accelerate config asks for; None where it is no sharding. Refuses what is not done here.

    The request is taken out of the environment: Accelerate and transformers would see to it too, each in its way.
    """
    if not _is_true("ACCELERATE_USE_FSDP"):
        return None
    version = os.environ.get("FSDP_VERSION", "1")
    if version != "2":
        raise RefusedError(f"the accelerate config asks for FSDP version {version}: set fsdp_version: 2 in fsdp_config")
    for name, cure in NOT_IN_FSDP:
        if _is_true(f"FSDP_{name.upper()}"):
            raise RefusedError(f"fsdp_{name} in the accelerate config is not supported: leave it out, {cure}")
    del os.environ["ACCELERATE_USE_FSDP"]
    return Sharding(_is_true("FSDP_RESHARD_AFTER_FORWARD", "true"))


def later(model: nn.Module, dtype: torch.dtype) -> None:
    """Have the weights of a model in this type when it is spread.

    Until then they may be as they lie in the model's file, which is mapped into memory: all processes of a machine
    then share it, and none has a copy of its own.
    """
    for weight in model.parameters():
        _types[weight] = dtype


def spread(model: nn.Module, sharding: Sharding, device: torch.device, dtype: torch.dtype | None) -> None:
    """Spread the weights of a model over all processes, in place; what each has of them goes to its `device`, layer by
    layer, so that no process needs room for all.

    Whenever a layer is at work its weights are gathered, in `dtype` if there is one; so are those of heads to one
    number and the rest (embeddings, last norm), in their own type. The model is called by its forward alone; for
    all else see `gathered` and `Whole`.
    """
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # for those who change its output in place
    _skeletons[model] = _skeleton(model)
    settings: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "reshard_after_forward": sharding.reshard_after_forward,
    }
    as_it_is = MixedPrecisionPolicy(cast_forward_inputs=False)
    in_dtype = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    inside = {module for layer in layers for module in layer.modules()}
    for layer in layers:
        fully_shard(_brought(layer, device), mp_policy=in_dtype, **settings)
    for module in list(model.modules()):
        if isinstance(module, nn.Linear) and module.out_features == 1 and module not in inside:
            fully_shard(_brought(module, device), mp_policy=as_it_is, **settings)
    root = fully_shard(_brought(model, device), mp_policy=as_it_is, **settings)
    root._get_fsdp_state()._lazy_init()  # else whatever is called first would be taken for the root
    _move_buffers(model, device)


def _brought(module: nn.Module, device: torch.device) -> nn.Module:
    for weight in module.parameters():
        if not isinstance(weight, DTensor):
            weight.data = weight.data.to(device, _types.get(weight, weight.dtype))
    return module


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def full(tensor: Tensor) -> Tensor:
    """All of a tensor that is spread over the processes, which ask for it together; any other as it is."""
    if not isinstance(tensor, DTensor):
        return tensor
    with collective("weights"):
        return tensor.full_tensor()


def local(tensor: Tensor) -> Tensor:
    """What this process has of a tensor that is spread over the processes."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reshard(model: nn.Module) -> None:
    """Let go of gathered weights: afterwards the parameters are those of the optimizer."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def settle() -> None:
    """Before gradients are made: drop what sharded models noted for backward passes that never came, of evaluations,
    of rollouts, of a reference. Processes that have read unequally often would gather unlike layers ahead of time."""
    for model in _skeletons:
        if hasattr(model, "reset_iter_state"):
            model.reset_iter_state()
            continue
        for state in model._get_fsdp_state()._state_ctx.all_states:  # torch 2.11 has no word for it
            state._comm_ctx.post_forward_order.clear()
            if state._fsdp_param_group is not None:
                state._fsdp_param_group._post_forward_indices.clear()


class Divisible(Protocol):
    """Rows: a list, a tensor or a piece."""

    def __len__(self) -> int: ...

    def __getitem__(self, some: slice, /) -> Any: ...


Rows = TypeVar("Rows", bound=Divisible)


def evenly(parts: Sequence[Rows], *models: nn.Module) -> list[Rows]:
    """`parts` of rows, of which some are cut in two until there are equally many in every process.

    Sharded models are read by all processes together, each time; with other models nothing is cut. All processes have
    as many rows.
    """
    parts = list(parts)
    of_a_shard = next((model for model in models if is_sharded(model)), None)
    if of_a_shard is None:
        return parts
    most = torch.tensor(len(parts), device=next(of_a_shard.parameters()).device)
    with collective("max"):
        dist.all_reduce(most, dist.ReduceOp.MAX)
    while len(parts) < most:
        place = max(range(len(parts)), key=lambda place: len(parts[place]))
        part = parts[place]
        half = len(part) // 2
        assert half, "the processes have unequally many rows"
        parts[place : place + 1] = [part[:half], part[half:]]
    return parts


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Inside, every process has all weights of a sharded model, and reads with it as often as it likes, without
    gradients. Other models are left as they are."""
    parts = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for part in parts:
        with collective("weights"):
            part.unshard()
        part.set_reshard_after_forward(False, recurse=False)
    try:
        yield
    finally:
        for part in parts:
            sharding = asked_for()
            part.set_reshard_after_forward(sharding is None or sharding.reshard_after_forward, recurse=False)
            part.reshard()


_types: Any = WeakTensorKeyDictionary()
"""Of weights that are still to be spread: what they will be in then."""
_skeletons: WeakKeyDictionary[Any, nn.Module] = WeakKeyDictionary()
"""Of each sharded model a tree of modules without weights, made before it was sharded: it cannot be copied later."""


def _skeleton(model: nn.Module) -> nn.Module:
    shapes = {p: torch.empty_like(p, dtype=_types.get(p, p.dtype), device="meta") for p in model.parameters()}
    found = _copy(model, shapes)
    for module in found.modules():
        vars(module).pop("forward", None)  # what was put there recomputes activations, or belongs to the model itself
    return found


def _copy(model: nn.Module, weights: dict[nn.Parameter, Tensor]) -> nn.Module:
    """The modules of a model anew, with other weights in the place of its own."""
    return copy.deepcopy(model, {id(p): nn.Parameter(x, requires_grad=False) for p, x in weights.items()})


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


class Whole:
    """All weights of a sharded model, in a second tree of modules; they are there while it is entered.

    Every process enters. With `everywhere` each gets the weights, otherwise the main process alone. Floating-point
    weights are in `dtype`, by default their own.
    """

    def __init__(
        self, sharded: nn.Module, device: torch.device, dtype: torch.dtype | None = None, everywhere: bool = True
    ) -> None:
        self._sharded, self._here = sharded, everywhere or dist.get_rank() == 0
        skeleton = _skeletons[sharded]
        room = {}
        for weight in skeleton.parameters():
            its_type = dtype if dtype and weight.is_floating_point() else weight.dtype
            room[weight] = torch.empty_like(weight, dtype=its_type, device=device)
            room[weight].untyped_storage().resize_(0)
        self.model: Any = _copy(skeleton, room)
        _move_buffers(self.model, device)

    @torch.no_grad()
    def __enter__(self) -> Any:
        reshard(self._sharded)
        parts = dict(self._sharded.named_parameters())
        for name, weight in self.model.named_parameters():
            together = full(parts[name].to(weight.dtype))
            if self._here:
                weight.untyped_storage().resize_(weight.nbytes)
                weight.copy_(together)
        return self.model

    def __exit__(self, *_: object) -> None:
        for weight in self.model.parameters():
            weight.untyped_storage().resize_(0)


class GatheredEngine:
    """An engine for a sharded policy, whose weights are gathered in `whole`: while it samples, or where a server does
    that, while they are sent. All processes call it together."""

    def __init__(self, engine: Engine, whole: Whole, served: bool) -> None:
        self.engine, self.whole, self.served = engine, whole, served

    def generate(
        self,
        prompts: list[list[int]],
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: list[int],
        pad_token_id: int,
    ) -> Responses:
        """See `Engine.generate`."""
        with nullcontext() if self.served else self.whole:
            return self.engine.generate(prompts, max_new_tokens, temperature, stop_token_ids, pad_token_id)

    def sync(self, model: PreTrainedModel) -> None:
        """See `Engine.sync`; `model` is the sharded one."""
        if self.served:
            with self.whole as whole:
                self.engine.sync(whole.model)


def _is_true(name: str, default: str = "false") -> bool:
    return os.environ.get(name, default).lower() in ("true", "1", "yes")
