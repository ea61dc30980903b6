"""comparison.html and a table on the terminal: settings that differ, verdicts, metrics, curves and answers of runs."""

import json
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf.data.errors import SettingsError
from rlhf.pipeline.report.charts import CHARTS, in_words, line_name
from rlhf.pipeline.report.drawing import SERIES, draw_lines
from rlhf.pipeline.report.gallery import Gallery, gallery
from rlhf.pipeline.report.judgement import CHANGES, judge_run
from rlhf.pipeline.report.page import environment
from rlhf.pipeline.report.run import TITLES, Run, read_run
from rlhf.pipeline.summary import duration
from rlhf.stages.metric_names import NAMES, metric

MAX_RUNS = len(SERIES)


class Comparison:
    """Runs beside each other; differences are against the first."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Raises RefusedError for a folder that holds no run, and for too many."""
        if len(folders) > MAX_RUNS:
            raise SettingsError(f"report: {len(folders)} runs are too many for one page; compare at most {MAX_RUNS}")
        if len({folder.resolve() for folder in folders}) < len(folders):
            raise SettingsError("report: the same run is named twice; name different ones to compare them")
        self.runs = [read_run(folder) for folder in folders]
        self.names = names(folders)
        self.stages = [stage for stage in TITLES if any(stage in run.stages for run in self.runs)]

    @cached_property
    def settings(self) -> list[tuple[str, list[str]]]:
        """(dotted name, a value for each run) of what differs: stages, settings, contents of data, versions, processes.

        A run is not asked for the settings of a stage that it does not have, nor for what only a finished one knows.
        """
        by_recipe = all(run.recipe is not None for run in self.runs)
        there = {stage: [stage in run.stages for run in self.runs] for stage in self.stages}
        rows = [
            (f"stage {stage}", ["there" if is_there else "no such stage" for is_there in found])
            for stage, found in there.items()
            if not all(found)
        ]
        asked_for = [_asked_for(run, by_recipe) for run in self.runs]
        made_with = [_made_with(run) for run in self.runs]
        for found, finished in ((asked_for, not by_recipe), (made_with, True)):
            for stage, name in dict.fromkeys(key for values in found for key in values):
                texts = [_text(values.get((stage, name), _MISSING)) for values in found]
                known = [_knows(run, stage, finished) for run in self.runs]
                if len({text for text, is_known in zip(texts, known, strict=True) if is_known}) > 1:
                    rows.append((name, texts))
        return rows

    @cached_property
    def metrics(self) -> dict[str, list[dict[str, Any]]]:
        """By stage a line for each final metric that is a number: `name`, `values`, `differences`, `main`."""
        found = {}
        for stage in self.stages:
            finals = [run.metrics(stage) for run in self.runs]
            main = [change.after for change in CHANGES[stage]]
            every = dict.fromkeys([*main, *sorted(name for metrics in finals for name in metrics)])
            lines = [_line(name, [metrics.get(name) for metrics in finals], name in main) for name in every]
            seconds = [run.stages[stage].entry["seconds"] if stage in run.stages else None for run in self.runs]
            lines.append(_line("seconds", seconds, True))
            found[stage] = [line for line in lines if line is not None]
        return found

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows for a terminal: what differs, then the main metrics of each stage."""
        rows = [[name, *values] for name, values in self.settings]
        for stage, lines in self.metrics.items():
            for line in lines:
                if line["main"]:
                    cells = [
                        _cell(value, gain, line["name"])
                        for value, gain in zip(line["values"], line["differences"], strict=True)
                    ]
                    rows.append([f"{stage} {line['name']}", *cells])
        return ["", *self.names], rows

    def equality(self) -> str | None:
        """A sentence where nothing that the runs were made with differs."""
        if self.settings:
            return None
        lines = [line for found in self.metrics.values() for line in found if line["name"] != "seconds"]
        shown = [{metric(value, line["name"]) for value in line["values"]} for line in lines]
        alike = "so are all figures" if all(len(values) == 1 for values in shown) else "but not all figures are"
        return f"Settings, contents of data and versions are the same in all of these runs, {alike}."

    def page(self) -> str:
        """The comparison as HTML."""
        verdicts = [judge_run(run) for run in self.runs]
        rows = self._answers()
        differing = [row for row in rows if len(set(row["answers"].values())) > 1]
        templates = environment()
        templates.filters["signed"] = signed
        return templates.get_template("comparison.html.jinja").render(
            names=self.names,
            faults=[
                (name, fault)
                for name, run in zip(self.names, self.runs, strict=True)
                for fault in run.faults
                if not fault.is_usual
            ],
            times=[duration(run.seconds) for run in self.runs],
            settings=self.settings,
            equality=self.equality(),
            called=NAMES,
            verdicts=[(TITLES[stage], [found.get(stage) for found in verdicts]) for stage in self.stages],
            metrics=[(TITLES[stage], lines) for stage, lines in self.metrics.items()],
            curves=[(TITLES[stage], drawn) for stage in self.stages if (drawn := self._curves(stage))],
            shared=[TITLES[stage] for stage in self.stages if self._is_shared(stage)],
            gallery=self._gallery(differing),
            equal=len(rows) - len(differing),
            same_scores=self._same_reward_model(),
        )

    def _is_shared(self, stage: str) -> bool:
        """Whether the stage has the same key in all runs, and so the same result."""
        keys = {run.stages[stage].manifest.get("key") if stage in run.stages else None for run in self.runs}
        return len(keys) == 1 and None not in keys

    def _curves(self, stage: str) -> list[dict[str, Any]]:
        """A drawing for each metric of the stage's charts, a line for each run; none of a stage that all share."""
        drawn: list[dict[str, Any]] = []
        if self._is_shared(stage):
            return drawn
        for chart in CHARTS[stage]:
            for name in chart.metrics:
                curves = [run.stages[stage].curves.get(name) if stage in run.stages else None for run in self.runs]
                lines = {run: line for run, line in zip(self.names, curves, strict=True) if line}
                if not lines:
                    continue
                title = f"{chart.title}: {line_name(name)}" if len(chart.metrics) > 1 else chart.title
                every = [line or [] for line in curves]
                drawn.append({
                    "title": title,
                    "metric": name,
                    "last": [line[-1][1] if line else None for line in every],
                    "svg": draw_lines(every, None, in_words(title, lines)),
                })  # fmt: skip
        return drawn

    def _answers(self) -> list[dict[str, Any]]:
        """What the last model of each run answered to prompts that all runs have, as rows of a gallery."""
        found = [_last_answers(run) for run in self.runs]
        prompts = [prompt for prompt in found[0] if all(prompt in answers for answers in found)]
        rows: list[dict[str, Any]] = []
        for prompt in prompts:
            row: dict[str, Any] = {"prompt": prompt, "answers": {}, "scores": {}, "qualities": {}, "lengths": {}}
            for place, answers in enumerate(found):
                for kind, value in answers[prompt].items():
                    row[kind][str(place)] = value
            rows.append(row)
        return rows

    def _gallery(self, rows: list[dict[str, Any]]) -> Gallery | None:
        titles = {str(place): name for place, name in enumerate(self.names)}
        return gallery(rows, titles, "0", str(len(self.names) - 1), scores=self._same_reward_model())

    def _same_reward_model(self) -> bool:
        """Whether scores of all runs are of one reward model, and can be compared."""
        digests = {
            run.stages["ppo"].manifest.get("inputs", {}).get("reward_model") for run in self.runs if "ppo" in run.stages
        }
        return len(digests) == 1 and None not in digests


def names(folders: Sequence[Path]) -> list[str]:
    """What the runs are called: by their folders, with as much of the path as tells them apart."""
    whole = [folder.resolve().parts for folder in folders]
    length = 1
    while len({parts[-length:] for parts in whole}) < len(whole):
        length += 1
    return [os.sep.join(parts[-length:]) for parts in whole]


_MISSING = object()


Named = dict[tuple[str | None, str], Any]
"""Values by stage, where they are one's, and dotted name."""


def _asked_for(run: Run, by_recipe: bool) -> Named:
    """The settings of a run, by its recipe or by what its stages say."""
    settings = run.settings if by_recipe else {s.name: s.manifest.get("settings", {}) for s in run.stages.values()}
    parts = [(name if name in TITLES else None, _flat(part, f"{name}.")) for name, part in settings.items()]
    return {(stage, name): value for stage, part in parts for name, value in part.items()}


def _made_with(run: Run) -> Named:
    """What went into the finished stages of a run beside their settings."""
    found: Named = {}
    for stage in run.stages.values():
        made, data = stage.manifest.get("made_with", {}), stage.manifest.get("data", {})
        found |= {(stage.name, f"{stage.name}.{source}, contents"): digest[:12] for source, digest in data.items()}
        found |= {(None, f"version of {library}"): version for library, version in made.get("versions", {}).items()}
        if made:
            found[None, "commit"] = made.get("commit")
            found[stage.name, f"{stage.name}, processes"] = made.get("processes")
    return found


def _knows(run: Run, stage: str | None, finished: bool) -> bool:
    """Whether a run can say something of a stage, or of a `finished` one; None is no stage's."""
    return stage is None or (stage in run.stages and (not finished or bool(run.stages[stage].manifest)))


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict) and value:
        pairs = list(value.items())
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        pairs = list(enumerate(value))
    else:
        return {prefix.removesuffix("."): value}
    return {key: item for name, part in pairs for key, item in _flat(part, f"{prefix}{name}.").items()}


def _text(value: Any) -> str:
    if value is _MISSING:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _line(name: str, values: list[Any], main: bool) -> dict[str, Any] | None:
    """A metric's values and how far they are from the first; None for what is no number in any run."""
    values = [v if isinstance(v, int | float) and not isinstance(v, bool) else None for v in values]
    if all(value is None for value in values):
        return None
    differences = [None, *(_difference(value, values[0], name) for value in values[1:])]
    return {"name": name, "values": values, "differences": differences, "main": main}


def _difference(value: float | None, first: float | None, name: str) -> float | None:
    """None too where it would be shown as zero."""
    if value is None or first is None or metric(abs(value - first), name) == metric(0.0, name):
        return None
    return value - first


def _cell(value: float | None, difference: float | None, name: str) -> str:
    return metric(value, name) + (f" ({signed(difference, name)})" if difference else "")


def signed(difference: float, name: str) -> str:
    """A difference of a metric with its sign."""
    return ("+" if difference > 0 else "−") + metric(abs(difference), name)


def _last_answers(run: Run) -> dict[str, dict[str, Any]]:
    """By prompt what PPO answered (SFT, where there is no PPO), with score, quality and length."""
    kinds = ("answers", "scores", "qualities", "lengths")
    found: dict[str, dict[str, Any]] = {}
    for row in run.answers:
        model = next((name for name in ("ppo", "sft", "base") if name in row["answers"]), None)
        if model is not None:
            found.setdefault(row["prompt"], {kind: row[kind][model] for kind in kinds if model in row.get(kind, {})})
    return found
