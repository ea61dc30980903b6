"""What a run was made of and what it took: data, time, memory, tokens, lineage, and the commands that make it again."""

import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlhf.pipeline.report.run import Run, Stage
from rlhf.stages.metric_names import NAMES

PHASES = {
    "rollout": "sampling answers",
    "scoring": "log-probabilities, values and rewards of them",
    "update": "forward and backward passes, optimiser",
    "evaluation": "on held-out data",
    "checkpoint": "saving the training state",
}
"""What a stage's steps consist of, as metrics.jsonl names it: seconds_rollout and so on."""
COUNTS = ("num_demonstrations", "num_rankings", "num_votes", "num_prompts", "num_eval_prompts", "num_eval_pairs")
"""Final metrics that count data."""


def data(stage: Stage) -> dict[str, Any] | None:
    """What a stage read, kept and left out; None where it says nothing of data.

    `sources` have `name`, `path`, `kept`, `of`, and `left_out`: numbers of rows by reason.
    """
    counts = [(NAMES[name], stage.metrics[name]) for name in COUNTS if stage.metrics.get(name) is not None]
    sources = [_corpus_source(part) for part in stage.corpus.get("sources", [])]
    sources += [{"name": name, **found} for name, found in stage.manifest.get("rows", {}).items()]
    digests = stage.manifest.get("data", {})
    return {"counts": counts, "sources": sources, "digests": digests} if counts or sources or digests else None


def _corpus_source(part: dict[str, Any]) -> dict[str, Any]:
    """One of pretraining's, whose documents are counted apart from the rows that hold them."""
    unusable = part.get("unusable_rows", {})
    left_out = unusable | {reason: found for reason, found in part.get("left_out", {}).items() if found}
    gone = sum(left_out.values())
    kept = part["documents"]
    return {
        "name": part["name"], "path": part["path"], "kept": kept, "of": kept + gone, "left_out": left_out,
        "tokens": part.get("tokens"), "held_out_tokens": part.get("held_out_tokens"),
    }  # fmt: skip


def costs(run: Run, price_per_hour: float | None) -> list[dict[str, Any]]:
    """A line per stage: seconds of wall time, hours of processes, peak memory in GiB, tokens, with a price its cost."""
    return [
        _cost(stage, price_per_hour)
        for stage in run.stages.values()
        if stage.rows or stage.entry["seconds"] is not None
    ]


def _cost(stage: Stage, price_per_hour: float | None) -> dict[str, Any]:
    processes = stage.manifest.get("made_with", {}).get("processes")
    seconds = stage.entry["seconds"]
    peaks = [row["peak_gib"] for row in stage.rows if "peak_gib" in row]
    return {
        "title": stage.title,
        "seconds": seconds,
        "processes": processes,
        "device_hours": None if seconds is None or processes is None else seconds * processes / 3600,
        "peak_gib": stage.metrics.get("peak_gib") or max(peaks, default=None),
        "tokens": tokens(stage),
        "rate": stage.curves["tokens_per_second"][-1][1] if "tokens_per_second" in stage.curves else None,
        "price": None if seconds is None or price_per_hour is None else seconds / 3600 * price_per_hour,
    }


def tokens(stage: Stage) -> float | None:
    """Tokens that it trained on (PPO: that it sampled), a repeated one each time; None where the log does not tell."""
    if line := stage.curves.get("num_tokens"):
        return line[-1][1]
    size, lengths = stage.manifest.get("settings", {}).get("rollout_batch_size"), stage.curves.get("length")
    if not size or not lengths:
        return None
    steps = [step for step, _ in lengths]
    return sum(
        size * value * (now - before) for (_, value), before, now in zip(lengths, [0, *steps], steps, strict=False)
    )


def phases(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
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
            "bound": _bound(mean(f"bandwidth_share_{name}", name), mean(f"flops_share_{name}", name)),
        }
        for name, spent in seconds.items()
    ]


def _bound(bandwidth: float | None, flops: float | None) -> str | None:
    """How near a phase came to what the device can do, in words."""
    if bandwidth is None:
        return None if flops is None else f"{flops:.1%} FLOP/s"
    return f"{bandwidth:.1%} bandwidth"


def is_of_phases(name: str) -> bool:
    """Whether a metric is in the table of phases, and needs no curve."""
    return re.match("(seconds|tokens_per_second|bandwidth_share|flops_share)_", name) is not None


def lineage(run: Run) -> list[dict[str, Any]]:
    """What each finished stage was made from: key, digests of models and data, with what, and how to make it again."""
    return [
        {
            "name": stage.name,
            "title": stage.title,
            "folder": stage.folder,
            "key": stage.manifest.get("key"),
            "inputs": {
                name: (digest, _maker(run, digest)) for name, digest in stage.manifest.get("inputs", {}).items()
            },
            "data": stage.manifest.get("data", {}),
            "model": stage.artifact.digest if stage.artifact and stage.manifest else None,
            "made_with": stage.manifest.get("made_with", {}),
            "commands": commands(run, stage),
        }
        for stage in run.stages.values()
        if stage.manifest
    ]


def _maker(run: Run, digest: str) -> str | None:
    """The stage of this run whose model has the digest."""
    for stage in run.stages.values():
        if stage.artifact and stage.manifest and stage.artifact.digest == digest:
            return stage.folder
    return None


def commands(run: Run, stage: Stage) -> list[tuple[str, str]]:
    """(what it does, command) to make a stage again: through the pipeline, and by hand from its settings.yaml."""
    folder = run.folder
    found = []
    if run.recipe is not None and stage.name != "feedback" and not run.rounds:
        words = ["rlhf", stage.name, str(folder / "recipe.yaml"), "--run-dir", str(folder), "--force"]
        found.append(("anew, beside this result", shlex.join(words)))
    if stage.artifact and (stage.artifact.folder / "settings.yaml").is_file() and stage.name != "feedback":
        copy, old = shlex.quote(f"again/{stage.name}"), shlex.quote(str(stage.artifact.folder / "settings.yaml"))
        processes = stage.manifest.get("made_with", {}).get("processes") or 1
        launch = "python" if processes == 1 else f"accelerate launch --num_processes {processes}"
        by_hand = f"mkdir -p {copy} && cp {old} {copy}/ && {launch} -m rlhf.stages.{stage.name} {copy}"
        found.append(("by hand, elsewhere", by_hand))
    return found


def last_model(run: Run) -> str | None:
    """Path of the last finished language model."""
    for name in ("ppo", "sft", "pretrain"):
        stage = run.stages.get(name)
        if stage and stage.done and not stage.missing and (model := stage.entry.get("model")):
            return str(Path(run.name) / model)
    return None
