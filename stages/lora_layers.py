"""LoRA's layers that read the same input, computed together.

Thin products, of few columns, are bound by reading the input: those of query, key and value are made at once here, and
those of gate and up; and an adapter's scale is a factor of its small matrix instead of the large output.
"""

from typing import Any

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Names of linear layers of a module that read the same input."""


def join(model: nn.Module) -> None:
    """Let PEFT's layers of a model be computed together where they can, or at least without a product of the output.

    They are to have one adapter each, called default, which is never merged or switched off.
    """
    for module in model.modules():
        groups = [[getattr(module, name, None) for name in names] for names in SAME_INPUT]
        for layers in [group for group in groups if all(map(_is_plain, group))]:
            _make_one(layers)
        for layer in filter(_is_plain, module.children()):
            _make_one([layer])


def forget(model: nn.Module) -> None:
    """Let go of what a pass that was broken off has made for layers that it did not come to: all of it hangs on it."""
    for module in model.modules():
        if isinstance(module, _JoinedLora):
            module.made = None


def _is_plain(layer: Any) -> bool:
    """Whether it is PEFT's layer of LoRA itself, not yet joined, on weights that are not quantised or transposed."""
    return (
        type(layer) is LoraLinear and type(layer.get_base_layer()) is nn.Linear and not layer.lora_variant
        and layer.lora_B["default"].bias is None and isinstance(layer.lora_dropout["default"], nn.Identity)
    )  # fmt: skip


def _make_one(layers: list[Any]) -> None:
    for layer in layers:
        layer.__class__ = _JoinedLora
        layer.beside, layer.made = tuple(layers), None


class _JoinedLora(LoraLinear):
    beside: tuple["_JoinedLora", ...]
    """The layers that read the same input, itself among them."""
    made: tuple[Tensor, Tensor] | None
    """(input, thin product [..., r]): made for this layer by the one beside it that was asked first."""

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [..., outputs] of inputs [..., inputs]."""
        if self.made is None or self.made[0] is not x:  # of another input: attention across texts, a pass broken off
            downs = [layer.lora_A["default"].weight for layer in self.beside]
            together = nn.functional.linear(x, torch.cat(downs).to(x.dtype))
            for layer, thin in zip(self.beside, together.split([len(down) for down in downs], -1), strict=True):
                layer.made = x, thin
        assert self.made is not None
        (_, thin), self.made = self.made, None
        up = self.scaling["default"] * self.lora_B["default"].weight  # [outputs,r]
        return self.base_layer(x) + nn.functional.linear(thin, up.to(thin.dtype))
