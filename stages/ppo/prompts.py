"""The prompts of PPO: read, split by prompt, tokenised."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf.data import tokens
from rlhf.data.errors import DataError
from rlhf.data.rows import Prompt, prompt_key, read_prompts
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
    loaded = read_prompts(settings.data, settings.max_dropped)
    reader.count_report("data", loaded.report)
    given = None
    if settings.eval_data:
        held_out = read_prompts(settings.eval_data, settings.max_dropped)
        reader.count_report("eval_data", held_out.report)
        given = held_out.rows
    return reader.split(loaded.rows, given, lambda prompt: prompt_key(prompt.messages))


def encode_prompts(
    reader: RowReader[PPOSettings], tokenizer: PreTrainedTokenizerBase, prompts: list[Prompt]
) -> Iterator[Asked]:
    """The prompts that fit; the others are counted aloud."""
    longest, num_kept = reader.settings.max_prompt_length, 0
    encoded = tokens.encode_prompts(tokenizer, (prompt.messages for prompt in prompts))
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
