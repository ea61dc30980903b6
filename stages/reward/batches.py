"""From rankings to what the reward model reads: answers as token ids, and prompts cut into forward passes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.data.collate import pad_examples
from rlhf.data.errors import DataError
from rlhf.data.rows import Messages, Ranking
from rlhf.data.tokens import Encoded, encode_examples
from rlhf.stages.microbatches import packs, pieces
from rlhf.stages.packing import sent
from rlhf.stages.reward.config import RewardSettings
from rlhf.stages.row_files import RowReader


@dataclass
class Ranked:
    """The answers of one ranking as token ids, with their ranks; the rest as `Ranking` has it."""

    answers: list[Encoded]
    ranks: list[float]
    strengths: list[float] | None = None
    source: str = ""
    prompt: Messages = field(default_factory=list)
    responses: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Ranked":
        """From JSON values (`row_files`)."""
        return cls(**{**row, "answers": [Encoded(**answer) for answer in row["answers"]]})

    @property
    def best(self) -> list[bool]:
        """Which answers nothing is ranked before; several where they are tied."""
        return [rank == min(self.ranks) for rank in self.ranks]

    @property
    def num_best_tokens(self) -> int:
        """Tokens of the best answers, eos included."""
        pairs = zip(self.answers, self.best, strict=True)
        return sum(len(answer.input_ids) - answer.prompt_length for answer, best in pairs if best)


@dataclass
class Batch:
    """N rankings of up to K answers each; their answers, one after the other, are the A rows of the texts."""

    ids: Tensor  # [A,T], padded on the right
    attention: Tensor  # [A,T]
    response: Tensor  # [A,T], True on the response, eos included
    best: Tensor  # [A]
    ranks: Tensor  # [N,K]
    strengths: Tensor  # [N,K], 0 where they are unknown
    mask: Tensor  # [N,K], True where there is an answer

    def by_prompt(self, scores: Tensor) -> Tensor:
        """Scores [A] as [N,K], 0 where there is no answer."""
        return torch.zeros_like(self.ranks).masked_scatter(self.mask, scores)


def collate(rows: Sequence[Ranked], pad: int, device: torch.device, multiple: int = 1) -> Batch:
    """The tensors of some rankings; the width is a multiple of `multiple`."""
    answers = [answer for row in rows for answer in row.answers]
    ids, attention, response = pad_examples(answers, pad, multiple)
    best = torch.tensor([best for row in rows for best in row.best])
    ranks, mask = padded([row.ranks for row in rows])
    strengths, _ = padded([row.strengths or [0.0] * len(row.ranks) for row in rows])
    return Batch(*sent(device, ids, attention, response, best, ranks, strengths, mask))


def padded(rows: Sequence[Sequence[float]]) -> tuple[Tensor, Tensor]:
    """(numbers, mask) [N,K] of lists of unlike lengths, K being that of the longest."""
    width = max(map(len, rows))
    numbers = torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows])
    return numbers, torch.arange(width) < torch.tensor(list(map(len, rows)))[:, None]


def passes(
    data: Sequence[Ranked], rows: list[int], max_rows: int | None, max_tokens: int, packed: bool = False
) -> list[list[int]]:
    """`rows` of the data cut into forward passes of at most `max_rows` and `max_tokens`.

    Whole rankings, those with about equally long answers together, so that little is padding; `packed`, any.
    """
    if packed:
        tokens = [sum(len(answer.input_ids) for answer in row.answers) for row in data]
        return packs(tokens, max_tokens, max_rows, rows)
    longest = [max(len(answer.input_ids) for answer in row.answers) for row in data]
    counts = [len(row.answers) for row in data]
    cut = pieces([0] * len(data), longest, max_rows, rows, counts, max_tokens)
    return [piece.rows for piece in cut]


def encode_rows(
    reader: RowReader[RewardSettings], tokenizer: PreTrainedTokenizerBase, rows: list[Ranking]
) -> Iterator[Ranked]:
    """Token ids of the answers that fit; answers left out are counted aloud."""
    settings = reader.settings
    num_kept, too_long, same = 0, 0, 0
    pairs = ((row.prompt, response) for row in rows for response in row.responses)
    examples = encode_examples(tokenizer, pairs, settings.max_length)
    for row in rows:
        ranked = Ranked([], [], None if row.strengths is None else [], row.source, row.prompt)
        for place, response in enumerate(row.responses):
            encoded = next(examples)
            if encoded is None:
                too_long += 1
            elif encoded in ranked.answers:
                same += 1  # the same ids under another rank would only teach noise
            else:
                ranked.answers.append(encoded)
                ranked.responses.append(response)
                ranked.ranks.append(float(row.ranks[place]))
                if ranked.strengths is not None and row.strengths is not None:
                    ranked.strengths.append(float(row.strengths[place]))
        if len(set(ranked.ranks)) > 1 or (settings.ties == "soft" and len(ranked.ranks) > 1):
            num_kept += 1
            yield ranked
    num_answers = sum(len(row.responses) for row in rows)
    left_out = {"longer than max_length": too_long, "the same as another answer": same}
    reader.count("answers, tokenised", num_answers - too_long - same, num_answers, left_out)
    reader.count("rankings, tokenised", num_kept, len(rows), {"nothing to compare": len(rows) - num_kept})
    if too_long or same:
        reader.say(f"left out {too_long} answers longer than max_length {settings.max_length}, {same} repeated ones")
    if not num_kept:
        reason = "raise reward.max_length" if too_long else "the judge or the ranks hold all answers to be equal"
        raise DataError(f"reward.data: no ranking keeps two answers of different rank; {reason}")
    if num_kept < len(rows):
        reader.say(f"left out {len(rows) - num_kept} of {len(rows)} rankings with nothing to compare")
