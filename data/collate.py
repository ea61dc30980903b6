"""From token lists to tensors, and which rows an optimiser step sees."""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from rlhf.data.errors import DataError
from rlhf.data.tokens import Encoded

IGNORED = -100  # the label that torch's cross entropy leaves out


def pad_right(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """(ids [B, T] long, mask [B, T] bool), tokens first; the mask goes by length, so pad may equal eos."""
    return _pad(sequences, pad_id, left=False)


def pad_left(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """(ids [B, T] long, mask [B, T] bool), tokens last, so that generation goes on at the right end."""
    return _pad(sequences, pad_id, left=True)


def _pad(sequences: Sequence[Sequence[int]], pad_id: int, left: bool) -> tuple[Tensor, Tensor]:
    width = max((len(sequence) for sequence in sequences), default=0)
    ids = torch.full((len(sequences), width), pad_id, dtype=torch.long)
    mask = torch.zeros(len(sequences), width, dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        place = slice(width - len(sequence), width) if left else slice(0, len(sequence))
        ids[row, place] = torch.tensor(sequence, dtype=torch.long)
        mask[row, place] = True
    return ids, mask


def pad_examples(batch: Sequence[Encoded], pad_id: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, mask, response mask) [B, T], padded right; the last is True on the response with its eos."""
    ids, mask = pad_right([example.input_ids for example in batch], pad_id)
    starts = torch.tensor([example.prompt_length for example in batch])
    return ids, mask, mask & (torch.arange(ids.shape[1]) >= starts[:, None])


def labels(batch: Sequence[Encoded]) -> Tensor:
    """Labels [B, T], padded right: the response with its eos, -100 on prompt and padding.

    By length, never by id: where pad equals eos the closing eos must still be learned.
    """
    hidden = [[IGNORED] * row.prompt_length + row.input_ids[row.prompt_length :] for row in batch]
    return pad_right(hidden, IGNORED)[0]


def blocks(tokens: Sequence[int], length: int, where: str) -> Tensor:
    """Rows [N, length + 1] that overlap by one token, so that each token but the first is predicted once.

    Raises DataError, naming `where`, when the tokens do not fill one row.
    """
    if len(tokens) < length + 1:
        raise DataError(
            f"{where}: the text gives {len(tokens)} tokens, but a block needs {length + 1}; "
            "use more text or smaller blocks"
        )
    return torch.tensor(tokens).unfold(0, length + 1, length)


def batch_indices(num_rows: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Rows of optimiser step `step` (from 0) in a stream of shuffled epochs.

    Each epoch holds each row once, in an order of its own; a batch may straddle two epochs. A function of its
    arguments alone: a resumed run sees what an unbroken one would have, on any number of processes.
    """
    if num_rows < 1 or batch_size < 1 or step < 0:
        raise ValueError(f"no batch from num_rows={num_rows}, batch_size={batch_size}, step={step}")
    places = range(step * batch_size, (step + 1) * batch_size)
    return [int(_order(num_rows, seed, place // num_rows)[place % num_rows]) for place in places]


@lru_cache(maxsize=8)
def _order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)
