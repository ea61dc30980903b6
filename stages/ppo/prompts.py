"""The prompts of PPO: read, split by prompt, tokenised."""

from transformers import PreTrainedTokenizerBase

from rlhf.data.errors import DataError
from rlhf.data.rows import Prompt, prompt_key, read_prompts
from rlhf.data.tokens import encode_prompt
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.runtime import Runtime


def read_rows(run: Runtime[PPOSettings]) -> tuple[list[Prompt], list[Prompt]]:
    """Training and held-out prompts, each once."""
    settings = run.settings
    loaded = read_prompts(settings.data, settings.max_dropped)
    run.count_report("data", loaded.report)
    given = None
    if settings.eval_data:
        held_out = read_prompts(settings.eval_data, settings.max_dropped)
        run.count_report("eval_data", held_out.report)
        given = held_out.rows
    return run.split(loaded.rows, given, lambda prompt: prompt_key(prompt.messages))


def encode_prompts(
    run: Runtime[PPOSettings], tokenizer: PreTrainedTokenizerBase, prompts: list[Prompt]
) -> tuple[list[list[int]], list[Prompt]]:
    """Token ids of the prompts that fit, and those prompts; the others are counted aloud."""
    longest = run.settings.max_prompt_length
    pairs = [(encode_prompt(tokenizer, prompt.messages), prompt) for prompt in prompts]
    kept = [(ids, prompt) for ids, prompt in pairs if len(ids) <= longest]
    run.count_rows("tokenised", len(kept), len(pairs), {"longer than max_prompt_length": len(pairs) - len(kept)})
    if len(kept) < len(pairs):
        run.say(
            f"{len(pairs) - len(kept)} of {len(pairs)} prompts are longer than max_prompt_length {longest}; left out"
        )
    if not kept:
        raise DataError(f"ppo.max_prompt_length: none of {len(pairs)} prompts fits in {longest} tokens; raise it")
    return [ids for ids, _ in kept], [prompt for _, prompt in kept]
