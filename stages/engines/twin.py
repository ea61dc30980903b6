"""A second tree of modules on a model's weights, made for sampling; the model itself is left as it is.

Its weights are the model's own tensors wherever they can be read as they lie. The rest are copied when a rollout
begins and given back when it ends: those in another dtype, adapters merged into what they adapt, and projections of
the same input (query, key and value; gate and up), which are put together so that one product does for all.
"""

from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf.stages.adapters import shared_copy
from rlhf.stages.engines.slots import NAME
from rlhf.stages.models import compile_layers, logit_rule

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Twin:
    """`model` in a second tree of modules, which computes in `dtype` and whose attention works on `Slots`.

    It has weights between `take` and `give_back`: those that the model has at `take`.
    """

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, compiled: bool = False) -> None:
        self.model = shared_copy(model)
        self.model.config.get_text_config()._attn_implementation = NAME
        self.scale, self.softcap = logit_rule(model)
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

    def give_back(self) -> None:
        """Keep no memory of the rollout."""
        for module, name, weight in self._cast:
            setattr(module, name, weight)
        for product in self._products:
            product.weight = product.bias = None
            product.parts = {}  # of a pass that failed

    def states(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        """Last hidden states [n,T,d] of ids [n,T] at positions [n,T]."""
        output = self.model.base_model(input_ids=input_ids, position_ids=positions, use_cache=False)
        states: Tensor = output.last_hidden_state
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """Products [n,V] of states [n,d] and output embeddings in float32, before `scale` and `softcap`.

        Rounded to bfloat16 they would be another law: logits near 100 lie half a nat apart there.
        """
        head = self.model.get_output_embeddings()
        if hidden.dtype == torch.float32:
            logits = hidden @ head.weight.T
        elif hidden.is_cuda:
            logits = torch.mm(hidden, head.weight.T, out_dtype=torch.float32)
        else:
            logits = hidden.float() @ head.weight.float().T
        return logits if head.bias is None else logits + head.bias

    def _simplify(self, module: nn.Module) -> None:
        for names in _TOGETHER:
            layers = [getattr(module, name, None) for name in names]
            if all(isinstance(_base(layer), nn.Linear) for layer in layers):
                product = self._product(layers)
                for number, name in enumerate(names):
                    setattr(module, name, _Part(product, number))
        for name, layer in list(module.named_children()):
            if isinstance(layer, BaseTunerLayer):
                setattr(module, name, _Part(self._product([layer]), 0))

    def _product(self, layers: list[Any]) -> "_Product":
        self._products.append(_Product(layers))
        return self._products[-1]


class _Product(nn.Module):
    """One product in the place of several linear layers that read the same input, adapters merged."""

    def __init__(self, layers: list[Any]) -> None:
        super().__init__()
        self.layers = tuple(layers)  # not as modules: their weights are not this tree's
        self.weight: Tensor | None = None  # [sum of outputs, inputs]
        self.bias: Tensor | None = None
        self.parts: dict[int, Tensor] = {}

    def take(self, dtype: torch.dtype) -> None:
        weights = [_weight(layer).to(dtype) for layer in self.layers]
        self.sizes = [len(weight) for weight in weights]
        self.weight = torch.cat(weights)
        biases = [_base(layer).bias for layer in self.layers]
        if biases[0] is not None:
            self.bias = torch.cat([bias.detach().to(dtype) for bias in biases])


class _Part(nn.Module):
    """One of the layers that a product stands for. The first that is asked makes all; each is asked once."""

    def __init__(self, product: _Product, number: int) -> None:
        super().__init__()
        self.product, self.number = product, number

    def forward(self, x: Tensor) -> Tensor:
        product = self.product
        if self.number not in product.parts:
            whole = nn.functional.linear(x, product.weight, product.bias)  # type: ignore[arg-type]
            product.parts = dict(enumerate(whole.split(product.sizes, dim=-1)))
        return product.parts.pop(self.number)


def _base(layer: Any) -> Any:
    return layer.base_layer if isinstance(layer, BaseTunerLayer) else layer


def _weight(layer: Any) -> Tensor:
    """Weight [outputs,inputs] of a linear layer, unrounded where it is quantised and with its adapter added."""
    base = _base(layer)
    weight: Tensor = dequantize_module_weight(base).detach()
    if layer is not base:
        weight = weight + layer.get_delta_weight("default").detach().to(base.weight.device)
    return weight.T if isinstance(base, Conv1D) else weight
