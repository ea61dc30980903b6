"""report.html: one file that shows what every stage brought; `rlhf run` and `rlhf report` write it."""

import math
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, get_args

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from rlhf.data.errors import SettingsError
from rlhf.pipeline.report import facts
from rlhf.pipeline.report.charts import draw_charts
from rlhf.pipeline.report.diagnoses import diagnose
from rlhf.pipeline.report.drawing import (
    DASHES,
    SERIES,
    draw_histogram,
    draw_power_law,
    draw_reliability,
    draw_variants,
)
from rlhf.pipeline.report.evaluation import evaluation, frontier
from rlhf.pipeline.report.files import Fault, Part
from rlhf.pipeline.report.gallery import clip, gallery
from rlhf.pipeline.report.judgement import SIGNS, changes, judge_run
from rlhf.pipeline.report.run import MODELS, TITLES, Run, Stage, read_run
from rlhf.pipeline.report.verdicts import outcome
from rlhf.pipeline.scaling import PowerLaw
from rlhf.pipeline.summary import duration
from rlhf.pipeline.sweep import table
from rlhf.stages.disk import replace_text
from rlhf.stages.metric_names import metric, number, share

MAX_TEXTS = 30
"""What a base model writes over time, and pairs that a reward model is wrong about, at most."""
MAX_CHARACTERS = 1000
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff]")
PURPOSES = {
    "pretrain": "A decoder learns to continue raw text.",
    "sft": "It learns to answer, from prompts with good responses.",
    "feedback": "It answers each prompt several times, and people or a judge rank the answers.",
    "reward": "A second model learns from ranked answers which are preferred: one score per response.",
    "ppo": "The SFT model is improved towards a higher score, without drifting far from where it began.",
}
WEIGHED = ("metrics.jsonl", "card.json")
"""Files that a verdict rests on."""
BY_LENGTH = ["better answer longer", "about equal", "better answer shorter"]
LAWS = [("N", "parameters"), ("D", "tokens"), ("C", "compute")]
OF_CARD = (
    "accuracy", "prompt_accuracy", "longer_wins_accuracy", "ece", "temperature", "ece_after_temperature", "chosen_mean",
    "rejected_mean",
)  # fmt: skip
"""Final metrics of the reward stage that stand in its report card."""


def render(run_dir: str | Path, price_per_hour: float | None = None) -> Path:
    """Write `run_dir`/report.html from what is there, finished stages or not, and return its path.

    `price_per_hour` is what an hour of the run's machines costs, in any currency; without it no price is shown.
    Raises RefusedError where `run_dir` is not the folder of a run, or where it cannot be written to.
    """
    return draw(read_run(run_dir), price_per_hour)


def draw(run: Run, price_per_hour: float | None = None) -> Path:
    """As `render`, of a run that is read already."""
    path = run.folder / "report.html"
    write(path, page(run, price_per_hour))
    return path


def write(path: Path, html: str) -> None:
    """Write a page, in which signs that HTML has no place for, a NUL say, are the one for what cannot be shown.

    Raises SettingsError where it cannot be written.
    """
    try:
        replace_text(path, CONTROL.sub("\ufffd", html))
    except OSError as error:
        raise SettingsError(f"{path}: cannot be written: {error.strerror or error}") from None


def refuse_unwritable(path: Path, option: str = "") -> None:
    """Raise SettingsError where a page cannot be written, before there is work in it; `option` named the path."""
    where = f"{option} {path}".strip()
    cure = "name a file in a folder that is there and can be written to" if option else "make room for the page there"
    try:
        if path.is_dir():
            raise SettingsError(
                f"{where}: is a folder, and a page is a file; {'name one in it' if option else 'move it'}"
            )
        if option and path.is_file() and not _is_page(path):
            raise SettingsError(f"{where}: is there already, and is no page; name another file")
        if path.exists() and not path.is_file():
            raise SettingsError(f"{where}: is a device or a pipe, and a page is a file; {cure}")
        with TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise SettingsError(f"{where}: cannot be written: {error.strerror or error}; {cure}") from None


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(100).lstrip().lower().startswith(b"<!doctype html") or not path.stat().st_size


def page(run: Run, price_per_hour: float | None = None) -> str:
    """The report as HTML."""
    verdicts = judge_run(run)
    stages = [_stage(stage, run) for stage in run.stages.values()]
    findings = run.metrics("ppo").get("findings") or []
    unfinished = next((name for name, stage in run.stages.items() if not stage.done or stage.missing), None)
    return (
        environment()
        .get_template("report.html.jinja")
        .render(
            name=run.name,
            run=run,
            outcome=outcome(verdicts, facts.last_model(run), unfinished),
            verdicts=verdicts,
            diagnoses=[(TITLES[stage], *found) for stage, *found in diagnose(verdicts, findings)],
            stages=stages,
            faults={part: [fault for fault in run.faults if fault.part == part] for part in get_args(Part)},
            tiles=[change for stage in stages for change in stage["changes"][:1]],
            rounds=_rounds(run.rounds),
            evaluation=evaluation(run),
            frontier=frontier(run),
            gallery=gallery(run.answers, MODELS),
            texts_of_base=run.stages["pretrain"].samples[-MAX_TEXTS:][::-1] if "pretrain" in run.stages else [],
            sweep=_sweep(run.sweep),
            data=[(stage, found) for stage in run.stages.values() if (found := facts.data(stage))],
            costs=facts.costs(run, price_per_hour),
            priced=price_per_hour is not None,
            lineage=facts.lineage(run),
        )
    )


@cache  # compiling its templates takes longer than filling them
def environment() -> Environment:
    """Templates of the package, in which everything is escaped."""
    found = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        loader=FunctionLoader(lambda name: files(__package__).joinpath("templates", name).read_text("utf-8")),
    )  # fmt: skip
    found.filters.update(
        number=number, metric=metric, share=share, duration=duration, clip=_clip, filled=_filled,
        percent="{:.1%}".format, marked=marked,
    )  # fmt: skip
    found.globals.update(series=list(zip(SERIES, DASHES, strict=True)), signs=SIGNS)
    return found


def marked(text: str) -> Markup:
    """A sentence in which what stands between backticks is code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _stage(stage: Stage, run: Run) -> dict[str, Any]:
    """What the page shows of one stage beside its figures."""
    curves = {name: line for name, line in stage.curves.items() if not facts.is_of_phases(name)}
    return {
        "stage": stage,
        "purpose": PURPOSES[stage.name],
        "warnings": _warnings(stage, run.faults),
        "changes": changes(stage, run),
        "card": _card(stage),
        "phases": facts.phases(stage.rows),
        **draw_charts(stage.name, curves, stage.metrics),
    }


def _rounds(rounds: list[dict[str, Any]]) -> dict[str, Any] | None:
    """A line per round that has begun: what was ranked, and what became of it. Columns that no round fills are left
    out; None without rounds. Quality is held against the round before, the score against SFT: each round has a reward
    model of its own, whose scores compare with no other's."""
    found: list[dict[str, str]] = []
    before = None
    for place, entries in enumerate(rounds, start=1):
        feedback, reward, ppo = (entries.get(stage, {}).get("metrics", {}) for stage in ("feedback", "reward", "ppo"))
        if not feedback:
            break
        quality, before = ppo.get("true_quality"), ppo.get("sft_true_quality") if before is None else before
        found.append({
            "round": str(place),
            "rankings": number(feedback.get("num_rankings")),
            "accuracy of the reward model": metric(reward.get("accuracy"), "accuracy"),
            "quality by the judge": number(quality),
            "its gain": _gain(before, quality),
            "win rate by the judge": metric(ppo.get("win_rate"), "win_rate"),
            "gain in score": _gain(ppo.get("sft_score"), ppo.get("score")),
            "win rate by the score": metric(ppo.get("score_win_rate"), "score_win_rate"),
            "KL": number(ppo.get("kl")),
        })  # fmt: skip
        before = quality
    if not found:
        return None
    titles = [title for title in found[0] if any(line[title] != number(None) for line in found)]
    return {"titles": titles, "lines": [[line[title] for title in titles] for line in found]}


def _gain(before: float | None, after: float | None) -> str:
    return number(None) if before is None or after is None else f"{after - before:+.3f}"


def _warnings(stage: Stage, faults: list[Fault]) -> list[str]:
    """What the final metrics say against a stage, and what its verdict does without, in sentences."""
    found = []
    if findings := stage.metrics.get("findings"):
        named = ", ".join(name.replace("_", " ") for name in findings)
        found.append(f"Not healthy at the end: {named}.")
    if failed := stage.metrics.get("gates_failed"):
        found.append(f"PPO does not start from it: {'; '.join(failed)}.")
    files = [Path(fault.file) for fault in faults if not fault.is_usual]
    if without := [file.name for file in files if file.parent.name == stage.folder and file.name in WEIGHED]:
        found.append(
            f"The verdict does without {' and '.join(without)}, which cannot be read whole; the reason is below."
        )
    return found


def _card(stage: Stage) -> dict[str, Any] | None:
    """The report card of a reward model with its drawings; None for a stage that has none, or not yet."""
    card = stage.card
    if card is None:
        return None
    groups = {"length": _every_length(card["by_length"]), "margin": card["by_margin"], "source": card["by_source"]}
    figures = stage.metrics | stage.manifest.get("metrics", {})
    return card | {
        "figures": {name: figures.get(name) for name in OF_CARD},
        "groups": {title: found for title, found in groups.items() if found},
        "reliability_svg": draw_reliability(card),
        "histogram_svg": draw_histogram(card),
    }


def _every_length(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups by length with those that no pair falls into; a card names only the others."""
    found = {group["name"]: group for group in groups}
    return [found.get(name, {"name": name, "pairs": 0, "accuracy": None}) for name in BY_LENGTH] if groups else []


def _sweep(found: dict[str, Any] | None) -> dict[str, Any] | None:
    """The table of the run's last sweep with its drawings; None where there was none."""
    if found is None:
        return None
    rows = found["rows"]
    finished = sorted((row for row in rows if row["val_loss"] is not None), key=lambda row: row["val_loss"])
    curves = [(row["name"], row["losses"], row["val_loss"]) for row in finished if row["losses"]]
    return {
        "rows": rows,
        "table": table(rows),
        "failed": [row for row in rows if row["error"] is not None],
        "vocabularies": len({row["vocab_size"] for row in finished}),
        "curves": curves if len(curves) <= 3 else [curves[0], curves[-1]],
        "others": len(curves) - 2 if len(curves) > 3 else 0,
        "curves_svg": draw_variants([line for _, line, _ in curves], 0, len(curves) - 1) if curves else None,
        "laws": [_law(symbol, name, found["scaling"][name]) for symbol, name in LAWS if found["scaling"]],
    }


def _law(symbol: str, name: str, part: dict[str, Any]) -> dict[str, Any]:
    """A power law with its formula and its drawing."""
    law = PowerLaw(**part["fit"]) if part["fit"] else None
    power = math.floor(law.log10_constant) if law else 0
    return {
        "symbol": symbol,
        "count": len(part["points"]),
        "law": law,
        "constant": 10 ** (law.log10_constant - power) if law else None,
        "power": power,
        "svg": draw_power_law(part["points"], law, f"Held-out loss over {name}") if part["points"] else "",
    }


def _filled(columns: list[tuple[str, str]], rows: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """The columns (title, key) that any of the rows has something for."""
    return [(title, key) for title, key in columns if any(row[key] is not None for row in rows)]


def _clip(text: str) -> str:
    kept, left_out = clip(text, MAX_CHARACTERS)
    return f"{kept} …" if left_out else kept
