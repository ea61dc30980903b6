"""How much memory a pass takes, from the shapes alone: the models' own code runs on tensors without contents.

Every tensor that an operation makes is counted from then until nothing holds it any more, autograd included, as torch's
allocator would. Models are traced with one and with two layers: what a layer adds is the same for each.

Attention itself is a stand-in, since which kernel a GPU takes cannot be asked where there is none: it keeps what the
fused kernels keep (queries, keys, values, result and a number per row), never a matrix of tokens by tokens.
"""

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from rlhf.data.errors import first_line

ATTENTION, PADDED = "rlhf_footprint", "rlhf_footprint_padded"
"""What transformers calls the stand-in, for texts that fill their rows and for padded ones."""
BLOCK = 512  # bytes; torch's allocator for CUDA rounds up to it

Bytes = dict[str, float]
"""By kind: weights (copies in another type), gradients, activations, cache, logits."""
Moments = dict[str, Bytes]
"""The most at one time in each part of a pass."""
Fused = Literal["layers", "all", "whole"] | None
"""What is compiled: the layers of a model; the logits too; or all of it as one piece."""

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default, _aten.embedding.default}
_NEW = {_aten.empty.memory_format, _aten.new_empty.default, _aten.empty_like.default, _aten.zeros_like.default}


class UntraceableError(Exception):
    """What a model's code does with tensors without contents fails."""


class Footprint(TorchDispatchMode):
    """Bytes that are alive, by kind, and for each moment the most there were.

    Tensors whose last axis is the `vocabulary` are logits. With `fused` it counts what torch.compile keeps of the
    layers, or of all: what products make, and what attention needs. All between them becomes part of a kernel, and is
    made again in the backward pass; where a `whole` model is compiled, and for logits, what products read is kept too.
    """

    def __init__(self, vocabulary: int, fused: Fused = None) -> None:
        super().__init__()
        self.vocabulary, self.fused = vocabulary, fused
        self.moments: Moments = {}
        self._now: dict[str, int] = defaultdict(int)
        self._kinds: dict[int, str] = {}  # of each storage that is alive
        self._sizes: dict[int, int] = {}
        self._of_weights: set[torch.Size] = set()
        self._of_products: dict[int, int] = {}  # storages that are alive: of products, and of these times a number
        self._at: tuple[str, ...] = ()
        self._making: str | None = None
        self._kept: list[Tensor] = []

    def at(self, *moments: str) -> None:
        """What follows belongs to these parts of the pass; to none of them, it is not looked at."""
        self._at = moments
        self._look()

    @contextmanager
    def of(self, *models: nn.Module) -> Iterator[None]:
        """What is done inside, with models whose weights are on the meta device.

        The weights and buffers themselves do not count: they are there all the time. Copies of them do.
        """
        mode = FakeTensorMode()
        known: dict[int, Tensor] = {}
        for module in (module for model in models for module in model.modules()):
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = known.setdefault(id(tensor), _without_contents(mode, tensor))  # type: ignore[assignment]
        for tensor in known.values():
            self._kinds[tensor.untyped_storage()._cdata] = ""
            if tensor.requires_grad:
                self._of_weights.add(tensor.shape)
                tensor.register_post_accumulate_grad_hook(self._is_gradient)
        with mode, self:
            yield

    @contextmanager
    def making(self, kind: str) -> Iterator[None]:
        """All that is made inside is of this kind."""
        self._making = kind
        yield
        self._making = None

    def let_go(self) -> None:
        """The backward pass is over: nothing is kept for it any more."""
        self._kept.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        results = [x for x in tree_leaves(made) if isinstance(x, Tensor)]
        if func is _aten.add.Tensor and results[0].shape in self._of_weights and not torch.is_grad_enabled():
            # Shares of a weight's gradient: added in place, but that autograd does with plain tensors alone.
            self._resize(args[0].untyped_storage()._cdata, 0)
        if not self.fused:
            for tensor in results:
                self._count(tensor, self._kind(func, args, tensor))
        elif func in _PRODUCTS:
            inputs = [x for x in args if isinstance(x, Tensor)]
            new = [key for x in inputs if (key := x.untyped_storage()._cdata) not in self._kinds]
            for tensor in (*inputs, *results):
                self._count(tensor, self._kind(func, args, tensor))
                if torch.is_grad_enabled() and self._kinds[tensor.untyped_storage()._cdata] == "activations":
                    self._kept.append(tensor)
            # What compiled layers multiply is made once more in the backward pass (`compile_layers`); heads are not
            # compiled, neither those that make logits nor those of one number.
            in_a_layer = self._kind(func, args, results[0]) != "logits" and results[0].shape[-1] > 1
            if torch.is_grad_enabled() and self.fused != "whole" and in_a_layer:
                for key in new:
                    self._resize(key, 0)
            if func is not _aten.embedding.default:
                key = results[0].untyped_storage()._cdata
                self._of_products[key] = key
        else:
            keys = [x.untyped_storage()._cdata for x in args if isinstance(x, Tensor)]
            products = [self._of_products[key] for key in keys if key in self._of_products]
            if func is _aten.mul.Tensor and len(keys) == len(products) == 1 and torch.is_grad_enabled():
                scaled = results[0].untyped_storage()
                self._of_products[scaled._cdata] = products[0]
                weakref.finalize(scaled, self._of_products.pop, scaled._cdata, None)
            sizes = {self._sizes.get(key) for key in products}
            if func is _aten.add.Tensor and len(set(products)) == 2 and len(sizes) == 1:
                # Of a layer and its adapter: what is kept is their sum.
                self._resize(products[1], 0)
            for tensor in results:
                kind = self._kind(func, args, tensor)
                if func in _NEW or kind in ("weights", "cache") or (kind == "logits" and self.fused == "layers"):
                    self._count(tensor, kind)
        return made

    def _kind(self, func: Any, args: Any, tensor: Tensor | None) -> str:
        if self._making is not None:
            return self._making
        source = next((x for x in tree_leaves(args) if isinstance(x, Tensor)), None)
        of_source = None if source is None else self._kinds.get(source.untyped_storage()._cdata)
        if func is _aten._to_copy.default and of_source == "":
            return "weights"
        if func is _aten.cat.default and of_source == "cache":
            return "cache"
        if tensor is not None and tensor.ndim > 1 and tensor.shape[-1] == self.vocabulary:
            return "logits"
        return "activations"

    def _count(self, tensor: Tensor, kind: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._kinds:
            return
        self._kinds[key], self._sizes[key] = kind, 0
        self._resize(key, -(-storage.nbytes() // BLOCK) * BLOCK)
        weakref.finalize(storage, self._forget, key)
        self._look()

    def _resize(self, key: int, size: int) -> None:
        if key in self._sizes:
            self._now[self._kinds[key]] += size - self._sizes[key]
            self._sizes[key] = size

    def _forget(self, key: int) -> None:
        self._of_products.pop(key, None)
        self._now[self._kinds.pop(key)] -= self._sizes.pop(key)

    def _is_gradient(self, parameter: Tensor) -> None:
        gradient = parameter.grad
        assert gradient is not None
        self._count(gradient, "gradients")
        key = gradient.untyped_storage()._cdata
        size = self._sizes[key]
        self._resize(key, 0)
        self._kinds[key] = "gradients"
        self._resize(key, size)

    def _look(self) -> None:
        for moment in self._at:
            most = self.moments.get(moment)
            if most is None or sum(self._now.values()) > sum(most.values()):
                self.moments[moment] = dict(self._now)


def traced(
    configs: Sequence[PreTrainedConfig],
    run: Callable[[Sequence[PreTrainedConfig], Footprint], None],
    fused: Fused = None,
    recomputed: bool = False,
) -> Moments:
    """The moments of what `run` does with models of these configs, which it makes itself, inside of `footprint.of`.

    Where layers are `recomputed`, compiled ones are counted as if they were not: they take no more.
    Raises UntraceableError where their code wants weights with contents, or an attention of its own.
    """
    depths = sorted({_depth(config) for config in configs})

    def of(deeper: int | None) -> Moments:
        footprint = Footprint(configs[0].get_text_config().vocab_size, None if recomputed else fused)
        try:
            run([at_depth(config, 2 if _depth(config) == deeper else 1) for config in configs], footprint)
        except (AttributeError, KeyError, RuntimeError) as error:  # experts, state-space layers, an own attention
            raise UntraceableError(first_line(error)) from error
        return footprint.moments

    least = of(None)
    found = {moment: dict(most) for moment, most in least.items()}
    for depth in depths:
        for moment, most in of(depth).items():
            for kind in most | least[moment]:
                per_layer = most.get(kind, 0) - least[moment].get(kind, 0)
                found[moment][kind] = found[moment].get(kind, 0) + per_layer * (depth - 1)
    return found


def _depth(config: PreTrainedConfig) -> int:
    return int(config.get_text_config().num_hidden_layers)


def at_depth(config: PreTrainedConfig, depth: int) -> PreTrainedConfig:
    """The same model with fewer layers."""
    config = copy.deepcopy(config)
    text = config.get_text_config()
    text.num_hidden_layers = depth
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:depth]
    return config


def learn(footprint: Footprint, name: str, losses: dict[PreTrainedModel, Callable[[], Tensor]], num: int) -> None:
    """A forward and a backward pass of each model in turn, the last of `num`: if it is not the first, gradients are
    there already.

    Its moments: all until the layers' backward passes (`name`), the first and the last of these, and what follows. In
    between activations go and gradients grow, layer by layer, so that the most is at one of the two ends.
    """
    if num > 1:
        with footprint.making("gradients"):
            for parameter in (p for model in losses for p in model.parameters() if p.requires_grad):
                parameter.grad = torch.zeros_like(parameter)
    hooks = [hook for model in losses for hook in _marks(footprint, name, layers_of(model))]
    for loss_of in losses.values():
        footprint.at(name)
        loss_of().backward()
        footprint.let_go()
    for hook in hooks:
        hook.remove()
    footprint.at()


def _marks(footprint: Footprint, name: str, layers: nn.ModuleList) -> Iterator[RemovableHandle]:
    """Hooks that tell the moments of a backward pass."""
    first, last = f"{name}, first layer", f"{name}, last layer"

    def when_its_gradient_is_there(tensor: Any, *moments: str) -> None:
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: footprint.at(*moments))

    def output_of_all(_module: nn.Module, _inputs: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        when_its_gradient_is_there(output, first, *([last] if len(layers) == 1 else []))

    def input_of(*moments: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda _module, inputs: when_its_gradient_is_there(inputs[0] if inputs else None, *moments)

    yield layers[-1].register_forward_hook(output_of_all)
    if len(layers) > 2:
        yield layers[-1].register_forward_pre_hook(input_of())
    if len(layers) > 1:
        yield layers[1].register_forward_pre_hook(input_of(last))
    yield layers[0].register_forward_pre_hook(input_of(f"{name}, end"))


def _without_contents(mode: FakeTensorMode, tensor: Tensor) -> Tensor:
    """A weight or buffer that says it is on the CPU: there is no autocast on the meta device."""
    fake = FakeTensor(mode, tensor.detach().to("meta"), torch.device("cpu"))
    return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    """The list of a decoder's layers."""
    number = model.config.get_text_config().num_hidden_layers
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == number)


class _FusedAttention(torch.autograd.Function):
    """What the fused kernels keep and make."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        rows, heads, length = query.shape[:3]
        result = query.new_empty(rows, length, heads, value.shape[-1])
        sums = query.new_empty(rows, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, result, sums, bias)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, *_ = ctx.saved_tensors
        _sums = query.new_empty(query.shape, dtype=torch.float32)
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    """Results [B,T,H,D] of queries [B,H,T,D] and keys and values [B,G,S,D].

    Where texts are padded, torch is given a mask, and then keys and values are repeated for the heads that share them.
    """
    device = query.device.type
    config: Any = module.config
    if torch.is_autocast_enabled(device):
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    bias = None
    if config._attn_implementation == PADDED and query.shape[2] > 1:
        repeats = query.shape[1] // key.shape[1]
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        bias = query.new_empty(query.shape[0], 1, query.shape[2], key.shape[2])
    return _FusedAttention.apply(query, key, value, bias), None


for _name in (ATTENTION, PADDED):
    AttentionInterface.register(_name, _attend)
