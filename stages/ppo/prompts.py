"""The prompts of PPO: read, split by prompt, tokenised, and checked against the model's positions."""

from typing import Any

from rlhf.data.errors import DataError, SettingsError
from rlhf.data.rows import Messages, prompt_key, read_prompts
from rlhf.data.split import split_by_prompt, without
from rlhf.data.tokens import encode_prompt
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.runtime import Runtime


def check_lengths(settings: PPOSettings, context: int) -> None:
    """Prompt and response must fit in the model's positions."""
    longest = settings.max_prompt_length + settings.max_new_tokens
    if longest > context:
        raise SettingsError(
            f"ppo: max_prompt_length {settings.max_prompt_length} + max_new_tokens {settings.max_new_tokens} = "
            f"{longest} exceeds the model's {context} positions; lower one of them"
        )


def read_rows(settings: PPOSettings) -> tuple[list[Messages], list[Messages]]:
    """Training and held-out prompts, each once, none in both."""
    prompts = read_prompts(settings.data, settings.max_dropped).rows
    if settings.eval_data is None:
        return split_by_prompt(prompts, prompt_key, settings.eval_share)
    eval_prompts = read_prompts(settings.eval_data, settings.max_dropped).rows
    return without(prompts, eval_prompts, prompt_key)[0], eval_prompts


def encode_prompts(run: Runtime, tokenizer: Any, prompts: list[Messages]) -> tuple[list[list[int]], list[Messages]]:
    """Token ids of the prompts that fit, and those prompts; the others are counted aloud."""
    settings: Any = run.settings
    pairs = [(encode_prompt(tokenizer, prompt), prompt) for prompt in prompts]
    kept = [(ids, prompt) for ids, prompt in pairs if len(ids) <= settings.max_prompt_length]
    if len(kept) < len(pairs):
        run.say(
            f"{len(pairs) - len(kept)} of {len(pairs)} prompts are longer than max_prompt_length "
            f"{settings.max_prompt_length} and are left out"
        )
    if not kept:
        raise DataError(
            f"ppo.data: none of {len(pairs)} prompts is left (max_prompt_length {settings.max_prompt_length}; "
            "a single prompt cannot be split into training and evaluation)"
        )
    return [ids for ids, _ in kept], [prompt for _, prompt in kept]
