"""Kernels for a step of decoding on a GPU: attention of one new token per row, and drawing the next one.

Both read each row's own length, so that one CUDA graph serves all lengths.
"""

# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 4096  # logits that one program looks at


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    lengths: Tensor,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Results [n,H,D] of queries [n,H,D] that see their row of keys and values [B,G,S,D] up to `lengths` [n].

    The new keys and values [n,G,D] are put there, and seen too.
    """
    num, heads, size = query.shape
    groups, width = key.shape[1], max(16, triton.next_power_of_2(size))  # tl.dot takes no less than 16
    out = torch.empty(num, heads, size, dtype=query.dtype, device=query.device)
    _attend[(num, groups)](
        query, key, value, keys, values, lengths, out, scaling, window or 2**30, softcap or 0.0,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        *keys.stride()[:3], out.stride(0), out.stride(1), size,
        GROUP=heads // groups, ROWS=max(16, triton.next_power_of_2(heads // groups)),
        D=width, BLOCK=_block(width * query.element_size()), CAPPED=softcap is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32", num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def _block(num_bytes: int) -> int:
    """Places that are read at a time, each `num_bytes` long: as many as fit into the memory of small cards."""
    return max(16, min(64, 2**14 // num_bytes))


@triton.jit
def _attend(
    query, key, value, keys, values, lengths, out, scaling, window, softcap,
    q_b, q_h, k_b, k_g, v_b, v_g, c_b, c_g, c_s, o_b, o_h, size,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, CAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One row and one head of keys: its queries are the rows of a matrix, padded to what a tensor core takes."""
    b, g = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + b).to(tl.int32)
    d = tl.arange(0, D)
    r = tl.arange(0, ROWS)
    inside = d < size
    new_k = tl.load(key + b * k_b + g * k_g + d, mask=inside, other=0.0)
    new_v = tl.load(value + b * v_b + g * v_g + d, mask=inside, other=0.0)
    slot = b.to(tl.int64) * c_b + g * c_g
    tl.store(keys + slot + length * c_s + d, new_k, mask=inside)
    tl.store(values + slot + length * c_s + d, new_v, mask=inside)
    mine = (r[:, None] < GROUP) & inside[None]
    q = tl.load(query + b * q_b + (g * GROUP + r[:, None]) * q_h + d[None], mask=mine, other=0.0)
    # The new token comes first: it is at hand, and what was stored need not be read again.
    best = tl.sum(q.to(tl.float32) * new_k.to(tl.float32)[None], 1) * scaling  # [ROWS]
    if CAPPED:
        best = softcap * (2 * tl.sigmoid(2 * best / softcap) - 1)  # softcap · tanh(best / softcap)
    total = tl.full([ROWS], 1.0, tl.float32)
    result = tl.zeros([ROWS, D], tl.float32) + new_v.to(tl.float32)[None]
    first = tl.maximum(length - window + 1, 0) // BLOCK * BLOCK
    for start in range(first, length, BLOCK):
        s = start + tl.arange(0, BLOCK)
        seen = (s < length) & (s > length - window)
        there = seen[:, None] & inside[None]
        k = tl.load(keys + slot + s[:, None] * c_s + d[None], mask=there, other=0.0)
        v = tl.load(values + slot + s[:, None] * c_s + d[None], mask=there, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scaling  # [ROWS,BLOCK]
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        scores = tl.where(seen[None], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(best - higher)
        total = total * shrink + tl.sum(weights, 1)
        result = result * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        best = higher
    result = result / total[:, None]
    tl.store(out + b * o_b + (g * GROUP + r[:, None]) * o_h + d[None], result.to(q.dtype), mask=mine)


def take(
    logits: Tensor,
    seed: Tensor,
    steps: Tensor,
    scale: float,
    softcap: float | None,
    temperature: float,
    stops: Tensor,
    last: Tensor,
    made: Tensor,
    ended: Tensor,
    told: Tensor,
    lengths: Tensor,
    tokens: Tensor,
    logprobs: Tensor,
) -> None:
    """Draw a token for each row of `logits` [n,V] and write it down, as `_Writing._store` and `_tell` do.

    First a chunk of the vocabulary is drawn by the chunks' sums of exponentials, then a token in it, so that all
    logits are read once. `steps` [1] counts up, and `seed` [1] is added to it for the numbers. `told` may be pinned
    memory: a copy would take as long as some kernels.
    """
    num, size = logits.shape
    num_chunks = triton.cdiv(size, _CHUNK)
    sums = torch.empty(2, num, num_chunks, dtype=torch.float32, device=logits.device)
    law = scale, softcap or 0.0, 1 / temperature
    shape = {"CAPPED": softcap is not None, "CHUNK": _CHUNK, "num_warps": 8}
    _sum_up[(num, num_chunks)](logits, sums, steps, size, logits.stride(0), sums.stride(0), *law, **shape)
    _draw[(num,)](
        logits, sums, seed, steps, size, logits.stride(0), sums.stride(0), num_chunks, *law, stops, len(stops), last,
        made, ended, told, lengths, tokens, logprobs, tokens.stride(0), tokens.shape[1] - 1,
        CHUNKS=triton.next_power_of_2(num_chunks), STOPS=triton.next_power_of_2(max(len(stops), 1)), **shape,
    )  # fmt: skip


@triton.jit
def _shaped(logits, row, place, size, l_b, scale, softcap, inverse_temperature, CAPPED: tl.constexpr):
    """Logits of a row at some places as the model means them, over the temperature; very low beyond the vocabulary."""
    z = tl.load(logits + row.to(tl.int64) * l_b + place, mask=place < size, other=0.0).to(tl.float32) * scale
    if CAPPED:
        z = softcap * (2 * tl.sigmoid(2 * z / softcap) - 1)
    return tl.where(place < size, z * inverse_temperature, -1e30)  # finite: a difference of two is 0


@triton.jit
def _sum_up(
    logits, sums, steps, size, l_b, s_s, scale, softcap, inverse_temperature, CAPPED: tl.constexpr, CHUNK: tl.constexpr
):
    """Of one chunk of a row: the largest logit, and the sum of exponentials below it. Counts `steps` for `_draw`."""
    b, chunk = tl.program_id(0), tl.program_id(1)
    if b + chunk == 0:
        tl.store(steps, tl.load(steps) + 1)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    z = _shaped(logits, b, place, size, l_b, scale, softcap, inverse_temperature, CAPPED)
    high = tl.maximum(tl.max(z, 0), -1e30)  # a chunk may hold nothing but tokens that are ruled out
    here = sums + b * tl.num_programs(1) + chunk
    tl.store(here, high)
    tl.store(here + s_s, tl.sum(tl.where(place < size, tl.exp(z - high), 0.0), 0))


@triton.jit
def _first_beyond(weights, point, N: tl.constexpr):
    """The first place whose weight leads the sum of those up to it beyond `point` times all; it has a weight."""
    place = tl.arange(0, N)
    beyond = (tl.cumsum(weights, 0) > point * tl.sum(weights, 0)) & (weights > 0)
    found = tl.min(tl.where(beyond, place, N), 0)
    return tl.where(found < N, found, tl.argmax(weights, 0))  # rounding may leave the last sum short


@triton.jit
def _draw(
    logits, sums, seed, steps, size, l_b, s_s, num_chunks, scale, softcap, inverse_temperature, stops, num_stops, last,
    made, ended, told, lengths, tokens, logprobs, t_b, limit, CHUNKS: tl.constexpr, STOPS: tl.constexpr,
    CAPPED: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Draw the token of a row from its chunks and write it down."""
    b = tl.program_id(0)
    c = tl.arange(0, CHUNKS)
    here = sums + b * num_chunks + c
    highs = tl.load(here, mask=c < num_chunks, other=-1e30)
    totals = tl.load(here + s_s, mask=c < num_chunks, other=0.0)
    high = tl.max(highs, 0)
    weights = totals * tl.exp(highs - high)
    step = tl.load(steps)
    first, second, _, _ = tl.rand4x(tl.load(seed) + step, b)
    chunk = _first_beyond(weights, first, CHUNKS)
    place = chunk * CHUNK + tl.arange(0, CHUNK)
    z = _shaped(logits, b, place, size, l_b, scale, softcap, inverse_temperature, CAPPED)
    chosen = _first_beyond(tl.where(place < size, tl.exp(z - tl.maximum(tl.max(z, 0), -1e30)), 0.0), second, CHUNK)
    token = chunk * CHUNK + chosen
    logit = tl.sum(tl.where(place == token, z, 0.0), 0)
    logprob = logit - (high + tl.log(tl.sum(weights, 0)))
    was = tl.load(ended + b)
    going = was < 0
    num = tl.load(made + b)
    slot = tl.where(going, num, limit)
    tl.store(tokens + b * t_b + slot, token.to(tl.int64))
    tl.store(logprobs + b * t_b + slot, logprob)
    s = tl.arange(0, STOPS)
    stop = tl.load(stops + s, mask=s < num_stops, other=-1)
    hit = tl.sum((stop == token).to(tl.int32), 0) > 0
    more = tl.where(going, 1, 0)
    tl.store(made + b, num + more)
    tl.store(lengths + b, tl.load(lengths + b) + more)
    now = tl.where(going & (hit | (num + more >= limit)), step, was)
    tl.store(ended + b, now)
    tl.store(told + b, now)
    tl.store(last + b, token.to(tl.int64))
