"""evaluation.json as the page shows it: win rates with intervals, perplexities, the frontier of score against √KL."""

import math
from typing import Any

from rlhf.pipeline.report.curves import Line
from rlhf.pipeline.report.drawing import draw_frontier
from rlhf.pipeline.report.figures import number
from rlhf.pipeline.report.run import MODELS, Run

FIGURES = {
    "text_perplexity": "perplexity of held-out text", "response_perplexity": "perplexity of held-out responses",
    "score": "score", "quality": "true quality", "length": "tokens", "eos_share": "share that come to an end",
    "distinct_1": "distinct-1", "distinct_2": "distinct-2", "repetition": "repetition",
    "refusal_share": "share of refusals", "kl": "KL from SFT, nats per response",
}  # fmt: skip
"""Figures of a model, each with its name for people."""
SAME_PERPLEXITY = 0.005
"""A change that would be shown as 0 %."""


def evaluation(run: Run) -> dict[str, Any] | None:
    """What the page shows of it; None where the run has none."""
    found = run.evaluation
    if found is None:
        return None
    models = found["models"]
    figures = [(title, [_figure(model, key) for model in models.values()]) for key, title in FIGURES.items()]
    return {
        "form": found["form"],
        "settings": found["settings"],
        "judge": found["judge"],
        "pairs": [_pair(pair) for pair in found["pairs"]],
        "models": [(MODELS[name], name) for name in models],
        "figures": [(title, values) for title, values in figures if any(value is not None for value in values)],
        "spreads": {name: model["score"]["quantiles"] for name, model in models.items() if model["score"]},
        "tasks": {name: results for name, results in (found["tasks"] or {}).items() if results},
        "tax": alignment_tax(models),
    }


def alignment_tax(models: dict[str, Any]) -> str | None:
    """What PPO cost in perplexity of held-out text, against SFT, in words."""
    if not {"sft", "ppo"} <= models.keys():
        return None
    before, after = models["sft"]["text_perplexity"], models["ppo"]["text_perplexity"]
    if not before or not after:
        return None
    change = after / before - 1
    if abs(change) < SAME_PERPLEXITY:
        return f"PPO left the perplexity of held-out text as it was ({number(after)})."
    word = "raised" if change > 0 else "lowered"
    return f"PPO {word} the perplexity of held-out text from {number(before)} to {number(after)} ({change:+.0%})."


def frontier(run: Run) -> list[dict[str, Any]]:
    """Drawings of score and of quality over √KL, with the legend of each: PPO's evaluations, and best-of-n of SFT."""
    curves = run.stages["ppo"].curves if "ppo" in run.stages else {}
    best_of_n = (run.evaluation["best_of_n"] if run.evaluation else None) or []
    drawn = []
    for title, metric, key in (("Score", "eval_score", "score"), ("True quality", "eval_true_quality", "quality")):
        lines: dict[str, Line] = {}
        if ppo := _over_root_kl(curves.get("eval_kl", []), curves.get(metric, [])):
            lines["PPO, evaluation by evaluation"] = ppo
        chosen = [(math.sqrt(max(found["kl"], 0.0)), found[key]) for found in best_of_n if found[key] is not None]
        if chosen:
            lines[f"best of n answers of SFT, n = {', '.join(number(found['n']) for found in best_of_n)}"] = chosen
        if sum(map(len, lines.values())) > 1:
            ends = {
                name: [f"{number(y)} at {number(x)}" for x, y in (line[0], line[-1])] for name, line in lines.items()
            }
            said = "; ".join(f"{name}: {' to '.join(both)}" for name, both in ends.items())
            title = f"{title} over √KL, nats per response"
            drawn.append({
                "title": title,
                "last": {name: line[-1][1] for name, line in lines.items()},
                "level": None,
                "level_name": "",
                "svg": draw_frontier(lines, f"{title}. {said}"),
            })  # fmt: skip
    return drawn


def _over_root_kl(kls: Line, values: Line) -> Line:
    """The two lines as one; PPO begins as SFT, at KL 0."""
    at = dict(kls) | ({0: 0.0} if kls else {})
    return [(math.sqrt(max(at[step], 0.0)), value) for step, value in values if step in at]


def _pair(pair: dict[str, Any]) -> dict[str, Any]:
    return {
        "title": f"{MODELS[pair['one']]} over {MODELS[pair['other']]}",
        "by": {"judge": "the judge", "score": "the reward model"}[pair["by"]],
        "wins": pair["wins"], "ties": pair["ties"], "losses": pair["losses"],
        "rates": [
            (name, pair[rate], pair[interval])
            for name, rate, interval in (
                ("all answers", "win_rate", "interval"),
                ("at equal length", "length_controlled", "length_controlled_interval"),
            )
            if pair[rate] is not None and pair[interval] is not None
        ],
    }  # fmt: skip


def _figure(model: dict[str, Any], name: str) -> Any:
    """A number; of a distribution its mean."""
    value = model[name]
    return value["mean"] if isinstance(value, dict) else value
