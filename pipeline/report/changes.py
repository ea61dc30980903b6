"""The final metrics that say most of a stage, each beside what it is held against."""

from dataclasses import dataclass
from typing import Any

from rlhf.pipeline.report.run import TITLES


@dataclass(frozen=True)
class Change:
    """A final metric and what it is held against; both are names of metrics."""

    label: str
    before: str | None
    after: str
    versus: str
    better: int  # 1: higher is better, -1: lower is better, 0: neither


CHANGES = {
    "pretrain": [Change("held-out loss, nats per token", "guessing_loss", "val_loss", "against guessing", -1)],
    "sft": [Change("held-out loss, nats per token", "base_eval_loss", "eval_loss", "against the base model", -1)],
    "feedback": [
        Change("prompts with ranked answers", None, "num_rankings", "of all rounds so far", 0),
        Change("rated by several who differ", None, "num_disagreed", "resolved by the rule", 0),
    ],
    "reward": [Change("held-out ranking accuracy", "longer_wins_accuracy", "accuracy", "against “longer wins”", 1)],
    "ppo": [
        Change("true quality", "sft_true_quality", "true_quality", "against SFT", 1),
        Change("score", "sft_score", "score", "against SFT", 1),
        Change("win rate over SFT", None, "win_rate", "ties count half", 0),
        Change("answers that come to an end", "sft_eos_share", "eos_share", "against SFT", 1),
        Change("KL from SFT", None, "kl", "nats per response", 0),
    ],
}


def changes(stage: str, metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that are there, each with whether it got better."""
    shown = []
    for change in CHANGES[stage]:
        after, before = metrics.get(change.after), metrics.get(change.before or "")
        if after is None:
            continue
        gain = 0 if before is None else change.better * ((after > before) - (after < before))
        verdict = {1: "better", -1: "worse", 0: ""}[gain]
        shown.append({"spec": change, "stage": TITLES[stage], "before": before, "after": after, "verdict": verdict})
    return shown
