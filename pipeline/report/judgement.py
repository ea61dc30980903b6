"""What is said of each stage of a run: its verdict, and its main metrics beside what they are held against."""

from dataclasses import dataclass
from typing import Any, Literal

from rlhf.pipeline.report import verdicts
from rlhf.pipeline.report.figures import wilson
from rlhf.pipeline.report.ppo_verdict import ppo
from rlhf.pipeline.report.run import Run, Stage
from rlhf.pipeline.report.verdicts import Verdict
from rlhf.stages.metric_names import NAMES

SIGNS = {"good": "✓", "bad": "✗", "doubtful": "!", "open": "?"}
"""By the tone of a verdict."""


def judge_run(run: Run) -> dict[str, Verdict]:
    """A verdict for each stage, in the order of stages."""
    found: dict[str, Verdict] = {}
    for name, stage in run.stages.items():
        if not stage.done:
            step, steps = stage.entry.get("step"), stage.entry.get("steps")
            found[name] = verdicts.unfinished(stage.title, stage.status, stage.message, step, steps)
        elif name == "pretrain":
            found[name] = verdicts.pretrain(stage.metrics, stage.curves)
        elif name == "sft":
            found[name] = verdicts.sft(stage.metrics, stage.curves)
        elif name == "feedback":
            found[name] = verdicts.feedback(stage.metrics)
        elif name == "reward":
            found[name] = verdicts.reward(stage.metrics, stage.card)
        else:
            reward = found.get("reward") if _learned_from(run) else None
            found[name] = ppo(stage.metrics, stage.curves, reward, run.evidence)
    return found


def _learned_from(run: Run) -> bool:
    """Whether PPO was paid by the run's own reward model, and not by one from elsewhere."""
    reward = run.stages.get("reward")
    given = run.stages["ppo"].manifest.get("inputs", {}).get("reward_model")
    if reward is None or reward.artifact is None or not reward.manifest or given is None:
        return reward is not None and given is None
    return bool(reward.artifact.digest == given)


@dataclass(frozen=True)
class Change:
    """A final metric and what it is held against; both are names of metrics."""

    before: str | None
    after: str
    versus: str = ""
    better: Literal[1, -1, 0] = 0
    """1: higher is better, -1: lower is better, 0: neither."""
    is_share: bool = False
    """Whether both are shares of the held-out prompts."""
    win_rate: str | None = None
    """The metric that says how often the one is above the other."""

    @property
    def label(self) -> str:
        return NAMES[self.after]


CHANGES = {
    "pretrain": [Change("guessing_loss", "val_loss", "against guessing", -1)],
    "sft": [Change("base_eval_loss", "eval_loss", "against the base model", -1)],
    "feedback": [
        Change(None, "num_rankings", "of all rounds so far"),
        Change(None, "num_disagreed", "resolved by the rule"),
    ],
    "reward": [Change("longer_wins_accuracy", "accuracy", "against “longer wins”", 1, True)],
    "ppo": [
        Change("sft_true_quality", "true_quality", "against SFT", 1, win_rate="win_rate"),
        Change("sft_score", "score", "against SFT", 1, win_rate="score_win_rate"),
        Change(None, "win_rate", "ties count half"),
        Change("sft_eos_share", "eos_share", "against SFT", 1, True),
        Change(None, "kl"),
    ],
}


def changes(stage: Stage) -> list[dict[str, Any]]:
    """Those of its metrics that are there, each with whether it got better."""
    metrics, shown = stage.metrics, []
    for change in CHANGES[stage.name]:
        after, before = metrics.get(change.after), metrics.get(change.before or "")
        if after is None:
            continue
        verdict = "" if before is None else _direction(change, before, after, metrics)
        prompts = metrics.get("num_eval_prompts")  # none where it is text that is held out
        shown.append({
            "spec": change, "stage": stage.title, "before": before, "after": after, "verdict": verdict,
            "prompts": prompts,
        })  # fmt: skip
    return shown


def _direction(change: Change, before: float, after: float, metrics: dict[str, Any]) -> str:
    """`better`, `worse`, or that there are too few prompts to tell; empty where neither is better.

    Shares differ where their intervals lie apart, which asks for more than is needed, as both are of the same prompts.
    """
    gain = change.better * ((after > before) - (after < before))
    if gain == 0:
        return ""
    num, rate = metrics.get("num_eval_prompts"), metrics.get(change.win_rate or "")
    if num and change.is_share:
        (low, high), (other_low, other_high) = wilson(after, num), wilson(before, num)
        open_ = low <= other_high and other_low <= high
    else:
        open_ = bool(num and rate is not None and wilson(rate, num)[0] <= 0.5 <= wilson(rate, num)[1])
    return "too few to tell" if open_ else "better" if gain > 0 else "worse"
