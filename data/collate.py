"""From token lists to tensors, and which rows an optimiser step sees."""

from collections.abc import Sequence
from functools import lru_cache, partial
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from rlhf.data.errors import DataError
from rlhf.data.tokens import Encoded

IGNORED = -100  # the label that torch's cross entropy leaves out


def pad_right(sequences: Sequence[Sequence[int]], pad_id: int, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """(ids [B, T] long, mask [B, T] bool), tokens first; the mask goes by length, so pad may equal eos.

    T is that of the longest, up to a `multiple`.
    """
    return _pad(sequences, pad_id, left=False, multiple=multiple)


def pad_left(sequences: Sequence[Sequence[int]], pad_id: int) -> tuple[Tensor, Tensor]:
    """(ids [B, T] long, mask [B, T] bool), tokens last, so that generation goes on at the right end."""
    return _pad(sequences, pad_id, left=True)


def _pad(sequences: Sequence[Sequence[int]], pad_id: int, left: bool, multiple: int = 1) -> tuple[Tensor, Tensor]:
    width = max((len(sequence) for sequence in sequences), default=0)
    width += -width % multiple
    lengths = np.array([len(sequence) for sequence in sequences], dtype=np.int64)[:, None]
    places = np.arange(width)
    mask = places >= width - lengths if left else places < lengths
    ids = np.full((len(sequences), width), pad_id, dtype=np.int64)
    ids[mask] = np.fromiter(chain.from_iterable(sequences), dtype=np.int64)  # row by row, as the mask is read
    return torch.from_numpy(ids), torch.from_numpy(mask)


def pad_examples(batch: Sequence[Encoded], pad_id: int, multiple: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, mask, response mask) [B, T], padded right; the last is True on the response with its eos."""
    ids, mask = pad_right([example.input_ids for example in batch], pad_id, multiple)
    starts = torch.tensor([example.prompt_length for example in batch])
    return ids, mask, mask & (torch.arange(ids.shape[1]) >= starts[:, None])


def pack(sequences: Sequence[Sequence[int]], pad_id: int, multiple: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """(ids [1, N] long, positions [1, N] long, borders [S + 1] int) of sequences one after the other.

    Positions begin anew in each; borders say where each begins, and the end. What fills N up to a `multiple` is a
    sequence of its own.
    """
    fill = -sum(map(len, sequences)) % multiple
    lengths = [len(sequence) for sequence in sequences] + [fill] * (fill > 0)
    ids = np.fromiter(chain(*sequences, [pad_id] * fill), dtype=np.int64)
    positions = np.concatenate([np.arange(length) for length in lengths])
    borders = np.cumsum([0, *lengths], dtype=np.int32)
    return torch.from_numpy(ids)[None], torch.from_numpy(positions)[None], torch.from_numpy(borders)


def labels(batch: Sequence[Encoded]) -> Tensor:
    """Labels [B, T], padded right: the response with its eos, -100 on prompt and padding.

    By length, never by id: where pad equals eos the closing eos must still be learned.
    """
    hidden = [[IGNORED] * row.prompt_length + row.input_ids[row.prompt_length :] for row in batch]
    return pad_right(hidden, IGNORED)[0]


class Blocks:
    """A stream of tokens as rows of `length` + 1 that overlap by one, so that each token but the first is predicted
    once. The tokens may lie in a file that is mapped into memory: a row is read when it is asked for.

    Raises DataError, naming `where`, when the tokens do not fill one row.
    """

    def __init__(self, tokens: np.ndarray, length: int, where: str) -> None:
        if len(tokens) < length + 1:
            raise DataError(
                f"{where}: the text gives {len(tokens)} tokens, but a block needs {length + 1}; "
                "use more text or smaller blocks"
            )
        self.tokens, self.length = tokens, length
        # Of each stream its own: a step asks for rows of one epoch or two, and the order of all rows takes time.
        self._order = lru_cache(maxsize=2)(partial(epoch_order, len(self)))

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, rows: Sequence[int]) -> Tensor:
        """Ids [n, length + 1] of n rows."""
        return self._from(np.asarray(rows, dtype=np.int64) * self.length)

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole stream."""
        return len(self.tokens)

    def batch(self, step: int, batch_size: int, seed: int) -> Tensor:
        """Ids [B, length + 1] of optimiser step `step`, from 0."""
        return self.at(range(step * batch_size, (step + 1) * batch_size), seed)

    def at(self, places: Sequence[int], seed: int) -> Tensor:
        """Ids [n, length + 1] at places of the stream of shuffled epochs.

        From the second epoch on the rows begin elsewhere in the tokens, going round at their end, so that a text is
        not cut at the same places, and a token not seen with the same ones before it, time and again.
        """
        starts = []
        for place in places:
            epoch, rest = divmod(place, len(self))
            starts.append(int(self._order(seed, epoch)[rest]) * self.length + _shift(self.length, seed, epoch))
        return self._from(np.asarray(starts))

    def _from(self, starts: np.ndarray) -> Tensor:
        taken = (starts[:, None] + np.arange(self.length + 1)) % len(self.tokens)
        return torch.from_numpy(self.tokens[taken].astype(np.int64))


def document_mask(ids: Tensor, eos_token_id: int) -> tuple[Tensor, Tensor]:
    """(positions [B,T], mask [B,1,T,T] bool) that keep the documents of a block apart, from ids [B,T].

    An eos belongs to the document that it ends. Positions restart after it; the mask is True where a token (second to
    last axis) may look: at itself and at what comes before it in its own document.
    """
    places = torch.arange(ids.shape[1], device=ids.device)
    is_eos = ids == eos_token_id
    document = is_eos.cumsum(-1) - is_eos.long()  # [B,T]: ends before this token
    same = document[:, :, None] == document[:, None, :]
    starts = torch.zeros_like(ids)
    starts[:, 1:] = torch.where(is_eos[:, :-1], places[1:], 0)
    return places - starts.cummax(-1).values, (same & (places[:, None] >= places)).unsqueeze(1)


def batch_indices(num_rows: int, batch_size: int, step: int, seed: int) -> list[int]:
    """Rows of optimiser step `step` (from 0) in a stream of shuffled epochs.

    Each epoch holds each row once, in an order of its own; a batch may straddle two epochs. A function of its
    arguments alone: a resumed run sees what an unbroken one would have, on any number of processes.
    """
    if num_rows < 1 or batch_size < 1 or step < 0:
        raise ValueError(f"no batch from num_rows={num_rows}, batch_size={batch_size}, step={step}")
    places = range(step * batch_size, (step + 1) * batch_size)
    return [int(_cached_order(num_rows, seed, place // num_rows)[place % num_rows]) for place in places]


def epoch_order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """The order of the rows in an epoch, from 0."""
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


_cached_order = lru_cache(maxsize=8)(epoch_order)


@lru_cache(maxsize=32)
def _shift(length: int, seed: int, epoch: int) -> int:
    return int(np.random.default_rng([seed, epoch, 1]).integers(length)) if epoch else 0


def response_mask(responses: Tensor, stop_token_ids: Sequence[int] | Tensor) -> Tensor:
    """True up to and including the first stop token: stopping is an action like any other. [B,R]

    A response without a stop token counts whole. The pad id plays no part, so it may equal a stop id.
    """
    stop_ids = torch.as_tensor(stop_token_ids, device=responses.device, dtype=responses.dtype)
    is_stop = torch.isin(responses, stop_ids)
    stops_before = is_stop.long().cumsum(dim=-1) - is_stop.long()
    return stops_before == 0
