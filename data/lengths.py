"""How long prompts and responses are in tokens, and what a `max_length` would cost."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf.data.errors import SettingsError
from rlhf.data.hub import refuse_unknown

Measure = Callable[[list[str]], list[int]]
"""Texts → the length of each."""
SHORTEST = 16  # where the first bucket of a histogram ends; each further one is twice as wide


def characters(texts: list[str]) -> list[int]:
    """Lengths in characters."""
    return list(map(len, texts))


def tokens(where: str) -> Measure:
    """Lengths in tokens of the tokenizer in a folder (its tokenizer.json), or of a hub id.

    Of the texts alone: what a chat template writes around them is not counted. Raises SettingsError.
    """
    from tokenizers import Tokenizer

    file = Path(where).expanduser()
    if file.is_dir():
        file /= "tokenizer.json"
        if not file.is_file():
            raise SettingsError(f"--tokenizer {where}: no tokenizer.json in this folder; name a model's folder")
    elif not file.is_file():
        file = _downloaded(where)
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises Exception itself
        raise SettingsError(f"--tokenizer {where}: {file} is not a tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # text stays text, as where rows are encoded for training
    return lambda texts: [len(e.ids) for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _downloaded(repository: str) -> Path:
    from huggingface_hub import hf_hub_download

    refuse_unknown(repository, "--tokenizer")
    try:
        return Path(hf_hub_download(repository, "tokenizer.json"))
    except Exception as error:  # not found, no such file, not an id, no network …
        raise SettingsError(
            f"--tokenizer {repository}: neither a folder with a tokenizer.json nor a hub id that has one: {error}"
        ) from error


@dataclass
class Histogram:
    """Counts of lengths."""

    counts: Counter[int] = field(default_factory=Counter)

    def as_json(self) -> dict[str, Any] | None:
        """Percentiles, each a length that occurs, and buckets up to and including `to`; None without any lengths."""
        if not self.counts:
            return None
        buckets = Counter[int]()
        for length, count in self.counts.items():
            buckets[_bucket(length)] += count
        edges = [min(buckets)]
        while edges[-1] < max(buckets):
            edges.append(2 * edges[-1])
        return {
            "min": min(self.counts),
            "p50": self.percentile(50),
            "p90": self.percentile(90),
            "p99": self.percentile(99),
            "max": max(self.counts),
            "buckets": [{"to": edge, "count": buckets[edge]} for edge in edges],
        }

    def percentile(self, percent: int) -> int:
        """The smallest length that at least so many percent do not exceed."""
        wanted = percent * self.counts.total()
        below = 0
        for length in sorted(self.counts):
            below += self.counts[length]
            if 100 * below >= wanted:
                break
        return length


def _bucket(length: int) -> int:
    """The upper edge of the bucket that a length falls into: 16, 32, 64 …"""
    edge = SHORTEST
    while edge < length:
        edge *= 2
    return edge


@dataclass
class Lengths:
    """Lengths by what they are of, and how many examples would not fit into `max_length` whole."""

    max_length: int | None = None
    histograms: dict[str, Histogram] = field(default_factory=dict)
    fits: Counter[str] = field(default_factory=Counter)

    def add(self, prompt: int | None, responses: list[int]) -> None:
        """Count one example; a document is a response without a prompt."""
        if prompt is not None:
            self._count("prompt", prompt)
        for response in responses:
            self._count("text" if prompt is None else "response", response)
        if self.max_length is not None and prompt is not None:
            answers: list[int | None] = [*responses] or [None]
            self.fits.update(_fit(prompt, answer, self.max_length) for answer in answers)

    def _count(self, name: str, length: int) -> None:
        self.histograms.setdefault(name, Histogram()).counts[length] += 1

    def as_json(self) -> dict[str, Any]:
        """`prompt`, `response` (or `text`) → histogram; `max_length` → shares of examples (each answer is one)."""
        found: dict[str, Any] = {name: histogram.as_json() for name, histogram in self.histograms.items()}
        if self.max_length is not None:
            total = max(self.fits.total(), 1)
            shares = {name: self.fits[name] / total for name in ("truncated", "left_out")}
            found["max_length"] = {"tokens": self.max_length, **shares}
        return found


def _fit(prompt: int, response: int | None, max_length: int) -> str:
    """What the stages do to an example: a long prompt loses its beginning, a long response is left out.

    A response needs room for its end token and for one token of the prompt. A prompt alone is left out when long.
    """
    if response is None:
        return "whole" if prompt <= max_length else "left_out"
    if response + 2 > max_length:
        return "left_out"
    return "whole" if prompt + response + 1 <= max_length else "truncated"
