"""What metrics are called, their digits and how sure they are: on a model card, in the report, in tables. No torch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlhf.data.feedback.bias import wilson

NAMES = {
    "val_loss": "held-out loss, nats per token",
    "eval_loss": "held-out loss, nats per token",
    "base_eval_loss": "held-out loss of the base model, nats per token",
    "accuracy": "held-out ranking accuracy",
    "prompt_accuracy": "held-out ranking accuracy, averaged prompt by prompt",
    "longer_wins_accuracy": "accuracy of always preferring the longer answer (in tokens)",
    "ece": "calibration error",
    "temperature": "temperature that calibrates it best",
    "ece_after_temperature": "calibration error at that temperature",
    "chosen_mean": "score of the best answers, mean",
    "chosen_std": "score of the best answers, standard deviation",
    "rejected_mean": "score of the worst answers, mean",
    "rejected_std": "score of the worst answers, standard deviation",
    "score_mean": "what is taken from a score, so that scores have mean 0",
    "score_std": "what a score is divided by then",
    "score": "score",
    "quality": "quality by the judge",
    "sft_score": "SFT's score",
    "score_win_rate": "win rate over SFT by the score",
    "true_quality": "quality by the judge",
    "sft_true_quality": "SFT's quality by the judge",
    "win_rate": "win rate over SFT by the judge",
    "kl": "KL from SFT, nats per response",
    "eos_share": "share of answers that come to an end",
    "sft_eos_share": "SFT's share of answers that come to an end",
    "length": "tokens per answer",
    "sft_length": "SFT's tokens per answer",
    "text_perplexity": "perplexity of held-out text",
    "response_perplexity": "perplexity of held-out responses",
    "distinct_1": "distinct words (distinct-1)",
    "distinct_2": "distinct pairs of words (distinct-2)",
    "repetition": "repetition within an answer",
    "refusal_share": "share of refusals",
    "num_demonstrations": "demonstrations to train on",
    "num_rankings": "rankings",
    "num_votes": "votes",
    "num_disagreed": "rated by several who differ",
    "num_prompts": "prompts to train on",
    "num_eval_prompts": "prompts held out",
    "num_eval_pairs": "pairs held out",
    "num_tokens": "tokens trained on",
    "vocab_size": "tokens in the vocabulary",
    "num_parameters": "parameters",
    "num_non_embedding_parameters": "parameters without embeddings",
    "best_step": "step or iteration of the model that was kept",
    "num_skipped": "steps not taken, as their loss or gradient was no finite number",
    "peak_gib": "peak memory, GiB",
}
"""Final metrics and figures of an evaluation, as people call them."""
SHARES = (
    "accuracy", "prompt_accuracy", "longer_wins_accuracy", "win_rate", "score_win_rate", "eos_share", "sft_eos_share",
    "refusal_share",
)  # fmt: skip
"""Those of them that are shares of what was held out; on some hundred prompts a third digit says nothing."""


def number(value: Any) -> str:
    """A metric for people: three digits, which they can compare; `–` for what is missing."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(number, value)) or "none"
    if not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 999.5:  # three digits of which would be 1.00e+03
        return f"{value:,.0f}"
    return f"{value:.2e}" if 0 < abs(value) < 0.001 else f"{value:#.3g}".rstrip(".")


def span(values: Iterable[float]) -> str:
    """The least and the most of some numbers; one where they are equal, nothing where there are none."""
    ends = sorted(set(values))
    return " to ".join(map(number, ends[:1] + ends[1:][-1:]))


def share(value: float) -> str:
    """A share between 0 and 1, or the end of an interval of one."""
    return f"{value:.2f}"


def between(interval: tuple[float, float]) -> str:
    """An interval of shares in words."""
    return f"95\u00a0% interval {share(interval[0])} to {share(interval[1])}"


def of_share(right: float, num: int) -> tuple[float, float]:
    """The 95 % interval of a share of `num` independent trials: Wilson's (1927), and where all came out alike the exact
    one (Clopper and Pearson 1934), as in an evaluation. Ties that count half make it too wide, never too narrow."""
    if num == 0:
        return 0.0, 1.0
    if right in (0.0, 1.0):
        unseen = 1 - 0.025 ** (1 / num)
        return (0.0, unseen) if right == 0.0 else (1 - unseen, 1.0)
    return wilson(right * num, num)


def metric(value: Any, name: str) -> str:
    """A metric of this name, everywhere with the same digits: a share as in the verdicts, all else as `number`."""
    is_share = name.removeprefix("eval_") in SHARES and isinstance(value, int | float)
    return share(value) if is_share else number(value)


def named_rewards(reward_model: str | None, rewards: Sequence[Mapping[str, Any]]) -> str:
    """Where the score comes from, by the settings that say so: ppo.reward_model, or all that ppo.rewards lists."""
    if not rewards:
        return "ppo.reward_model"
    listed = ", ".join(str(spec.get("function") or spec.get("model")) for spec in rewards)
    return f"{'ppo.reward_model and ' if reward_model else ''}ppo.rewards ({listed})"
