"""Muon (Jordan et al. 2024): momentum whose matrices are made orthogonal before they are taken as a step.

torch.optim.Muon takes one matrix at a time, in bfloat16: many small kernels on a GPU, and on a CPU, which is slow in
bfloat16, several times the cost of the model itself. Here matrices of one shape are orthogonalised together, in
bfloat16 on a GPU and in float32 elsewhere; the steps are otherwise the same.
"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the quintic that drives all singular values towards 1
_ITERATIONS = 5


def orthogonalised(matrices: Tensor) -> Tensor:
    """About the nearest matrices [M,r,c] with orthonormal rows or columns: singular values between 0.7 and 1.2.

    Newton-Schulz iteration in the dtype of `matrices`.
    """
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)  # no singular value above 1
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """For matrices alone; the step is scaled by sqrt(max(1, outputs / inputs)), as in Jordan's own.

    `matrices` are of outputs × inputs, `turned` of inputs × outputs (GPT-2's).
    `found_inf`, a tensor on the device, is read as torch's fused optimizers read it: where it is 1, nothing changes.
    """

    found_inf: Tensor | None = None

    def __init__(
        self,
        matrices: Sequence[torch.nn.Parameter],
        lr: float,
        weight_decay: float,
        momentum: float = 0.95,
        turned: Sequence[torch.nn.Parameter] = (),
    ) -> None:
        groups = [{"params": list(matrices), "turned": False}, {"params": list(turned), "turned": True}]
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__([group for group in groups if group["params"]], defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every matrix that has a gradient."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape[weight.shape].append(weight)
            for shape, weights in by_shape.items():
                self._step(weights, shape, group)

    def _step(self, weights: list[Tensor], shape: torch.Size, group: dict[str, float]) -> None:
        for weight in weights:
            if not self.state[weight]:
                self.state[weight]["momentum"] = torch.zeros_like(weight)
        averages = [self.state[weight]["momentum"] for weight in weights]
        stop = weights[0].new_zeros(()) if self.found_inf is None else self.found_inf.reshape(())
        average = torch.stack(averages)  # [M,r,c]
        # An average moves towards itself where nothing shall change.
        grad = torch.where(stop > 0, average, torch.stack([weight.grad for weight in weights]))  # type: ignore[misc]
        average = average.lerp(grad, 1 - group["momentum"])
        torch._foreach_copy_(averages, list(average.unbind()))
        ahead = grad.lerp(average, group["momentum"])  # Nesterov's look ahead
        steps = orthogonalised(ahead.bfloat16() if ahead.is_cuda else ahead) * (1 - stop)
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"] * (1 - stop))
        outputs, inputs = reversed(shape) if group["turned"] else shape
        scale = max(1.0, outputs / inputs) ** 0.5
        torch._foreach_add_(weights, list(steps.to(ahead.dtype).unbind()), alpha=-group["lr"] * scale)
