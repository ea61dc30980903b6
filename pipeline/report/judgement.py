"""What is said of each stage of a run: its verdict, and its main metrics beside what they are held against."""

from dataclasses import dataclass
from typing import Any

from rlhf.pipeline.report import verdicts
from rlhf.pipeline.report.ppo_verdict import STAGES_OWN, ppo, source
from rlhf.pipeline.report.run import Run, Stage
from rlhf.pipeline.report.verdicts import Verdict
from rlhf.stages.metric_names import NAMES, number, of_share

SIGNS = {"good": "✓", "bad": "✗", "doubtful": "!", "open": "?"}
"""By the tone of a verdict."""


def judge_run(run: Run) -> dict[str, Verdict]:
    """A verdict for each stage, in the order of stages."""
    found: dict[str, Verdict] = {}
    for name, stage in run.stages.items():
        if stage.missing:
            found[name] = verdicts.missing(stage.title, stage.missing)
        elif not stage.done:
            step, steps = stage.entry.get("step"), stage.entry.get("steps")
            found[name] = verdicts.unfinished(stage.title, stage.status, stage.message, step, steps)
        elif name == "pretrain":
            found[name] = verdicts.pretrain(stage.metrics, stage.curves)
        elif name == "sft":
            found[name] = verdicts.sft(stage.metrics, stage.curves, _ended(run))
        elif name == "feedback":
            found[name] = verdicts.feedback(stage.metrics)
        elif name == "reward":
            found[name] = verdicts.reward(stage.metrics, stage.card)
        else:
            reward = found.get("reward") if _learned_from(run) else None
            found[name] = ppo(stage.metrics, stage.curves, reward, run.evidence)
    return found


def _ended(run: Run) -> tuple[float, str] | None:
    """The share of SFT's answers that come to an end, and by whom and on how much it was taken: as in PPO's list. None
    too where it may as well be half of them, for all that so few prompts tell."""
    own, figures = run.metrics("ppo"), run.evaluation
    if "sft_eos_share" in own and not run.evidence.evaluated:
        ended, num, words = own["sft_eos_share"], own.get("num_eval_prompts"), _measured(own, STAGES_OWN)
    elif figures is None or (ended := figures["models"].get("sft", {}).get("eos_share")) is None:
        return None
    else:
        num = figures["settings"]["num_prompts"]
        words = _measured({"num_eval_prompts": num}, source(figures))
    return None if num and of_share(ended, num)[1] >= 0.5 else (ended, words)


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
    higher_is_better: bool = False
    """Whether that is said beside the figures; a stage's first figure has the stage's verdict beside it."""
    is_share: bool = False
    """Whether both are shares of the held-out prompts."""
    win_rate: str | None = None
    """The metric that says how often the one is above the other."""

    @property
    def label(self) -> str:
        return NAMES[self.after]


CHANGES = {
    "pretrain": [Change("guessing_loss", "val_loss", "against guessing")],
    "sft": [Change("base_eval_loss", "eval_loss", "against the base model")],
    "feedback": [
        Change(None, "num_rankings", "of all rounds so far"),
        Change(None, "num_disagreed", "resolved by the rule"),
    ],
    "reward": [Change("longer_wins_accuracy", "accuracy", "against “longer wins” (in tokens)")],
    "ppo": [
        Change("sft_true_quality", "true_quality", "against SFT", True, win_rate="win_rate"),
        Change("sft_score", "score", "against SFT", True, win_rate="score_win_rate"),
        Change(None, "win_rate", "ties count half"),
        Change(None, "score_win_rate", "ties count half"),
        Change("sft_eos_share", "eos_share", "against SFT", True, True),
        Change(None, "kl"),
    ],
}


def changes(stage: Stage, run: Run) -> list[dict[str, Any]]:
    """Those of its metrics that are there, each with whether it got better: PPO's by what its verdict rests on, so that
    no second figure stands beside it."""
    of_evaluation = stage.name == "ppo" and stage.done and run.evidence.evaluated
    metrics, shown = _evaluated(run) if of_evaluation else stage.metrics, []
    by = run.evidence.source if stage.name == "ppo" else ""
    for change in CHANGES[stage.name]:
        after, before = metrics.get(change.after), metrics.get(change.before or "")
        if after is None:
            continue
        verdict = "" if before is None else _direction(change, before, after, metrics)
        shown.append({
            "spec": change, "stage": stage, "before": before, "after": after, "verdict": verdict,
            "measured": _measured(metrics, by),
        })  # fmt: skip
    return shown


def _evaluated(run: Run) -> dict[str, Any]:
    """The metrics of PPO's changes as the run's evaluation has them."""
    assert run.evaluation is not None
    found: dict[str, Any] = {"num_eval_prompts": run.evidence.num_prompts}
    for name, prefix in (("sft", "sft_"), ("ppo", "")):
        figures = run.evaluation["models"].get(name) or {}
        quality, score = ((figures.get(key) or {}).get("mean") for key in ("quality", "score"))
        found |= {f"{prefix}true_quality": quality, f"{prefix}score": score}
        found |= {f"{prefix}eos_share": figures.get("eos_share"), f"{prefix}kl": figures.get("kl")}
    for pair in run.evaluation["pairs"]:
        if (pair["one"], pair["other"]) == ("ppo", "sft"):
            found["win_rate" if pair["by"] == "judge" else "score_win_rate"] = pair["win_rate"]
    return found


def _measured(metrics: dict[str, Any], by: str) -> str:
    """By whom, and on how much, figures were taken; empty where it is text that is held out."""
    num = metrics.get("num_eval_prompts")
    return ", ".join(part for part in (f"{number(num)} prompts" if num else "", by) if part)


def _direction(change: Change, before: float, after: float, metrics: dict[str, Any]) -> str:
    """`better`, `worse`, or that there are too few prompts to tell; empty where neither is better.

    Shares differ where their intervals lie apart, which asks for more than is needed, as both are of the same prompts.
    """
    if not change.higher_is_better or after == before:
        return ""
    num, rate = metrics.get("num_eval_prompts"), metrics.get(change.win_rate or "")
    if num and change.is_share:
        (low, high), (other_low, other_high) = of_share(after, num), of_share(before, num)
        open_ = low <= other_high and other_low <= high
    else:
        open_ = bool(num and rate is not None and of_share(rate, num)[0] <= 0.5 <= of_share(rate, num)[1])
    return "too few to tell" if open_ else "better" if after > before else "worse"
