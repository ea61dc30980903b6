"""Which metrics of a stage share a chart, and what each chart says in words."""

from dataclasses import dataclass
from typing import Any

from rlhf.pipeline.report.curves import Line
from rlhf.pipeline.report.drawing import draw_lines
from rlhf.stages.metric_names import number


@dataclass(frozen=True)
class Chart:
    """Metrics that share an axis, and a metric of what came before, drawn as a level to compare with."""

    title: str
    metrics: tuple[str, ...]
    level: str | None = None
    level_name: str = ""


_RATES = [
    Chart("Gradient norm, before clipping", ("grad_norm",)),
    Chart("Learning rate", ("learning_rate", "muon_learning_rate")),
]
CHARTS = {
    "pretrain": [Chart("Loss, nats per token", ("loss", "val_loss"), "guessing_loss", "guessing"), *_RATES],
    "sft": [Chart("Loss, nats per token", ("loss", "eval_loss"), "base_eval_loss", "base model"), *_RATES],
    "feedback": [],
    "reward": [
        Chart("Ranking loss", ("loss",)),
        Chart("Held-out ranking accuracy", ("accuracy",), "longer_wins_accuracy", "longer wins (in tokens)"),
        *_RATES,
    ],
    # The names of an evaluation on held-out prompts begin with eval_; the others are of the training episodes.
    "ppo": [
        Chart("Quality by the judge", ("eval_true_quality",), "sft_true_quality", "SFT"),
        Chart("Score", ("score", "eval_score"), "sft_score", "SFT"),
        Chart("KL from SFT, nats per response", ("kl", "eval_kl")),
        Chart("Length, tokens", ("length", "eval_length"), "sft_length", "SFT"),
        Chart("Entropy, nats per token", ("entropy",)),
        Chart("Share of answers that come to an end", ("eos_share", "eval_eos_share"), "sft_eos_share", "SFT"),
        Chart("Share of tokens whose ratio is clipped", ("clip_fraction",)),
        Chart("The critic's explained variance", ("explained_variance",)),
        Chart("Gradient norms, before clipping", ("policy_grad_norm", "critic_grad_norm")),
        Chart("Learning rate", ("learning_rate",)),
    ],
}

_LINES = {
    "learning_rate": "learning rate", "muon_learning_rate": "of Muon", "policy_grad_norm": "policy",
    "critic_grad_norm": "critic", "accuracy": "held out",
}  # fmt: skip
"""What a line of CHARTS is called, where it is not of training, nor by its name of an evaluation."""

MEANINGS = {
    "approx_kl": "how far an iteration's updates moved the policy, nats per token; below 0.02 is usual",
    "approx_kl_k3": "the same by another estimate, which is never negative",
    "dual_clip_fraction": "share of tokens held back by ppo.dual_clip",
    "eval_score_win_rate": "at this step, share of held-out answers with a higher score than SFT's; ties count half",
    "eval_win_rate": "at this step, share of held-out answers that the judge prefers to SFT's; ties count half",
    "importance_weight": "mean weight by which tokens of another law than the policy's are corrected; near 1 is good",
    "kl_coef": "price of a nat of KL in the reward",
    "kl_loss": "the KL's part of the loss (ppo.kl_in: loss)",
    "kl_per_token": "KL from SFT, nats per token",
    "length_max": "tokens of the longest answer",
    "lm_loss": "loss of language modelling on the best answers (reward.lm_coef), nats per token",
    "mean_token_accuracy": "share of tokens that are the likeliest one",
    "mfu": "share of the device's peak operations that was reached",
    "non_score_reward": "the KL's part of the reward, per answer",
    "num_skipped": "steps so far that were not taken, as their loss or gradient was no finite number",
    "num_updates": "optimiser steps of an iteration; fewer where ppo.target_kl ended it early",
    "peak_gib": "most memory that was in use, GiB",
    "policy_loss": "the clipped objective with its sign turned; its height says nothing by itself",
    "ptx_loss": "loss on pretraining text, nats per token",
    "ratio": "mean of new over old probability of a token; 1, give or take 0.003",
    "ratio_max": "the largest of them",
    "ratio_min": "the smallest of them",
    "ratio_var": "their variance",
    "return_mean": "mean of what the critic is to predict",
    "rlhf_reward": "score, penalties and KL together, per answer: what PPO maximises",
    "sampler_gap": "how far the sampler's log-probabilities are from the trainer's, nats per token; near 0 is right",
    "score_std": "how much the scores of an iteration's answers differ; near 0 there is nothing to learn",
    "staleness": "updates between the policy that sampled and the one that learns",
    "tokens_per_second": "speed",
    "value_clip_fraction": "share of values that moved further than the critic's clip range allows",
    "value_loss": "the critic's squared error",
    "value_mean": "mean of what the critic predicts",
}
"""What the other metrics say, in a line each."""


def line_name(metric: str) -> str:
    """What the line of a metric is called in a chart of CHARTS."""
    return _LINES.get(metric, "held out" if metric.startswith(("eval_", "val_")) else "training")


def meaning(metric: str) -> str:
    """Of a metric that no chart of CHARTS shows; empty where nobody has said."""
    if metric.startswith("score_") and metric not in MEANINGS:
        return "mean of one of the rewards alone, unweighted"
    return MEANINGS.get(metric, "")


def draw_charts(stage: str, curves: dict[str, Line], final: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """`charts`: the known ones; `more_charts`: every other number that was logged, one each.

    `final` are the stage's final metrics: levels come from there, or from the curves of a stage that is not finished.
    A drawing's `what` says what its metric means, where its title does not.
    """
    levels = {name.removeprefix("eval_"): line[-1][1] for name, line in curves.items()} | final
    known = {metric for chart in CHARTS[stage] for metric in chart.metrics}
    known |= {name for name in curves if name.startswith("eval_sft_")}  # levels, not curves
    known.add("num_tokens")  # a straight line
    others = [Chart(name.replace("_", " "), (name,)) for name in sorted(curves) if name not in known]

    def draw(chart: Chart) -> dict[str, Any]:
        lines = {name: curves[name] for name in chart.metrics if name in curves}
        names = {name: line_name(name) if name in known else name for name in lines}
        level = levels.get(chart.level or "")
        return {
            "title": chart.title,
            "names": names,
            "level": level,
            "level_metric": chart.level,
            "level_name": chart.level_name,
            "what": "" if chart.metrics[0] in known else meaning(chart.metrics[0]),
            "last": {name: line[-1][1] for name, line in lines.items()},
            "svg": draw_lines(
                list(lines.values()), level, in_words(chart.title, {names[name]: line for name, line in lines.items()})
            ),
        }

    return {
        "charts": [draw(chart) for chart in CHARTS[stage] if curves.keys() & set(chart.metrics)],
        "more_charts": [draw(chart) for chart in others],
    }


def in_words(title: str, lines: dict[str, Line]) -> str:
    """What lines over steps show, for those who do not see them."""
    said = []
    for name, line in lines.items():
        values = [value for _, value in line]
        said.append(
            f"{name} from {number(values[0])} at step {number(line[0][0])} to {number(values[-1])} at step "
            f"{number(line[-1][0])}, between {number(min(values))} and {number(max(values))}"
        )
    return f"{title}: {'; '.join(said)}"
