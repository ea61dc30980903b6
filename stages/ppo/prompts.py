"""The prompts of PPO: read, split by prompt, tokenised."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import date, time
from decimal import Decimal
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf.data.errors import DataError
from rlhf.data.rows import Prompt, Report, numbered, prompt_key, refuse_losses
from rlhf.data.sources import Source, locate
from rlhf.data.tokens import encode_prompts
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.row_files import RowReader


@dataclass(frozen=True)
class Asked:
    """A prompt as the policy reads it, and as it stands in its row."""

    ids: list[int]
    prompt: Prompt

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Asked":
        """From JSON values (`row_files`)."""
        return cls(row["ids"], Prompt(**row["prompt"]))


def read_rows(reader: RowReader[PPOSettings]) -> tuple[list[Prompt], list[Prompt]]:
    """Training and held-out prompts, each once."""
    settings = reader.settings
    prompts = _read(reader, "data", settings.data)
    held_out = _read(reader, "eval_data", settings.eval_data) if settings.eval_data else None
    return reader.split(prompts, held_out, lambda prompt: prompt_key(prompt.messages))


def encode_rows(
    reader: RowReader[PPOSettings], tokenizer: PreTrainedTokenizerBase, prompts: list[Prompt]
) -> Iterator[Asked]:
    """The prompts that fit; the others are counted aloud."""
    longest, num_kept = reader.settings.max_prompt_length, 0
    encoded = encode_prompts(tokenizer, (prompt.messages for prompt in prompts))
    for ids, prompt in zip(encoded, prompts, strict=True):
        if len(ids) <= longest:
            num_kept += 1
            yield Asked(ids, prompt)
    too_long = len(prompts) - num_kept
    reader.count("tokenised", num_kept, len(prompts), {"longer than max_prompt_length": too_long})
    if too_long:
        reader.say(f"{too_long} of {len(prompts)} prompts are longer than max_prompt_length {longest}; left out")
    if not num_kept:
        raise DataError(f"ppo.max_prompt_length: none of {len(prompts)} prompts fits in {longest} tokens; raise it")


def _read(reader: RowReader[PPOSettings], name: str, source: Source) -> list[Prompt]:
    """The prompts of a source, with their rows where a reward function may ask for them."""
    asks = any(reward.function for reward in reader.settings.rewards)
    report = Report("prompts")
    prompts = [
        replace(prompt, row=_row_as_json(prompt.row, source, number) if asks else {})
        for number, prompt in numbered(source, "prompts", report)
    ]
    refuse_losses(report, source, reader.settings.max_dropped)
    reader.count_report(name, report)
    return prompts


def _row_as_json(row: dict[str, Any], source: Source, number: int) -> dict[str, Any]:
    """A row of JSON values: in files until a reward function is given it, it must not change on the way."""
    found = {}
    for column, value in row.items():
        try:
            found[column] = _as_json(value)
        except (TypeError, RecursionError) as error:
            what = str(error) if isinstance(error, TypeError) else "it is nested too deeply"
            raise DataError(
                f"{locate(source, number)}: column {column!r}: {what}; reward functions are given rows of JSON values: "
                "make it text, a number, a list, or an object whose keys are text, or leave the column out"
            ) from error
    return found


def _as_json(value: Any) -> Any:
    """A value as JSON has it: numbers and arrays of numpy and torch plain, dates, times and decimals as text.

    Raises TypeError that says what it is where there is no such form.
    """
    if value is None or isinstance(value, str | float):
        return value
    if isinstance(value, int):
        if value.bit_length() > 10_000:
            raise TypeError("a number of thousands of digits")  # Python reads 4300 of them
        return value
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"an object with the key {odd[0]!r}, which is not text")
        return {key: _as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(inner) for inner in value]
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    kind = value.dtype.kind if isinstance(value, np.generic | np.ndarray) else None
    if kind == "M":  # of those that are finer than a datetime `tolist` makes numbers
        return np.datetime_as_string(value).tolist()
    if kind not in ("m", "V") and hasattr(value, "tolist"):  # neither times without a unit nor records without names
        plain = value.tolist()
        if type(plain) is not type(value):
            return _as_json(plain)
    raise TypeError(f"a value of type {type(value).__name__}")
