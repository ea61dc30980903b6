"""Several texts in one row without padding, each read as if it were alone.

On a GPU attention is flash-attention's kernel for texts of unlike lengths, which torch brings along. It takes bf16 and
fp16 alone. On a CPU the texts have their turns, and all but attention reads them together.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

PACKED = "rlhf_packed"
TOKENS_AT_ONCE = 2**14
"""In a row of texts, where no setting says otherwise: enough to keep a large GPU busy."""
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


def sent(device: torch.device, *tensors: Tensor) -> list[Tensor]:
    """On the device. A copy from memory that is not pinned would wait until a GPU has done all before."""
    if device.type == "cuda":
        return [tensor.pin_memory().to(device, non_blocking=True) for tensor in tensors]
    return [tensor.to(device) for tensor in tensors]


def states(trunk: nn.Module, config: Any, pack: Pack) -> Tensor:
    """Last hidden states [1,N,d] of a pack."""
    text, before = config.get_text_config(), config.get_text_config()._attn_implementation
    text._attn_implementation = PACKED
    try:
        hidden: Tensor = trunk(
            input_ids=pack.ids, position_ids=pack.positions, use_cache=False, cu_seq_lens_q=pack.borders,
            cu_seq_lens_k=pack.borders, max_length_q=pack.longest, max_length_k=pack.longest,
        ).last_hidden_state  # fmt: skip
    finally:
        text._attn_implementation = before
    return hidden


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: [1,N,H,D] of queries [1,H,N,D], keys and values [1,G,N,D]."""
    if softcap is not None or s_aux is not None or not getattr(module, "is_causal", True):
        raise ValueError("packed texts are read by plain causal attention alone")
    if query.is_cuda:  # torch.nn.attention.varlen calls the same, with other arguments in each release of torch
        window = {} if sliding_window is None else {"window_size_left": sliding_window - 1, "window_size_right": 0}
        half = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else value.dtype
        q, k, v = (tensor.to(half).transpose(1, 2)[0] for tensor in (query, key, value))  # rotated ones may be float32
        found = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, dropout, True, False, scale=scaling,
            **window,
        )  # fmt: skip
        return found[0][None], None
    sizes = cu_seq_lens_q.diff().tolist()
    pieces = zip(query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True)
    read = [_attend_alone(q, k, v, dropout, scaling, sliding_window) for q, k, v in pieces]
    return torch.cat(read, 2).transpose(1, 2), None


def _attend_alone(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, scaling: float | None, window: int | None
) -> Tensor:
    mask, length = None, query.shape[2]
    if window is not None and window < length:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - window)
    return scaled_dot_product_attention(
        query, key, value, mask, dropout, is_causal=mask is None, scale=scaling, enable_gqa=True
    )


AttentionInterface.register(PACKED, attend)


@torch.no_grad()
def reads_packs(model: PreTrainedModel, autocast: AbstractContextManager[Any]) -> bool:
    """Whether the model reads packed texts as if each were alone, on the device where it is; found by trying."""
    config, device = model.config.get_text_config(), model.device
    if not set(getattr(config, "layer_types", None) or ()) <= _PLAIN:
        return False
    ids = torch.arange(1, 21, device=device) % config.vocab_size
    texts, others = [ids[:7], ids[7:]], [ids[13:], ids[7:]]
    was_training = model.training
    model.eval()
    try:
        with autocast:
            found, changed = (_states_of(model, some) for some in (texts, others))
            alone = [model.base_model(input_ids=text[None], use_cache=False).last_hidden_state[0] for text in texts]
    except (TypeError, ValueError, RuntimeError):  # an argument that it does not take, a shape the kernel does not
        return False
    finally:
        model.train(was_training)
    expected = torch.cat(alone).float()
    near = (found.float() - expected).abs().max() <= 0.05 * expected.abs().max()
    return bool(near) and torch.equal(found[7:], changed[7:])


def _states_of(model: PreTrainedModel, texts: list[Tensor]) -> Tensor:
    lengths = [len(text) for text in texts]
    positions = torch.cat([torch.arange(length) for length in lengths])[None].to(model.device)
    borders = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32, device=model.device)
    return states(model.base_model, model.config, Pack(torch.cat(texts)[None], positions, borders, max(lengths)))[0]


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
