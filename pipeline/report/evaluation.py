"""evaluation.json as the page shows it: win rates with intervals, perplexities, the frontier of score against √KL."""

import math
from collections.abc import Iterable
from typing import Any

from rlhf.pipeline.report.curves import Line
from rlhf.pipeline.report.drawing import draw_frontier
from rlhf.pipeline.report.ppo_verdict import STAGES_OWN, source
from rlhf.pipeline.report.run import MODELS, Run
from rlhf.stages.metric_names import NAMES, metric, number, share, span

FIGURES = (
    "text_perplexity", "response_perplexity", "score", "quality", "length", "eos_share", "distinct_1", "distinct_2",
    "repetition", "refusal_share", "kl",
)  # fmt: skip
"""Figures of a model, in the order of the table."""
COUNTS = {"text_perplexity": "num_text_tokens", "response_perplexity": "num_response_tokens"}
"""Over how many tokens a figure was taken."""
SAME_PERPLEXITY = 0.005
"""A change that would be shown as 0 %."""


def evaluation(run: Run) -> dict[str, Any] | None:
    """What the page shows of it; None where the run has none."""
    found = run.evaluation
    if found is None:
        return None
    models = found["models"]
    known = [key for key in FIGURES if any(_figure(model, key) is not None for model in models.values())]
    return {
        "form": found["form"],
        "settings": found["settings"],
        "judge": found["judge"],
        "source": source(found),
        "pairs": [_pair(pair) for pair in found["pairs"]],
        "models": [(MODELS[name], name) for name in models],
        "figures": [
            (_title(models, key), [metric(_figure(model, key), key) for model in models.values()]) for key in known
        ],
        "spreads": {name: model["score"]["quantiles"] for name, model in models.items() if model["score"]},
        "tasks": task_rows(models, found["tasks"] or {}),
        "tax": alignment_tax(models),
        "left_out": found["left_out"],
        "earlier": _of_an_earlier_attempt(run, models),
        "verdict": _verdict_rests_on(run),
    }


def _title(models: dict[str, Any], key: str) -> str:
    """The name of a figure, with the number of tokens that it was taken over."""
    over = span(num for model in models.values() if key in COUNTS and (num := model[COUNTS[key]]))
    return f"{NAMES[key]}, {over} tokens" if over else NAMES[key]


def _of_an_earlier_attempt(run: Run, models: dict[str, Any]) -> list[str]:
    """Folders of models that a stage made before the attempt that it is at now."""
    before = {stage.finished_before for stage in run.stages.values()}
    return [found["model"] for found in models.values() if found["model"] in before]


def _verdict_rests_on(run: Run) -> str | None:
    """Where PPO's verdict is not of these figures, of which it is."""
    if "ppo" not in run.stages:
        return None
    evidence = run.evidence
    if evidence.evaluated or not evidence.num_prompts:
        return None
    num = f"{'at least ' if evidence.at_least else ''}{number(evidence.num_prompts)} prompts"
    return f"PPO's verdict does not rest on these figures, but on those {STAGES_OWN}, of {num}."


def task_rows(models: Iterable[str], tasks: dict[str, dict[str, dict[str, float | None]]]) -> list[dict[str, Any]]:
    """A row for each metric of each task of lm-eval: `task`, `metric`, and in `cells` a text for each of `models`.

    lm-eval calls a metric `acc,none`, with the filter of the answers after the comma, and its standard error
    `acc_stderr,none`.
    """
    every = dict.fromkeys((task, key) for found in tasks.values() for task, figures in found.items() for key in figures)
    rows = []
    for task, key in every:
        name, _, way = key.partition(",")
        if name.endswith("_stderr"):
            continue
        given = [tasks.get(model, {}).get(task, {}) for model in models]
        cells = [
            _with_error(found.get(key), found.get(f"{name}_stderr,{way}" if way else f"{name}_stderr"))
            for found in given
        ]
        rows.append({"task": task, "metric": name if way in ("", "none") else f"{name} ({way})", "cells": cells})
    return rows


def _with_error(value: float | None, error: float | None) -> str:
    return number(value) if value is None or error is None else f"{number(value)} ± {number(error)}"


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
    for title, name, key in (
        ("Score", "eval_score", "score"),
        ("Quality by the judge", "eval_true_quality", "quality"),
    ):
        lines: dict[str, Line] = {}
        if ppo := _over_root_kl(curves.get("eval_kl", []), curves.get(name, [])):
            lines["PPO, evaluation by evaluation"] = ppo
        chosen = [(math.sqrt(max(found["kl"], 0.0)), found[key]) for found in best_of_n if found[key] is not None]
        if chosen:
            lines[f"best of n answers of SFT, n = {', '.join(number(found['n']) for found in best_of_n)}"] = chosen
        if sum(map(len, lines.values())) > 1:
            ends = {
                label: [f"{number(y)} at {number(x)}" for x, y in (line[0], line[-1])] for label, line in lines.items()
            }
            said = "; ".join(f"{label}: {' to '.join(both)}" for label, both in ends.items())
            title = f"{title} over √KL, nats per response"
            drawn.append({
                "title": title,
                "last": {label: line[-1][1] for label, line in lines.items()},
                "names": {label: label for label in lines},
                "what": "",
                "of_quality": key == "quality",
                "best_of_n": bool(chosen),
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
    controlled, interval = pair["length_controlled"], pair["length_controlled_interval"]
    return {
        "title": f"{MODELS[pair['one']]} over {MODELS[pair['other']]}",
        "by": {"judge": "the judge", "score": "the score"}[pair["by"]],
        "wins": pair["wins"], "ties": pair["ties"], "losses": pair["losses"],
        "win_rate": pair["win_rate"], "interval": pair["interval"],
        "at_equal_length": None if controlled is None else share(controlled)
        + (" ({} to {})".format(*map(share, interval)) if interval else ""),
    }  # fmt: skip


def _figure(model: dict[str, Any], name: str) -> Any:
    """A number; of a distribution its mean."""
    value = model[name]
    return value["mean"] if isinstance(value, dict) else value
