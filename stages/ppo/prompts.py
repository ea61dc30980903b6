"""The prompts of PPO: read, split by prompt, tokenised."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf.data.errors import DataError
from rlhf.data.plain_rows import read_prompts_as_json
from rlhf.data.rows import Prompt, prompt_key, read_prompts
from rlhf.data.sources import Source
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
    settings = reader.settings
    read = read_prompts_as_json if settings.gives_rows else read_prompts
    loaded = read(source, settings.max_dropped)
    reader.count_report(name, loaded.report)
    return loaded.rows if settings.gives_rows else [replace(prompt, row={}) for prompt in loaded.rows]
