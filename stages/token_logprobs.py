"""Log-probabilities of given tokens straight from hidden states, in float32, without ever holding all logits."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

_Law = tuple[float, float | None, float]
"""What becomes of the products: a scale, a cap if there is one, and the temperature."""


def products(hidden: Tensor, weight: Tensor) -> Tensor:
    """Products [N,V] of states [N,d] and output embeddings [V,d] in float32.

    Rounded to bfloat16 they would be another law: logits near 100 lie half a nat apart there.
    """
    if hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(hidden, weight.to(hidden.dtype).T, out_dtype=torch.float32)
    return hidden.float() @ weight.float().T


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    law: _Law,
    with_entropy: bool,
    size: int,
    compile: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(log-probabilities [N], entropies [N] if asked for) of `tokens` [N] under logits hidden [N,d] · weight [V,d]ᵀ.

    Logits of `size` states are in memory at a time. Where the head is trained, the backward pass makes them once more,
    unless that is all there are. `compile` compiles what becomes of them.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        hidden = hidden.to(torch.get_autocast_dtype(device))
    with torch.autocast(device, enabled=False):
        logprobs, entropies = _TokenLogprobs.apply(hidden, weight, bias, tokens, law, with_entropy, size, compile)
    return logprobs, entropies if with_entropy else None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        law: _Law,
        with_entropy: bool,
        size: int,
        compile: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.law, ctx.with_entropy, ctx.size, ctx.compile = law, with_entropy, size, compile
        ctx.kept = ctx.gradients = None
        read = _compiled(_read) if compile else _read
        read_with_slopes = _compiled(_read_with_slopes) if compile else _read_with_slopes
        head = weight.to(hidden.dtype)  # once for all pieces
        of_hidden, *of_head = ctx.needs_input_grad[:3]
        # Through a frozen head, one number per token times what is known already: made while the logits are here.
        at_once = of_hidden and not any(of_head) and not with_entropy
        if not at_once:
            ctx.save_for_backward(hidden, weight, bias, tokens)
        found, gradients = [], []
        for states, labels in zip(hidden.split(size), tokens.split(size), strict=True):
            logits = products(states, head if hidden.is_cuda else weight)
            if at_once:
                logprobs, entropies, slopes = read_with_slopes(logits, bias, labels, law, hidden.dtype)
                gradients.append(slopes @ head)
            else:
                logprobs, entropies = read(logits, bias, labels, law, with_entropy)
                if len(tokens) <= size and any(ctx.needs_input_grad):
                    ctx.kept = logits
            found.append((logprobs, entropies))
        if at_once:
            ctx.gradients = torch.cat(gradients)
        logprobs, entropies = (torch.cat(part) for part in zip(*found, strict=True))
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, of_logprobs: Tensor, of_entropies: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is not None:
            return (ctx.gradients * of_logprobs[:, None]).to(ctx.gradients.dtype), *[None] * 7
        hidden, weight, bias, tokens = ctx.saved_tensors
        kept, ctx.kept = ctx.kept, None  # the layers below need the room
        slopes_of = _compiled(_slopes) if ctx.compile else _slopes
        head = weight.to(hidden.dtype)
        grad_hidden: list[Tensor] = []
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        for start in range(0, max(len(tokens), 1), ctx.size):  # no tokens are one piece too
            rows = slice(start, start + ctx.size)
            states = hidden[rows]
            logits = products(states, head if hidden.is_cuda else weight) if kept is None else kept
            of_entropy = of_entropies[rows] if ctx.with_entropy else None
            slopes = slopes_of(logits, bias, tokens[rows], ctx.law, of_logprobs[rows], of_entropy, hidden.dtype)
            grad_hidden.append(slopes @ head)
            if ctx.needs_input_grad[1]:
                more = products(slopes.T, states.T)
                grad_weight = more if grad_weight is None else grad_weight.add_(more)
            if ctx.needs_input_grad[2]:
                more = slopes.sum(0, dtype=torch.float32)
                grad_bias = more if grad_bias is None else grad_bias.add_(more)
        return (
            torch.cat(grad_hidden),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None, None, None, None, None,
        )  # fmt: skip


def _shaped(products: Tensor, bias: Tensor | None, law: _Law) -> Tensor:
    """Logits [n,V] over the temperature."""
    scale, cap, temperature = law
    logits = products if bias is None else products + bias.float()
    if cap is not None:
        return (logits * (scale / cap)).tanh() * (cap / temperature)
    return logits if scale == temperature else logits * (scale / temperature)


def _read(
    products: Tensor, bias: Tensor | None, tokens: Tensor, law: _Law, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    """(log-probabilities [n], entropies [n] if asked for)."""
    logprobs = _shaped(products, bias, law).log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1) if with_entropy else logprobs.new_empty(0)
    return logprobs.gather(-1, tokens[:, None])[:, 0], entropies


def _read_with_slopes(
    products: Tensor, bias: Tensor | None, tokens: Tensor, law: _Law, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """What `_read` returns without entropies, and `_slopes` of log-probabilities whose gradient is 1."""
    logprobs, no_entropies = _read(products, bias, tokens, law, with_entropy=False)
    return logprobs, no_entropies, _slopes(products, bias, tokens, law, torch.ones_like(logprobs), None, dtype)


def _slopes(
    products: Tensor,
    bias: Tensor | None,
    tokens: Tensor,
    law: _Law,
    of_logprobs: Tensor,
    of_entropies: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """Gradients [n,V] of the products (and bias), from those of log-probabilities [n] and entropies [n]."""
    scale, cap, temperature = law
    logits, gradient, chosen = _shaped(products, bias, law), of_logprobs[:, None], tokens[:, None]
    bend = torch.tensor(scale / temperature, device=logits.device)  # by how much a logit follows its product
    if cap is not None:
        bend = bend * (1 - (logits * (temperature / cap)).square())
    if of_entropies is None:
        others = logits.softmax(-1).mul_(gradient)
    else:  # of −Σ p log p to a logit: −p (log p − Σ p log p)
        logprobs = logits.log_softmax(-1)
        probs = logprobs.exp()
        mean = (probs * logprobs).sum(-1, keepdim=True)
        others = probs.mul_(gradient + of_entropies[:, None] * (logprobs - mean))
    # The chosen token's own slope is written last, in the full precision of a difference.
    own = (gradient - others.gather(-1, chosen)) * (bend if cap is None else bend.gather(-1, chosen))
    return others.mul_(-bend).to(dtype).scatter_(-1, chosen, own.to(dtype))


@cache  # the compiler takes a second to import
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)
