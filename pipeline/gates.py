"""Bars that a reward model must pass before PPO is worth its time. They judge a result and are no part of it."""

from collections.abc import Mapping
from typing import Any

from rlhf.stages.reward.config import RewardSettings

_CURE = (
    "PPO would learn its mistakes. Try more rankings or more epochs, labels with less noise (judge_noise, or look at "
    "the pairs it is most wrong about), a larger backbone; `rlhf data check PATH --as preferences` shows what the data "
    "is like. Or lower the bar: nothing is trained again for that"
)


def failures(settings: RewardSettings, metrics: Mapping[str, Any]) -> list[str]:
    """A sentence with figure and bar for each gate that the reward model's final metrics fail."""
    found = []
    if (bar := settings.min_accuracy) is not None and _below(accuracy := metrics["accuracy"], bar):
        found.append(f"held-out accuracy {accuracy:.4g} is below reward.min_accuracy {bar:g}")
    if (bar := settings.min_over_longer_wins) is not None:
        accuracy, baseline = metrics["accuracy"], metrics["longer_wins_accuracy"]
        if _below(lead := accuracy - baseline, bar):
            found.append(
                f"held-out accuracy {accuracy:.4g} is {lead:.4g} above longer_wins_accuracy {baseline:.4g}, "
                f"less than reward.min_over_longer_wins {bar:g}"
            )
    return found


def refusal(failed: list[str], report: str) -> str:
    """Why the run ends before ppo, and what to do about it."""
    return f"ppo: not started, the reward model is not good enough: {'; '.join(failed)} ({report} shows more). {_CURE}"


def _below(value: float, bar: float) -> bool:
    return value < bar - 1e-9  # 0.6 - 0.5 is a little less than 0.1
