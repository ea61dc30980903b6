"""Keys and values of many rows in tensors that are made once, and the attention that reads them.

A row's tokens lie at 0, 1, 2 … of its slot, whatever the lengths of the others: no left padding, and each row has its
own next place. A model's own forward pass is used as it is; its attention alone is put in by name, as transformers
lets one do (`AttentionInterface`), so that everything between the attentions is the model's.
"""

import importlib.util
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "rlhf_slots"
HAS_TRITON = importlib.util.find_spec("triton") is not None
FEWEST_ROWS = 8
"""Of a step on a GPU: fewer are not faster, and code that is compiled for one row is good for no other."""


class Slots:
    """Keys and values [B,G,S,D] of each layer, for B rows of up to S tokens; made when they are first written."""

    def __init__(self, num_rows: int, num_tokens: int, device: torch.device) -> None:
        self.shape = num_rows, num_tokens
        self.lengths = torch.zeros(num_rows, dtype=torch.long, device=device)
        """Tokens of each row [B] whose keys and values are there."""
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.beginning: Tensor | None = None
        """Rows whose first tokens the next forward pass reads; None where it reads one more of each of the first n."""
        self.longest = num_tokens
        """How much of the slots is looked at: more than the longest row has."""
        self._seen: dict[int | None, Tensor] = {}

    def next_step(self, longest: int | None = None) -> None:
        """The next forward pass reads one more token of each of the first rows, of which none has `longest` yet."""
        self.beginning, self.longest = None, longest or self.shape[1]

    def forget_seen(self) -> None:
        """What rows see is made once for all layers of a step."""
        self._seen.clear()

    def seen(self, num_rows: int, window: int | None, dtype: torch.dtype) -> Tensor:
        """Which places each row sees in this step [n,1,S], as `_seen`; made once for all layers."""
        if window not in self._seen:
            places = torch.arange(self.longest, device=self.lengths.device)
            self._seen[window] = _seen(places, self.lengths[:num_rows, None, None], window, dtype)
        return self._seen[window]

    def layer(self, number: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B,G,S,D] of a layer whose new keys are `like` [n,G,T,D]."""
        if number not in self.layers:
            shape = self.shape[0], like.shape[1], self.shape[1], like.shape[3]
            self.layers[number] = like.new_zeros(shape), like.new_zeros(shape)
        return self.layers[number]

    def copy(self, sources: Tensor, targets: Tensor, num_tokens: int) -> None:
        """Put the first `num_tokens` of the rows `sources` where the rows `targets` are."""
        self.lengths[targets] = self.lengths[sources]
        for pair in self.layers.values():
            for tensor in pair:
                tensor[targets, :, :num_tokens] = tensor[sources, :, :num_tokens]


class _Current(threading.local):
    """What the forward pass under way works on, in each thread: compiled code knows nothing of it."""

    def __init__(self) -> None:
        self.slots: list[Slots] = []


_current = _Current()


@contextmanager
def working_on(slots: Slots) -> Iterator[None]:
    """Inside, attention reads and writes these slots."""
    _current.slots.append(slots)
    try:
        yield
    finally:
        _current.slots.pop()


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, from queries [n,H,T,D] and keys and values [n,G,T,D] of new tokens."""
    operator = _operator if query.is_cuda else slots_attention  # the CPU compiles nothing, and calls are dear there
    return operator(query, key, value, module.number, scaling, sliding_window, softcap), None


def slots_attention(
    query: Tensor, key: Tensor, value: Tensor, layer: Tensor, scaling: float, window: int | None, softcap: float | None
) -> Tensor:
    """Attention [n,T,H,D] of new tokens, queries [n,H,T,D] and keys [n,G,T,D], to all of their row, which is kept.

    `layer` [] is its number, as a tensor on the CPU, so that one piece of compiled code serves all layers. Queries that
    share keys are never given copies of them.
    """
    slots = _current.slots[-1]
    keys, values = slots.layer(int(layer), key)
    if slots.beginning is not None:
        num_new = key.shape[2]
        keys[slots.beginning, :, :num_new], values[slots.beginning, :, :num_new] = key, value
        places = torch.arange(num_new, device=key.device)
        seen = None
        if softcap is not None or (window is not None and window < num_new):
            seen = _seen(places, places[:, None], window, query.dtype)[None]  # [1,T,T]
        return _attention(query, key, value, seen, scaling, softcap).contiguous()
    num_rows = len(query)
    lengths = slots.lengths[:num_rows]
    if query.is_cuda and HAS_TRITON:
        from rlhf.stages.engines import decode_kernels

        inputs = query[:, :, 0], key[:, :, 0], value[:, :, 0], keys, values, lengths
        return decode_kernels.attend(*inputs, scaling, window, softcap)[:, None]
    rows = torch.arange(num_rows, device=key.device)
    keys[rows, :, lengths], values[rows, :, lengths] = key[:, :, 0], value[:, :, 0]
    keys, values = keys[:num_rows, :, : slots.longest], values[:num_rows, :, : slots.longest]
    return _attention(query, keys, values, slots.seen(num_rows, window, query.dtype), scaling, softcap).contiguous()


# As an operator that compiled code calls as it is. `custom_op` would put Python of its own around it, in every layer.
torch.library.define("rlhf::slots_attention", torch.library.infer_schema(slots_attention, mutates_args=()))
torch.library.impl("rlhf::slots_attention", "cuda", slots_attention)
_operator = torch.ops.rlhf.slots_attention.default


@torch.library.register_fake("rlhf::slots_attention")
def _(
    query: Tensor, key: Tensor, value: Tensor, layer: Tensor, scaling: float, window: int | None, softcap: float | None
) -> Tensor:
    num, heads, num_new, size = query.shape
    return query.new_empty(num, num_new, heads, size)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, scaling: float, softcap: float | None
) -> Tensor:
    """[n,T,H,D] of queries [n,H,T,D] that see [n,T,S] of the keys [n,G,S,D]; without `seen`, those up to their own."""
    groups = query.shape[1] // key.shape[1]
    if softcap is not None:
        assert seen is not None
        query = query.unflatten(1, (-1, groups))  # [n,G,H/G,T,D]
        scores = softcap * (query @ key.transpose(-1, -2)[:, :, None] * (scaling / softcap)).tanh()
        weights = (scores + seen[:, None, None]).softmax(-1, dtype=torch.float32).to(query.dtype)
        return (weights @ value[:, :, None]).flatten(1, 2).transpose(1, 2)
    if query.shape[2] == 1:  # the heads that share keys become queries of one head
        query = query.view(len(query), key.shape[1], groups, -1)
        mask = seen[:, None] if seen is not None else None  # [n,1,1,S]
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling).flatten(1, 2)[:, None]
    return scaled_dot_product_attention(
        query, key, value, attn_mask=None if seen is None else seen[:, None], is_causal=seen is None, scale=scaling,
        enable_gqa=groups > 1,
    ).transpose(1, 2)  # fmt: skip


def _seen(keys: Tensor, queries: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """What is added to scores: 0 where queries at some places see keys at others, -inf at later ones and at those a
    window's length ago. Kernels would make this of True and False in every layer."""
    seen = keys <= queries if window is None else (keys <= queries) & (keys > queries - window)
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, -torch.inf)


AttentionInterface.register(NAME, attend)
