"""report.html: one file that shows what every stage brought; `rlhf run` and `rlhf report` write it."""

import json
import math
import re
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined

from rlhf.pipeline.charts import draw_charts, draw_histogram, draw_power_law, draw_reliability, draw_variants
from rlhf.pipeline.scaling import PowerLaw
from rlhf.pipeline.summary import duration, flat, nested, outcome, run_status
from rlhf.pipeline.sweep import read_sweep, table
from rlhf.stages.artifact import Artifact
from rlhf.stages.disk import replace_text

MAX_SAMPLES = 30
MAX_CHARACTERS = 1000  # per text in the gallery; both limits keep the page small enough to send by mail

TITLES = {"pretrain": "Pretraining", "sft": "SFT", "feedback": "Feedback", "reward": "Reward model", "ppo": "PPO"}
PURPOSES = {
    "pretrain": "A decoder learns to continue raw text.",
    "sft": "It learns to answer, from prompts with good responses.",
    "feedback": "It answers each prompt several times, and people or a judge rank the answers.",
    "reward": "A second model learns from ranked answers what people prefer: one score per response.",
    "ppo": "The SFT model is improved towards a higher score, without drifting far from where it began.",
}


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


PHASES = {
    "rollout": "sampling answers",
    "scoring": "log-probabilities, values and rewards of them",
    "update": "forward and backward passes, optimiser",
    "evaluation": "on held-out data",
    "checkpoint": "saving the training state",
}
"""What a stage's steps consist of, as metrics.jsonl names it: seconds_rollout and so on."""
LAWS = [("N", "parameters"), ("D", "tokens"), ("C", "compute")]


def render(run_dir: str | Path) -> Path:
    """Write `run_dir`/report.html from what is there, finished stages or not, and return its path.

    Raises RefusedError where `run_dir` is not the folder of a run.
    """
    run_dir = Path(run_dir)
    status = nested(run_status(run_dir))
    stages = [_stage(name, entry, run_dir) for name, entry in status["stages"].items()]
    samples = [sample for stage in stages if stage["name"] == "ppo" for sample in stage["samples"]]
    recipe = run_dir / "recipe.yaml"

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        loader=FunctionLoader(lambda name: files(__package__).joinpath(name).read_text("utf-8")),
    )  # fmt: skip
    environment.filters.update(number=_number, duration=duration, clip=_clip, percent="{:.1%}".format)
    page = environment.get_template("report.html.jinja").render(
        name=run_dir.resolve().name,
        stages=stages,
        headline=[change for stage in stages for change in stage["changes"][:1]],
        total_seconds=sum(entry["seconds"] or 0 for entry in flat(status).values()),
        rounds=_rounds(status.get("rounds", [])),
        samples=samples[:MAX_SAMPLES],
        max_samples=MAX_SAMPLES,
        gallery=_gallery(samples),
        sweep=_sweep(run_dir),
        recipe=recipe.read_text(encoding="utf-8") if recipe.exists() else None,
    )
    replace_text(run_dir / "report.html", page)
    return run_dir / "report.html"


def _stage(name: str, entry: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """Everything the page shows of one stage; `entry` is its line of the run's status."""
    metrics = dict(entry["metrics"])
    if vocab_size := metrics.get("vocab_size"):
        metrics["guessing_loss"] = math.log(vocab_size)  # the loss of a model that knows nothing
    artifact = Artifact(run_dir / entry["folder"]) if entry["folder"] else None
    rows = artifact.metrics if artifact else []
    return {
        "name": name,
        "title": TITLES[name],
        "purpose": PURPOSES[name],
        "status": entry["status"],
        "outcome": outcome(entry),
        "warnings": _warnings(metrics),
        "message": entry.get("message") if entry["status"] != "done" else None,
        "seconds": entry["seconds"],
        "folder": artifact.folder.name if artifact else None,
        "metrics": metrics,
        "changes": _changes(name, metrics),
        "manifest": artifact.manifest if artifact and artifact.sealed else {},
        "samples": artifact.samples if artifact else [],
        "card": _card(artifact) if artifact else None,
        "phases": _phases(rows),
        **draw_charts(name, [_without_phases(row) for row in rows], metrics),
    }


def _rounds(rounds: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A line per round that has begun: what was ranked, and what became of it; gains are over the round before."""
    found: list[dict[str, Any]] = []
    for number, entries in enumerate(rounds, start=1):
        feedback, reward, ppo = (entries.get(stage, {}).get("metrics", {}) for stage in ("feedback", "reward", "ppo"))
        if not feedback:
            break
        quality = ppo.get("true_quality")
        before = found[-1]["quality"] if found else ppo.get("sft_true_quality")
        found.append({
            "number": number,
            "rankings": feedback.get("num_rankings"),
            "accuracy": reward.get("accuracy"),
            "quality": quality,
            "gain": None if quality is None or before is None else quality - before,
            "win_rate": ppo.get("win_rate"),
            "kl": ppo.get("kl"),
        })  # fmt: skip
    return found


def _warnings(metrics: dict[str, Any]) -> list[str]:
    """What the final metrics say against a stage, in sentences."""
    found = []
    if metrics.get("over_optimised"):
        reason = metrics.get("over_optimised_because") or "the run went too far"
        kept = f" The policy of iteration {metrics['best_step']} was kept." if "best_step" in metrics else ""
        found.append(f"Over-optimised: {reason}.{kept}")
    if findings := metrics.get("findings"):
        named = ", ".join(name.replace("_", " ") for name in findings)
        found.append(f"Not healthy at the end: {named}.")
    if failed := metrics.get("gates_failed"):
        found.append(f"PPO does not start from it: {'; '.join(failed)}.")
    return found


def _phases(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where a stage's time went: a line per phase, a mean over the logged steps.

    The first row is left out where there are others: it holds what is compiled and warmed up once.
    """
    steps = [row["step"] for row in rows]
    spans = [max(now - before, 1) for before, now in pairwise([0, *steps])]
    spans, rows = (spans[1:], rows[1:]) if len(rows) > 1 else (spans, rows)
    seconds = {
        name: sum(span * row.get(f"seconds_{name}", 0.0) for span, row in zip(spans, rows, strict=True)) / sum(spans)
        for name in PHASES
        if any(f"seconds_{name}" in row for row in rows)
    }
    total = sum(seconds.values())

    def mean(metric: str, phase: str) -> float | None:
        """Over the time that the phase took."""
        found = [
            (row[metric], span * row[f"seconds_{phase}"])
            for span, row in zip(spans, rows, strict=True)
            if metric in row and row.get(f"seconds_{phase}")
        ]
        weight = sum(time for _, time in found)
        return sum(value * time for value, time in found) / weight if weight else None

    return [
        {
            "name": name,
            "what": PHASES[name],
            "seconds": spent,
            "share": spent / total if total else 0.0,
            "rate": mean(f"tokens_per_second_{name}", name),
            "bandwidth": mean(f"bandwidth_share_{name}", name),
            "flops": mean(f"flops_share_{name}", name),
        }
        for name, spent in seconds.items()
    ]


def _without_phases(row: dict[str, Any]) -> dict[str, Any]:
    """A row of metrics without the figures of phases, which have a table."""
    return {name: value for name, value in row.items() if not re.match("(seconds|tokens_per_second)_", name)}


def _card(artifact: Artifact) -> dict[str, Any] | None:
    """The report card of a reward model with its drawings; None for a stage that has none, or not yet."""
    path, worst = artifact.folder / "card.json", artifact.folder / "worst_pairs.jsonl"
    if not artifact.sealed or not path.is_file():
        return None
    card: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    groups = {"length": card["by_length"], "margin": card["by_margin"], "source": card["by_source"]}
    return card | {
        "figures": artifact.manifest["metrics"],
        "groups": {title: found for title, found in groups.items() if found},
        "worst": [json.loads(line) for line in worst.read_text(encoding="utf-8").splitlines()],
        "reliability_svg": draw_reliability(card),
        "histogram_svg": draw_histogram(card),
    }


def _changes(stage: str, metrics: dict[str, Any]) -> list[dict[str, Any]]:
    """The final metrics that say most, those that are there, each with its verdict."""
    shown = []
    for change in CHANGES[stage]:
        after, before = metrics.get(change.after), metrics.get(change.before or "")
        if after is None:
            continue
        gain = 0 if before is None else change.better * ((after > before) - (after < before))
        verdict = {1: "better", -1: "worse", 0: ""}[gain]
        shown.append({"spec": change, "stage": TITLES[stage], "before": before, "after": after, "verdict": verdict})
    return shown


def _gallery(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """How often PPO's answer is better, over all samples and not only those shown."""
    judged = all("sft_quality" in sample and "ppo_quality" in sample for sample in samples)
    kind = "quality" if judged else "score"
    pairs = [(sample[f"sft_{kind}"], sample[f"ppo_{kind}"]) for sample in samples]
    return {
        "count": len(samples),
        "judged": judged,
        "better": sum(ppo > sft for sft, ppo in pairs),
        "worse": sum(ppo < sft for sft, ppo in pairs),
    }


def _sweep(run_dir: Path) -> dict[str, Any] | None:
    """The table of the run's last sweep with its drawings; None where there was none."""
    found = read_sweep(run_dir)
    rows = found["rows"]
    if not rows:
        return None
    finished = sorted((row for row in rows if row["val_loss"] is not None), key=lambda row: row["val_loss"])
    curves = [(row["name"], _val_losses(Artifact(run_dir / row["folder"])), row["val_loss"]) for row in finished]
    curves = [curve for curve in curves if curve[1]]
    return {
        "rows": rows,
        "table": table(rows),
        "failed": [row for row in rows if row["error"] is not None],
        "vocabularies": len({row["vocab_size"] for row in finished}),
        "curves": curves if len(curves) <= 3 else [curves[0], curves[-1]],
        "others": len(curves) - 2 if len(curves) > 3 else 0,
        "curves_svg": draw_variants([line for _, line, _ in curves], 0, len(curves) - 1) if curves else None,
        "laws": [_law(symbol, found["scaling"][name]) for symbol, name in LAWS if found["scaling"]],
    }


def _val_losses(artifact: Artifact) -> list[tuple[float, float]]:
    losses = {row["step"]: row["val_loss"] for row in artifact.metrics if math.isfinite(row.get("val_loss", math.nan))}
    return sorted(losses.items())


def _law(symbol: str, part: dict[str, Any]) -> dict[str, Any]:
    """A power law with its formula and its drawing."""
    law = PowerLaw(**part["fit"]) if part["fit"] else None
    power = math.floor(law.log10_constant) if law else 0
    return {
        "symbol": symbol,
        "count": len(part["points"]),
        "law": law,
        "constant": 10 ** (law.log10_constant - power) if law else None,
        "power": power,
        "svg": draw_power_law(part["points"], law, f"law {symbol}") if part["points"] else "",
    }


def _number(value: Any) -> str:
    """A metric for people: three digits, which they can compare; `–` for what is missing."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_number, value)) or "none"
    if not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2e}" if 0 < abs(value) < 0.001 else f"{value:#.3g}".rstrip(".")


def _clip(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else text[:MAX_CHARACTERS] + " …"
