"""The evaluation of a run: its cheap form after a stage, the whole for `rlhf eval`, and both as people read them."""

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.data.errors import Stopped, first_line
from rlhf.pipeline.errors import RunFailed
from rlhf.pipeline.launch import stays_in_process, to_its_end
from rlhf.pipeline.preflight import Say
from rlhf.pipeline.progress import waiting
from rlhf.pipeline.recipe import Recipe, load_recipe
from rlhf.pipeline.summary import Entry
from rlhf.pipeline.tables import show_table
from rlhf.stages.artifact import Artifact
from rlhf.stages.evaluation.config import EvaluationSettings, cheap
from rlhf.stages.evaluation.subjects import is_current
from rlhf.stages.secrets import mask
from rlhf.stages.signals import SECONDS_TO_REPORT, exit_code


def finished(run_dir: Path, entries: Mapping[str, Entry]) -> dict[str, Path]:
    """The sealed folder of each finished stage, that of the last round."""
    folders = {name.split()[0]: entry.folder for name, entry in entries.items() if entry.status == "done"}
    return {
        stage: run_dir / folder for stage, folder in folders.items() if folder and Artifact(run_dir / folder).sealed
    }


def evaluate(run_dir: Path, done: Mapping[str, Path], asked: EvaluationSettings, say: Say) -> dict[str, Any]:
    """Evaluate in this process, which imports torch by that; what evaluation.json says."""
    found: dict[str, Any] = importlib.import_module("rlhf.stages.evaluation.evaluate").evaluate(
        run_dir, done, asked, say
    )
    return found


def keep_current(run_dir: Path, entries: Mapping[str, Entry], recipe: Recipe, stage: str, lock: int, say: Say) -> bool:
    """Make the cheap evaluation where the run's is of other models than it has now; whether one was made.

    In this process if the `stage` ran in it, else in one of its own. What goes wrong is said in a line and fails no
    run; a signal ends it.
    """
    try:
        done = finished(run_dir, entries)
        if is_current(run_dir, done):
            return False
        asked = cheap(judge_of(recipe))
        with waiting("evaluating what there is so far") as tell:
            if stays_in_process(recipe, stage):
                evaluate(run_dir, done, asked, tell)
            else:
                _in_a_process(run_dir, done, asked, lock)
    except Exception as error:
        say(mask(f"warning: no evaluation: {first_line(error)}; `rlhf eval {run_dir} --cheap` tries again"))
        return False
    return True


def judge_of(recipe: Recipe) -> str | None:
    """The function that judges answers, by the last stage that has one."""
    sections = (recipe.ppo, recipe.reward, recipe)
    return next((section.judge for section in sections if section is not None and section.judge), None)


def judge_in(run_dir: Path) -> str | None:
    """That of the recipe that a run folder holds."""
    recipe = run_dir / "recipe.yaml"
    return judge_of(load_recipe(str(recipe))) if recipe.is_file() else None


def _in_a_process(run_dir: Path, done: Mapping[str, Path], asked: EvaluationSettings, lock: int) -> None:
    folders = json.dumps({stage: str(folder) for stage, folder in done.items()})
    words = [sys.executable, "-m", "rlhf.stages.evaluation", str(run_dir), folders, asked.model_dump_json()]
    ended = to_its_end(words, {}, SECONDS_TO_REPORT, lock)
    if ended.received:
        raise Stopped(exit_code(ended.received[0]))
    if ended.code:
        lines = ended.said.strip().splitlines()
        raise RunFailed(lines[-1] if lines else f"its process ended with code {ended.code}")


def show(found: Mapping[str, Any]) -> None:
    """evaluation.json for people."""
    models = found["models"]
    columns: dict[str, dict[str, Any]] = {
        "model": {name: f"{name} ({model['model']})" for name, model in models.items()},
        "text ppl": _column(models, "text_perplexity"),
        "response ppl": _column(models, "response_perplexity"),
        "score": {name: _mean(model["score"]) for name, model in models.items()},
        "quality": {name: _mean(model["quality"]) for name, model in models.items()},
        "KL from sft": {name: _with(model["kl"], model["kl_interval"]) for name, model in models.items()},
        "tokens": _column(models, "length"),
        "ended": _column(models, "eos_share"),
        "distinct-2": _column(models, "distinct_2"),
        "repeated": _column(models, "repetition"),
        "refused": _column(models, "refusal_share"),
    }
    kept = {title: cells for title, cells in columns.items() if any(cells.values())}
    show_table(list(kept), [[cells[name] for cells in kept.values()] for name in models])
    if found["pairs"]:
        print()
        show_table(
            ("better", "by", "wins", "ties", "losses", "win rate", "at equal length"),
            [
                [
                    f"{pair['one']} than {pair['other']}", pair["by"],
                    *(str(pair[name]) for name in ("wins", "ties", "losses")),
                    _with(pair["win_rate"], pair["interval"]),
                    _with(pair["length_controlled"], pair["length_controlled_interval"]),
                ]
                for pair in found["pairs"]
            ],
        )  # fmt: skip
    if found["best_of_n"]:
        print()
        show_table(
            ("best of", "KL", "score", "quality"),
            [
                [str(row["n"]), _number(row["kl"]), _with(row["score"], row["score_interval"]), _number(row["quality"])]
                for row in found["best_of_n"]
            ],
        )
    if found["tasks"]:
        print()
        show_table(
            ("model", "task", "metric", "value"),
            [
                [name, task, metric, _number(value)]
                for name, tasks in found["tasks"].items()
                for task, metrics in tasks.items()
                for metric, value in metrics.items()
            ],
        )


def _column(models: Mapping[str, Any], name: str) -> dict[str, str]:
    return {model: _number(figures[name]) for model, figures in models.items()}


def _mean(spread: Mapping[str, Any] | None) -> str:
    return "" if spread is None else f"{_number(spread['mean'])} ± {_number(spread['std'])}"


def _with(value: float | None, interval: list[float] | None) -> str:
    return _number(value) if not interval else f"{_number(value)} ({_number(interval[0])} to {_number(interval[1])})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
