"""A second tree of modules on a model's weights, made for sampling; the model itself is left as it is.

Its weights are the model's own tensors wherever they can be read as they lie. The rest are copied when a rollout
begins and given back when it ends: those in another dtype, those of one input (query, key and value; gate and up),
which are put together so that one product does for all, and those with adapters, beside which the adapters are put:
added to weights in 16 bits, a small change would be rounded away, and the start sampled instead of the policy.
"""

from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf.stages.adapters import shared_copy
from rlhf.stages.engines.slots import NAME
from rlhf.stages.lora_layers import SAME_INPUT
from rlhf.stages.models import compile_layers, logit_rule
from rlhf.stages.token_logprobs import products

_RANKS = 64
"""The rows of all A together are filled up to a multiple of it: on a GPU, a matrix with some other number of rows below
the weights takes longer than two products."""


class Twin:
    """`model` in a second tree of modules, which computes in `dtype` and whose attention works on `Slots`.

    It has weights between `take` and `give_back`: those that the model has at `take`.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, compiled: bool = False) -> None:
        self.model = shared_copy(model)
        self.model.config.get_text_config()._attn_implementation = NAME
        self.scale, self.softcap = logit_rule(model)
        self.vocab_size = len(model.get_output_embeddings().weight)
        self.owns_weights = False
        """Whether nobody else reads the model's weights before they are gathered anew: those that are put together are
        then let go, one product after the other."""
        self._dtype = dtype
        self._products: list[_Product] = []
        for module in list(self.model.modules()):
            vars(module).pop("forward", None)  # what was put there recomputes activations, or gathers shards
            self._simplify(module)
            if hasattr(module, "layer_idx"):
                module.number = torch.tensor(module.layer_idx)
        self._cast = [
            (module, name, weight)
            for module in self.model.modules()
            for name, weight in module.named_parameters(recurse=False)
            if weight.is_floating_point() and weight.dtype != dtype
        ]
        if compiled:
            compile_layers(self.model)
            for module in self.model.base_model.children():
                if not isinstance(module, nn.ModuleList):  # embeddings, rotations, the last norm
                    module.forward = torch.compile(module.forward, dynamic=True)

    def take(self) -> None:
        """Read the model's weights as they are now."""
        copies: dict[int, nn.Parameter] = {}  # a tied weight stays one
        for module, name, weight in self._cast:
            if id(weight) not in copies:
                copies[id(weight)] = nn.Parameter(weight.detach().to(self._dtype), requires_grad=False)
            setattr(module, name, copies[id(weight)])
        for product in self._products:
            product.take(self._dtype)
            if self.owns_weights:
                product.let_go()

    def give_back(self) -> None:
        """Keep no memory of the rollout."""
        for module, name, weight in self._cast:
            setattr(module, name, weight)
        for product in self._products:
            product.give_back()

    def states(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Last hidden states [n,T,d] of ids [n,T] at positions [n,T]."""
        output = self.model.base_model(input_ids=input_ids, position_ids=positions, use_cache=False)
        states: Tensor = output.last_hidden_state
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """Products [n,V] of states [n,d] and output embeddings in float32, before `scale` and `softcap`."""
        head = self.model.get_output_embeddings()
        logits = products(hidden, head.weight)
        return logits if head.bias is None else logits + head.bias

    def _simplify(self, module: nn.Module) -> None:
        for names in SAME_INPUT:
            layers = [getattr(module, name, None) for name in names]
            if all(isinstance(_base(layer), nn.Linear) for layer in layers):
                product = self._product(layers)
                for number, name in enumerate(names):
                    setattr(module, name, _Part(product, number))
        for name, layer in list(module.named_children()):
            # PEFT's layers of embeddings stay as they are: tokens are looked up in the thin matrix too.
            if isinstance(layer, BaseTunerLayer) and isinstance(_base(layer), nn.Linear | Conv1D):
                setattr(module, name, _Part(self._product([layer]), 0))

    def _product(self, layers: list[Any]) -> "_Product":
        self._products.append(_Product(layers))
        return self._products[-1]


class _Product(nn.Module):
    """One product in the place of several linear layers that read the same input.

    Where they have adapters, their A stand below the weights in one matrix, and a thin product with their B follows.
    """

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.layers = tuple(layers)  # not as modules: their weights are not this tree's
        self.give_back()

    def give_back(self) -> None:
        self.weight: Tensor | None = None  # [sum of outputs + r, inputs]
        self.bias: Tensor | None = None  # [sum of outputs + r]
        self.up: Tensor | None = None  # [r, sum of outputs], r the sum of ranks, rounded up
        self.parts: dict[int, Tensor] = {}

    def take(self, dtype: torch.dtype) -> None:
        bases = [_base(layer) for layer in self.layers]
        weights = [base.weight.T if isinstance(base, Conv1D) else base.weight for base in bases]
        self.sizes = [len(weight) for weight in weights]
        matrices = [weight.to(dtype) for weight in weights]
        biases = [base.bias.to(dtype) for base in bases if base.bias is not None]
        if any(isinstance(layer, BaseTunerLayer) for layer in self.layers):
            pairs = [_adapter(layer, weight) for layer, weight in zip(self.layers, weights, strict=True)]
            down, up = torch.cat([down for down, _ in pairs]), torch.block_diag(*(up for _, up in pairs))
            more = -len(down) % _RANKS
            matrices.append(pad(down, (0, 0, 0, more)).to(dtype))
            self.up = pad(up, (0, more)).T.to(dtype)
            if biases:
                biases.append(biases[0].new_zeros(len(self.up)))
        self.weight = _together(matrices)
        self.bias = _together(biases) if biases else None

    def let_go(self) -> None:
        """Of the layers' own weights, whose copies are in this one."""
        for layer in self.layers:
            _base(layer).weight.untyped_storage().resize_(0)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [..., sum of outputs] of inputs [..., inputs]."""
        assert self.weight is not None
        whole = nn.functional.linear(x, self.weight, self.bias)
        if self.up is None:
            return whole
        whole, thin = whole.flatten(0, -2).split([sum(self.sizes), len(self.up)], dim=-1)
        return (whole + thin @ self.up).unflatten(0, x.shape[:-1])  # addmm would copy `whole` before it adds


class _Part(nn.Module):
    """One of the layers that a product stands for. The first that is asked makes all; each is asked once."""

    def __init__(self, product: _Product, number: int) -> None:
        super().__init__()
        self.product, self.number = product, number

    def forward(self, x: Tensor) -> Tensor:
        product = self.product
        if self.number not in product.parts:
            product.parts = dict(enumerate(product(x).split(product.sizes, dim=-1)))
        return product.parts.pop(self.number)


def _base(layer: Any) -> Any:
    return layer.base_layer if isinstance(layer, BaseTunerLayer) else layer


def _adapter(layer: Any, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Factors [r,inputs] and [outputs,r] of what is added to `weight` [outputs,inputs]; of rank 0 where nothing is."""
    if not isinstance(layer, BaseTunerLayer):
        return weight.new_zeros(0, weight.shape[1]), weight.new_zeros(len(weight), 0)
    return layer.lora_A["default"].weight, layer.lora_B["default"].weight * layer.scaling["default"]


def _together(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
