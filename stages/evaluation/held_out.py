"""What no stage was trained on: text, demonstrations and prompts, split as the stages split them."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.data.errors import DataError, RefusedError
from rlhf.data.plain_rows import read_prompts_as_json
from rlhf.data.rows import Demonstration, Prompt, prompt_key, read_demonstrations, read_prompts
from rlhf.data.split import place, train_and_eval
from rlhf.data.tokens import Encoded, encode_example, encode_prompt
from rlhf.stages.evaluation.places import with_data_as_read
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.sft.config import SFTSettings

T = TypeVar("T")


def text(
    folder: Path, settings: PretrainSettings, tokenizer: PreTrainedTokenizerBase, num_tokens: int, make: bool
) -> Tensor | None:
    """Blocks [n, T + 1] of the held-out text of a finished pretrain stage, of `num_tokens` or all.

    They are spread over the text. None where its tokens are not there any more and not to be made again. Raises
    DataError for text that is to be read again and is not there, or not as the stage read it.
    """
    from rlhf.stages.pretrain.corpus import held_out_blocks

    try:
        if any(source.weight is not None for source in settings.data):  # whose tokens are found by hashing the text
            settings = with_data_as_read(settings, folder)
        blocks = held_out_blocks(folder, settings, tokenizer, make=False)
        if blocks is None and make:
            blocks = held_out_blocks(folder, with_data_as_read(settings, folder), tokenizer, make=True)
    except PermissionError as error:
        raise DataError(f"{error.filename}: may not be read; change its mode") from None
    if blocks is None:
        return None
    number = min(len(blocks), max(num_tokens // blocks.length, 1))
    return blocks[np.linspace(0, len(blocks) - 1, number).round().astype(int).tolist()]


def demonstrations(folder: Path, settings: SFTSettings) -> list[Demonstration]:
    """The held-out ones of a finished SFT stage, in an order of their prompts that is as good as chance.

    Raises RefusedError for rows that are not there, or not as the stage read them.
    """
    settings = with_data_as_read(settings, folder)
    rows = read_demonstrations(settings.data, settings.max_dropped).rows
    given = read_demonstrations(settings.eval_data, settings.max_dropped).rows if settings.eval_data else None
    return _held_out(rows, given, lambda row: prompt_key(row.prompt), settings.eval_share)


def prompts(folder: Path, settings: PPOSettings) -> list[Prompt]:
    """The held-out ones of a finished PPO stage, in such an order. Raises RefusedError as `demonstrations` does."""
    settings, read = with_data_as_read(settings, folder), read_prompts
    with suppress(RefusedError):  # a function that is not there is given nothing
        read = read_prompts_as_json if settings.gives_rows else read_prompts
    rows = read(settings.data, settings.max_dropped).rows
    given = read(settings.eval_data, settings.max_dropped).rows if settings.eval_data else None
    return _held_out(rows, given, lambda prompt: prompt_key(prompt.messages), settings.eval_share)


def prompts_of(rows: Sequence[Demonstration]) -> list[Prompt]:
    """Their prompts, each once."""
    return [Prompt(messages, {}) for messages in {prompt_key(row.prompt): row.prompt for row in rows}.values()]


def encoded_examples(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Demonstration], max_length: int, num_tokens: int
) -> list[Encoded]:
    """The first rows that fit, until they have so many tokens of responses; one at least."""
    found: list[Encoded] = []
    for row in rows:
        encoded = encode_example(tokenizer, row.prompt, row.response, max_length)
        if encoded is not None:
            found.append(encoded)
            num_tokens -= len(encoded.input_ids) - encoded.prompt_length
        if num_tokens <= 0:
            break
    return found


def encoded_prompts(
    tokenizer: PreTrainedTokenizerBase, rows: Sequence[Prompt], max_length: int, num_prompts: int, cut: bool
) -> tuple[list[Prompt], list[list[int]]]:
    """The first prompts, and their ids. Longer ones are `cut` from the left, as SFT does, or passed over, as PPO does.

    Raises DataError if none fits.
    """
    found: list[tuple[Prompt, list[int]]] = []
    for row in rows:
        ids = encode_prompt(tokenizer, row.messages, max_length if cut else None)
        if len(ids) <= max_length:
            found.append((row, ids))
        if len(found) == num_prompts:
            break
    if not found:
        raise DataError(f"none of {len(rows)} held-out prompts fits in {max_length} tokens")
    return [row for row, _ in found], [ids for _, ids in found]


def _held_out(rows: list[T], given: list[T] | None, key: Callable[[T], str], eval_share: float) -> list[T]:
    return sorted(train_and_eval(rows, given, key, eval_share)[1], key=lambda row: place(key(row)))
