"""How texts are read: in rows of their own, or several in one row without padding, each as if it were alone.

On a GPU attention is flash-attention's kernel for texts of unlike lengths, which torch brings along. It takes bf16 and
fp16 alone. On a CPU the texts have their turns, and all but attention reads them together.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "rlhf_causal"
"""What transformers calls our attention. A model keeps it for good: layers that are computed again in the backward pass
ask for it by name once more."""
MULTIPLE = 128
"""Of which the length of a row of texts is a multiple on a GPU, which likes round shapes."""
_PLAIN = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class Pack:
    """Texts one after the other in a row, and what is needed to keep them apart."""

    ids: Tensor  # [1,N]
    positions: Tensor  # [1,N], from 0 in each text
    borders: Tensor  # [S+1] int32: where each text begins, and the end
    longest: int
    """An upper limit of the texts' lengths; a compiled model wants the same one in all steps."""

    def to(self, device: torch.device) -> "Pack":
        ids, positions, borders = sent(device, self.ids, self.positions, self.borders)
        return Pack(ids, positions, borders, self.longest)


@dataclass(frozen=True)
class PackedRows:
    """Padded rows as a pack; made once for all models that read them.

    To find their tokens, the CPU waits until a GPU has done all before.
    """

    pack: Pack
    places: Tensor  # [N] of the pack's tokens in the rows [B,T], counted through all rows
    judged: Tensor | None = None  # [M] of the responses' tokens in their columns [B,R], counted in the same way


def sent(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """On the device. A copy from memory that is not pinned would wait until a GPU has done all before."""
    if device.type == "cuda":
        return [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
    return [tensor.to(device) for tensor in tensors]


def pack_of(ids: Tensor, mask: Tensor) -> PackedRows:
    """The texts of padded rows [B,T], True in `mask` [B,T]. What fills the pack on a GPU is one text more.

    This is for rows that lie on the device. `data.collate.pack` makes the same of lists on the CPU: to pad texts of
    unlike lengths first may take many times their memory.
    """
    places = mask.flatten().nonzero()[:, 0]  # [N]
    fill = -len(places) % MULTIPLE if ids.is_cuda else 0
    borders = pad(mask.sum(-1).cumsum(0), (1, 0))
    if fill:
        borders = pad(borders, (0, 1), value=len(places) + fill)
    positions = (mask.cumsum(-1) - 1).flatten()[places]
    texts, positions = (pad(x, (0, fill))[None] for x in (ids.flatten()[places], positions))
    pack = Pack(texts, positions, borders.int(), -(-ids.shape[1] // MULTIPLE) * MULTIPLE)
    return PackedRows(pack, places)


def episodes_as_pack(input_ids: Tensor, attention_mask: Tensor, num_response: int) -> PackedRows:
    """Prompts and responses [B,T], the latter in the last `num_response` columns, without the last column of all, which
    nobody has to read."""
    judged = attention_mask[:, -num_response:].flatten().nonzero()[:, 0]
    return replace(pack_of(input_ids[:, :-1], attention_mask[:, :-1]), judged=judged)


def laid_out(numbers: Tensor, places: Tensor, shape: torch.Size) -> Tensor:
    """Rows [B,T,…] with `numbers` [N,…] at these places [N], counted through all rows, and 0 elsewhere."""
    rows = numbers.new_zeros(shape.numel(), *numbers.shape[1:]).index_copy(0, places, numbers)
    return rows.unflatten(0, shape)


def read(model: PreTrainedModel, ids: Tensor, **given: Any) -> Tensor:
    """Last hidden states [B,T,d] of a decoder, from ids [B,T]; `given` are further arguments of its forward."""
    text = {"input_ids": ids}
    if torch.is_autocast_enabled(ids.device.type):  # else the residual stream would be in float32 all the way
        embedded = model.get_input_embeddings()(ids)
        text = {"inputs_embeds": embedded.to(torch.get_autocast_dtype(ids.device.type))}
    hidden: Tensor = model.base_model(**text, use_cache=False, **given).last_hidden_state
    return hidden


def no_mask(ids: Tensor) -> Tensor:
    """What our attention is given for a mask where it is to be causal without one.

    transformers takes a mask of four axes as it is. Without one it may make its own: where it compiles, or where
    positions begin anew.
    """
    return ids.new_empty((0, 0, 0, 0))


def read_pack(model: PreTrainedModel, pack: Pack) -> Tensor:
    """Last hidden states [1,N,d] of a decoder that `reads_packs`."""
    return read(
        model, pack.ids, attention_mask=no_mask(pack.ids), position_ids=pack.positions, cu_seq_lens_q=pack.borders,
        max_length_q=pack.longest,
    )  # fmt: skip


def read_rows(
    model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor, as_pack: PackedRows | None = None
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Last hidden states of a decoder, from ids [B,T] and attention mask [B,T] (True where a token is): as they were
    read, and what lays out as [B,T,…] numbers that are made of each of them.

    Each text is read from the first column on, so that no mask is needed beside the causal one and every kernel of
    attention will do; what stands behind a text changes nothing in it. As a pack, they are in one row without
    padding. What is laid out at padding means nothing.
    """
    if as_pack is not None:
        hidden = read_pack(model, as_pack.pack)[0, : len(as_pack.places)]  # [N,d]
        return hidden, lambda numbers: laid_out(numbers, as_pack.places, attention_mask.shape)
    places = torch.arange(input_ids.shape[1], device=input_ids.device)
    start = attention_mask.int().argmax(-1, keepdim=True)  # [B,1]
    back = (places - start) % len(places)  # [B,T]

    def turned_back(numbers: Tensor) -> Tensor:
        return numbers.gather(1, back if numbers.ndim == 2 else back[..., None].expand_as(numbers))

    return read(model, input_ids.gather(-1, (places + start) % len(places))), turned_back  # [B,T,d]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: [B,T,H,D] of queries [B,H,T,D], keys and values [B,G,T,D].

    torch's, but for a pack, whose texts begin at `cu_seq_lens_q` [S+1], and for `no_mask`.
    """
    if cu_seq_lens_q is not None:
        return _attend_in_pack(module, query, key, value, cu_seq_lens_q, sliding_window, **options), None
    if attention_mask is not None and not attention_mask.numel():
        attention_mask = _in_window(query, sliding_window)
    found: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return found


def _attend_in_pack(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    borders: Tensor,
    window: int | None,
    *,
    max_length_q: int,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> Tensor:
    if softcap is not None or s_aux is not None or not getattr(module, "is_causal", True):
        raise ValueError("packed texts are read by plain causal attention alone")
    if query.is_cuda:  # torch.nn.attention.varlen calls the same, with other arguments in each release of torch
        limits = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
        half = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else value.dtype
        q, k, v = (tensor.to(half).transpose(1, 2)[0] for tensor in (query, key, value))  # rotated ones may be float32
        found: Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, borders, borders, max_length_q, max_length_q, dropout, True, False, scale=scaling, **limits
        )[0]
        return found[None]
    sizes = borders.diff().tolist()
    texts = zip(query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True)
    read = [_attend_alone(q, k, v, dropout, scaling, window) for q, k, v in texts]
    return torch.cat(read, 2).transpose(1, 2)


def _attend_alone(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None, window: int | None
) -> Tensor:
    mask = _in_window(query, window)
    return scaled_dot_product_attention(
        query, key, value, mask, dropout, is_causal=mask is None, scale=scaling, enable_gqa=True
    )


def _in_window(query: Tensor, window: int | None) -> Tensor | None:
    """Which tokens [T,T] each of them sees, where these are less than all before it."""
    length = query.shape[2]
    if window is None or window >= length:
        return None
    return torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)


AttentionInterface.register(ATTENTION, attend)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def reads_packs(model: PreTrainedModel, autocast: AbstractContextManager[Any]) -> bool:
    """Whether the model reads packed texts as if each were alone, on the device where it is; found by trying.

    If it does, its attention is ours from then on; without packs that is torch's, as before.
    """

    def read_together(texts: Sequence[Tensor]) -> Tensor:
        lengths = [len(text) for text in texts]
        positions = torch.cat([torch.arange(length, device=model.device) for length in lengths])[None]
        borders = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device=model.device)
        return read_pack(model, Pack(torch.cat(list(texts))[None], positions, borders, max(lengths)))[0]

    return _takes_ours(model, autocast, read_together)


def reads_without_mask(model: PreTrainedModel) -> bool:
    """The same of rows that are given `no_mask`."""
    return _takes_ours(model, nullcontext(), lambda texts: torch.cat(
        [read(model, text[None], attention_mask=no_mask(text))[0] for text in texts]
    ))  # fmt: skip


@torch.no_grad()
def _takes_ours(
    model: PreTrainedModel, autocast: AbstractContextManager[Any], read_texts: Callable[[Sequence[Tensor]], Tensor]
) -> bool:
    """Give the model our attention; whether it then reads texts as torch's lets it read each alone, else it is taken
    back."""
    config, ids = model.base_model.config.get_text_config(), torch.arange(1, 9, device=model.device)
    before, was_training = config._attn_implementation, model.training
    if before not in ("sdpa", ATTENTION) or not set(getattr(config, "layer_types", None) or ()) <= _PLAIN:
        return False
    ids %= config.vocab_size
    texts, others, same = [ids[:3], ids[3:]], [ids[5:], ids[3:]], False
    model.eval()
    try:
        with autocast:
            half = model.dtype != torch.float32 or torch.is_autocast_enabled(model.device.type)
            config._attn_implementation = "sdpa"
            alone = torch.cat([read(model, text[None])[0] for text in texts]).float()
            config._attn_implementation = ATTENTION
            found, changed = read_texts(texts), read_texts(others)
        near = (found.float() - alone).abs().max() <= (0.05 if half else 0.01) * alone.abs().max()
        same = bool(near) and torch.equal(found[3:], changed[3:])
    except (TypeError, ValueError, RuntimeError):  # an argument that it does not take, a shape the kernel does not
        return False
    finally:
        config._attn_implementation = ATTENTION if same else before
        model.train(was_training)
    return same


def packs_here(asked: bool | None, device: torch.device, autocast: str) -> bool:
    """Whether texts are packed, if the model can read them: as asked for, or by default on a GPU in 16 bits."""
    if device.type == "cuda" and (autocast == "no" or torch.cuda.get_device_capability(device) < (8, 0)):
        return False
    return device.type == "cuda" if asked is None else asked


@contextmanager
def as_written(compiled: bool) -> Iterator[None]:
    """Read the layers uncompiled, as in an evaluation, whose shapes are its own."""
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield
