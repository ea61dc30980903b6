"""The evaluation of a run: its cheap form after a stage, and the whole for `rlhf eval`."""

import importlib
import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf.data.errors import SettingsError, Stopped, first_line
from rlhf.pipeline.errors import RunFailed, begun
from rlhf.pipeline.launch import stays_in_process, to_its_end
from rlhf.pipeline.preflight import Say
from rlhf.pipeline.progress import telling
from rlhf.pipeline.recipe import Recipe, load_recipe
from rlhf.pipeline.summary import Entry
from rlhf.stages.artifact import STAGES, Artifact
from rlhf.stages.evaluation.config import EvaluationSettings, cheap
from rlhf.stages.evaluation.records import ANSWERS, FIGURES, EvaluationFailed, read_figures
from rlhf.stages.evaluation.subjects import is_current, missing_stage, refuse_damage
from rlhf.stages.secrets import mask
from rlhf.stages.signals import SECONDS_TO_REPORT, exit_code


def finished(run_dir: Path, entries: Mapping[str, Entry]) -> dict[str, Path]:
    """The sealed folder of each finished stage, that of the last round."""
    return {stage: folder for stage, folder in _folders(run_dir, entries).items() if Artifact(folder).sealed}


def refuse_damaged_stages(run_dir: Path, entries: Mapping[str, Entry]) -> None:
    """Raise SettingsError where a finished stage's folder is not, or not whole, in the run any more: a copy that was
    made without it would be measured without it, and nobody told. And where something in one is damaged that an
    evaluation opens: before torch is imported, which takes long, or a model is loaded."""
    for stage, folder in _folders(run_dir, entries).items():
        if stage in STAGES and not Artifact(folder).sealed:
            raise missing_stage(run_dir, folder.name)
    refuse_damage(run_dir, finished(run_dir, entries))


def refuse_no_place(run_dir: Path) -> None:
    """Raise SettingsError where the files of an evaluation could not be written."""
    if not os.access(run_dir, os.W_OK):
        raise SettingsError(f"{run_dir}: cannot be written to, and the figures go there; evaluate a copy of it")
    for name in (FIGURES, ANSWERS, "report.html"):
        if (run_dir / name).is_dir():
            raise SettingsError(f"{run_dir / name}: is a folder, where a file is to be written; move it away")


def _folders(run_dir: Path, entries: Mapping[str, Entry]) -> dict[str, Path]:
    folders = {name.split()[0]: entry.folder for name, entry in entries.items() if entry.status == "done"}
    return {stage: run_dir / folder for stage, folder in folders.items() if folder}


def evaluate(run_dir: Path, done: Mapping[str, Path], asked: EvaluationSettings, say: Say) -> dict[str, Any]:
    """Evaluate in this process, which imports torch by that; what evaluation.json says. Raises RunFailed for what goes
    wrong on the way."""
    evaluate_all = importlib.import_module("rlhf.stages.evaluation.evaluate").evaluate
    try:
        with begun():
            found: dict[str, Any] = evaluate_all(run_dir, done, asked, say)
    except EvaluationFailed as error:
        raise RunFailed(str(error)) from error
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
        asked = cheap(None).model_copy(update=asked_by(recipe))
        with telling("evaluating the models that are there", say) as tell:
            if stays_in_process(recipe, stage):
                evaluate(run_dir, done, asked, lambda text: tell(f"evaluation, {text}"))
            else:
                _in_a_process(run_dir, done, asked, lock)
        for told in (read_figures(run_dir) or {}).get("left_out", []):
            say(mask(f"warning: evaluation: {told}"))
    except Exception as error:
        again = shlex.join(["rlhf", "eval", str(run_dir), "--cheap"])
        say(mask(f"warning: no evaluation: {first_line(error)}; `{again}` tries again"))
        return False
    return True


def asked_by(recipe: Recipe) -> dict[str, Any]:
    """What an evaluation takes from a recipe: the function that judges answers, by the last stage that has one, and how
    ppo draws them."""
    sections = (recipe.ppo, recipe.reward, recipe)
    judge = next((section.judge for section in sections if section is not None and section.judge), None)
    drawn = recipe.ppo.model_dump(include={"max_new_tokens", "temperature"}) if recipe.ppo else {}
    return {"judge": judge} | drawn


def asked_in(run_dir: Path) -> dict[str, Any]:
    """The same of the recipe that a run folder holds."""
    path = run_dir / "recipe.yaml"
    if not path.exists():
        return {}
    try:
        return asked_by(load_recipe(str(path)))
    except SettingsError as error:
        told = str(error).removeprefix(f"{path}: ")
        raise SettingsError(f"{path}: {told}; put it back as it was: the run wrote it") from None


def _in_a_process(run_dir: Path, done: Mapping[str, Path], asked: EvaluationSettings, lock: int) -> None:
    folders = json.dumps({stage: str(folder) for stage, folder in done.items()})
    words = [sys.executable, "-m", "rlhf.stages.evaluation", str(run_dir), folders, asked.model_dump_json()]
    ended = to_its_end(words, {}, SECONDS_TO_REPORT, lock)
    if ended.received:
        raise Stopped(exit_code(ended.received[0]))
    if ended.code:
        lines = ended.said.strip().splitlines()
        raise RunFailed(lines[-1] if lines else f"its process ended with code {ended.code}")
