"""summary.json: how far a run is, and that as people read it."""

import json
import shlex
import sqlite3
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from rlhf.data.errors import RefusedError, SettingsError, first_line
from rlhf.data.feedback.store import Store
from rlhf.data.feedback.target import missing, rated
from rlhf.pipeline.damage import in_words
from rlhf.pipeline.lock import in_use
from rlhf.stages.artifact import STEPS, STORE, Artifact
from rlhf.stages.disk import replace_text
from rlhf.stages.feedback.config import FeedbackSettings
from rlhf.stages.feedback.stores import gone_on
from rlhf.stages.metric_names import metric
from rlhf.stages.settings_file import read_settings

HEADLINES = {
    "pretrain": ("val_loss", "vocab_size"),
    "sft": ("eval_loss", "base_eval_loss"),
    "feedback": ("num_rankings", "num_votes", "num_disagreed", "num_tied"),
    "reward": ("accuracy", "longer_wins_accuracy"),
    "ppo": ("true_quality", "sft_true_quality", "win_rate", "score", "kl", "eos_share"),
}
"""Final metrics worth a place in a table, where the stage has them."""

PHASES = ("rollout", "scoring", "update", "evaluation", "checkpoint")
"""Whose seconds together, in a row of metrics, are all of a step."""

LARGEST = 1e100
"""A number beyond was never measured, and no axis holds it."""
FolderName = Annotated[str, Field(pattern="^[A-Za-z0-9_.-]+$", max_length=255)]
MOST_SECONDS = 1e12
Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS)]


def _of_usual_size(metrics: dict[str, Any]) -> dict[str, Any]:
    """A whole number that no float holds can be written nowhere."""
    if too_large := [name for name, value in metrics.items() if isinstance(value, int) and abs(value) > LARGEST]:
        raise ValueError(f"{too_large[0]} is no number that a stage measures")
    return metrics


Metrics = Annotated[dict[str, Any], AfterValidator(_of_usual_size)]
"""Final metrics of a stage."""
_METRICS: TypeAdapter[dict[str, Any]] = TypeAdapter(Metrics)


@dataclass
class Entry:
    """One stage in summary.json. `folder` and `model` are relative to the run folder."""

    status: str
    """done, failed, stopped, running, waiting (for people) or planned."""
    folder: FolderName | None = None
    model: str | None = None
    seconds: Seconds | None = None
    """Wall time over all attempts that this run saw end; null if the stage was run by hand."""
    metrics: Metrics = field(default_factory=dict)


class Summary(BaseModel):
    """summary.json."""

    stages: dict[str, Entry]
    rounds: list[dict[str, Entry]] = Field([], min_length=1)


class _Told(BaseModel):
    """status.json."""

    state: str
    step: int | None = None
    steps: int | None = None
    message: str | None = None
    code: int | None = None
    seconds: Seconds | None = None
    """As in summary.json, which forgets a recipe's stages when another is run; a run adds it when the stage ends."""


def read_summary(run_dir: Path) -> dict[str, Entry]:
    """Entries by stage, those of later rounds as `ppo 2`; empty if there is no summary.json."""
    path = run_dir / "summary.json"
    if not path.is_file():
        return {}
    try:
        return entries_in(Summary.model_validate(from_json(path.read_bytes())))
    except OSError as error:
        raise SettingsError(
            f"{path}: cannot be read ({error.strerror}); change its mode, or delete it and run again"
        ) from None
    except ValueError as error:
        told = in_words(error).removeprefix(": ")
        raise SettingsError(f"{path}: not a summary of a run ({told}); delete it and run again") from None


def entries_in(content: Summary) -> dict[str, Entry]:
    """Its entries, in the order in which a run goes through them."""
    found = flat(content.model_dump(exclude_unset=True))
    return {name: Entry(**entry) for name, entry in found.items()}


def write_summary(run_dir: Path, entries: dict[str, Entry]) -> bool:
    """Replace summary.json whole; False if it said the same already, and then it is left alone."""
    text = json.dumps(nested({name: asdict(entry) for name, entry in entries.items()}), indent=1)
    path = run_dir / "summary.json"
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    replace_text(path, text)
    return True


def in_round(stage: str, round_: int) -> str:
    """What the stage of a round is called: ppo, ppo 2, ppo 3 …"""
    return stage if round_ == 1 else f"{stage} {round_}"


def nested(entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Entries as summary.json has them: `stages` with the newest round that has begun, and `rounds` with all, if there
    are several."""
    rounds: list[dict[str, Any]] = []
    while found := {stage: entries[name] for stage in STEPS if (name := in_round(stage, len(rounds) + 1)) in entries}:
        rounds.append(found)
    stages: dict[str, Any] = {}
    for found in rounds:
        stages |= {s: entry for s, entry in found.items() if s not in stages or entry["status"] != "planned"}
    return {"stages": stages} | ({"rounds": rounds} if len(rounds) > 1 else {})


def flat(content: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The reverse of `nested`, in the order in which a run goes through them."""
    rounds = content["rounds"] if "rounds" in content else [content["stages"]]
    return {in_round(s, n): found[s] for n, found in enumerate(rounds, start=1) for s in STEPS if s in found}


def stage_status(folder: Path) -> dict[str, Any]:
    """What the stage itself last wrote: state, step, steps, message; empty if it has not begun or that is damaged."""
    try:
        return _Told.model_validate_json((folder / "status.json").read_bytes()).model_dump(exclude_unset=True)
    except (OSError, ValidationError):
        return {}


def run_status(run_dir: Path) -> dict[str, dict[str, Any]]:
    """summary.json, with step, steps and message of stages under way, and seconds_left of one that runs; 'interrupted'
    for one whose process is gone. A finished one has a message where its folder is not, or not whole, in the run any
    more; one that is not has `finished_before` where an earlier attempt came to its end."""
    if not run_dir.is_dir() or not (run_dir / "summary.json").is_file():
        raise no_run_folder(run_dir)
    return with_progress(run_dir, read_summary(run_dir))


def no_run_folder(folder: Path) -> SettingsError:
    """Says that a folder is none of a run, and of a stage's how far that is."""
    if not (folder / "settings.yaml").is_file():
        return SettingsError(f"{folder}: not a run folder (no summary.json); `rlhf run RECIPE` makes one")
    told = _told_by(folder)
    if Artifact(folder).sealed:
        state = f"done, its result is {folder}"
    else:
        at = f" at step {told['step']} of {told['steps']}" if told.get("steps") else ""
        state = f"{told.get('state', 'not begun')}{at}"
    run_dir = folder.absolute().parent
    cure = f"; `{shlex.join(['rlhf', 'status', str(folder.parent)])}`" if (run_dir / "summary.json").is_file() else ""
    return SettingsError(f"{folder}: not a run folder but that of one stage ({state}){cure}")


def with_progress(run_dir: Path, entries: Mapping[str, Entry]) -> dict[str, dict[str, Any]]:
    """The same of entries that were read."""
    stages: dict[str, dict[str, Any]] = {}
    for stage, entry in as_sealed(run_dir, entries).items():
        stages[stage] = asdict(entry)
        if entry.status == "running" and not in_use(run_dir):
            stages[stage]["status"] = "interrupted"
        if entry.status == "done":
            if why := _why_missing(run_dir, entry.folder or stage):
                stages[stage]["message"] = why
        elif entry.folder:
            told = _told_by(run_dir / entry.folder)
            if stages[stage]["status"] == "interrupted" and told.get("state") == "stopped":
                stages[stage]["status"] = "stopped"  # the stage ended the process that it shared with the run
            stages[stage] |= {name: told.get(name) for name in ("step", "steps", "message")}
            if stages[stage]["status"] == "running":
                stages[stage]["seconds_left"] = _seconds_left(run_dir / entry.folder, told)
            if entry.status != "planned" and (earlier := _finished_before(run_dir, stage, entries)):
                stages[stage]["finished_before"] = earlier
    return stages


def _finished_before(run_dir: Path, stage: str, entries: Mapping[str, Entry]) -> str | None:
    """The folder of a stage that was finished last with other settings, data or code than it has now."""
    from rlhf.pipeline.references import sealed

    of_now = {entry.folder for entry in entries.values()}
    try:
        found = [artifact for artifact in sealed(stage.split()[0], run_dir) if artifact.folder.name not in of_now]
        newest = max(found, key=lambda artifact: artifact.manifest["made_with"]["finished"], default=None)
    except (SettingsError, KeyError):
        return None  # `rlhf verify` tells of a damaged manifest
    return newest.folder.name if newest else None


def as_sealed(run_dir: Path, entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Entries where each stage whose folder is sealed is done: it may have been finished by hand since the run."""
    return {stage: _as_sealed(run_dir, entry) for stage, entry in entries.items()}


def _as_sealed(run_dir: Path, entry: Entry) -> Entry:
    if entry.status == "done" or entry.folder is None:
        return entry
    artifact = Artifact(run_dir / entry.folder)
    try:
        if not artifact.sealed:
            return entry
        metrics = _METRICS.validate_python(artifact.manifest.get("metrics", {}))
    except (SettingsError, ValidationError):
        return entry  # `rlhf verify` tells of a damaged manifest
    model = f"{entry.folder}/model" if artifact.model.is_dir() else None
    return replace(entry, status="done", model=model, metrics=metrics)


def _why_missing(run_dir: Path, folder: str) -> str | None:
    """Why what a finished stage made cannot be used, with the cure; None where its folder is whole."""
    try:
        if Artifact(run_dir / folder).sealed:
            return None
    except SettingsError as error:
        return str(error)
    from rlhf.stages.evaluation.subjects import missing_stage

    return str(missing_stage(run_dir, folder))


def _told_by(folder: Path) -> dict[str, Any]:
    """What an unfinished stage says of itself, or why that is not known: the other stages are told all the same."""
    try:
        found = stage_status(folder) | rated_now(folder)
        is_damaged = not found and (folder / "status.json").exists()
    except (RefusedError, OSError, sqlite3.Error) as error:
        return {"message": f"how far it is cannot be told: {first_line(error)}"}
    if is_damaged:
        return {"message": f"how far it is cannot be told: {folder}/status.json is damaged; running again goes on"}
    return found


def _seconds_left(folder: Path, told: dict[str, Any]) -> float | None:
    """What the steps that a training stage has before it would take, as long each as those behind it did on average,
    less the time since its last row of metrics. None before the first, where one is damaged, and where that time is
    over: it may hang."""
    if told.get("state") != "running" or not told.get("steps"):
        return None
    seconds, step = 0.0, 0
    path = folder / "metrics.jsonl"
    try:
        since = time.time() - path.stat().st_mtime
        for line in path.read_bytes().splitlines():
            row = from_json(line)
            num_steps = max(row["step"] - step, 1)  # since the row before; an evaluation has a row of its own
            seconds += num_steps * sum(row.get(f"seconds_{phase}", 0.0) for phase in PHASES)
            step = row["step"]
        left = seconds / step * (told["steps"] - step) - max(since, 0.0)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError):
        return None
    return round(left, 1) if 0 < left < MOST_SECONDS else None


def missing_folders(stages: dict[str, dict[str, Any]]) -> list[str]:
    """What `run_status` says of finished stages whose folders are missing, in a line each."""
    return [entry["message"] for entry in stages.values() if entry["status"] == "done" and "message" in entry]


def messages(stages: dict[str, dict[str, Any]]) -> list[str]:
    """What `run_status` has to say of stages beside their figures, in a line each."""
    told = []
    for stage, entry in stages.items():
        if text := " ".join((entry.get("message") or "").split()):
            told.append(f"{'warning' if entry['status'] == 'done' else stage}: {text}")
        if earlier := entry.get("finished_before"):
            told.append(f"{stage}: {earlier} was finished before, with other settings, data or code")
    return told


def rated_now(folder: Path) -> dict[str, Any]:
    """Step, steps and message of a feedback step that waits for people, as the store is now; empty of any other."""
    if stage_status(folder).get("state") != "waiting" or not (folder / STORE).is_file():
        return {}
    settings = read_settings(folder, FeedbackSettings)
    with Store.open(folder / STORE) as store:
        found = rated(store, settings.target, settings.round)
        told = missing(found, settings.target, store.path)
    return {"step": found.num, "steps": found.num_prompts, "message": told}


def rated_elsewhere(folder: Path) -> bool:
    """Whether people have gone on with a feedback step's rankings in another step, which had another target, say."""
    return gone_on(read_settings(folder, FeedbackSettings), folder / STORE) is not None


def outcome(entry: dict[str, Any]) -> str:
    """The status of a stage in `run_status`, with what is missing, and what its final metrics say against it."""
    against = [
        words
        for name, words in (("over_optimised", "over-optimised"), ("gates_failed", "gate failed"))
        if entry["metrics"].get(name)
    ]
    missing = ["folder missing"] if entry["status"] == "done" and "message" in entry else []
    return ", ".join([entry["status"], *missing, *against])


def headline(stage: str, metrics: dict[str, Any]) -> str:
    """The final metrics of a stage (of any round) in one line."""
    shown = [(name, metrics[name]) for name in HEADLINES[stage.split()[0]] if metrics.get(name) is not None]
    return "  ".join(f"{name} {metric(value, name)}" for name, value in shown)


def duration(seconds: float | None) -> str:
    """Seconds as people read them."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    hours = minutes // 60
    if hours >= 48:
        return f"{hours // 24:,} days {hours % 24} h"
    return f"{hours}:{minutes % 60:02d}:{left:02d}" if hours else f"{minutes}:{left:02d} min"
