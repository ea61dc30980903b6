"""What a report reads of a run folder: its stages with their metrics, and the evaluation where there is one."""

import math
import shlex
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlhf.data.errors import SettingsError
from rlhf.pipeline.recipe import read_yaml
from rlhf.pipeline.report import shapes
from rlhf.pipeline.report.curves import Line, curves
from rlhf.pipeline.report.files import Fault, Reader
from rlhf.pipeline.report.ppo_verdict import Evidence, gather, paid_by
from rlhf.pipeline.summary import (
    Entry,
    flat,
    missing_folders,
    nested,
    outcome,
    run_status,
    stage_status,
    with_progress,
)
from rlhf.pipeline.sweep import SWEEP
from rlhf.pipeline.verify import stage_folders
from rlhf.stages.artifact import Artifact
from rlhf.stages.evaluation.records import ANSWERS, FIGURES, Damaged, load_answers, load_figures

TITLES = {"pretrain": "Pretraining", "sft": "SFT", "feedback": "Feedback", "reward": "Reward model", "ppo": "PPO"}
MODELS = {"base": "base", "sft": "SFT", "ppo": "PPO"}
"""Of an evaluation, each with what people call it."""
MADE_BY = {"base": "pretrain", "sft": "sft", "ppo": "ppo"}
"""The stage of the run that made a model of an evaluation, if one did."""


@dataclass(frozen=True)
class Stage:
    """A stage of the run, of the newest round, finished or not."""

    name: str
    entry: dict[str, Any]
    """Its line in the run's status."""
    artifact: Artifact | None = None
    manifest: dict[str, Any] = field(default_factory=dict)
    """Empty until it is finished."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Of metrics.jsonl."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Of a base model what it wrote; of PPO held-out prompts with the answers of SFT and PPO."""
    card: dict[str, Any] | None = None
    """The report card of a finished reward model."""
    worst: list[dict[str, Any]] = field(default_factory=list)
    """The pairs that it is most wrong about."""
    corpus: dict[str, Any] = field(default_factory=dict)
    """What became of the documents of pretraining."""

    @property
    def title(self) -> str:
        return TITLES[self.name]

    @property
    def status(self) -> str:
        return str(self.entry["status"])

    @property
    def done(self) -> bool:
        return self.status == "done"

    @property
    def outcome(self) -> str:
        return outcome(self.entry)

    @property
    def message(self) -> str | None:
        """Why it is not finished, where it says so."""
        return None if self.done else self.entry.get("message")

    @property
    def missing(self) -> str | None:
        """How to get its folder back, where that is not, or not whole, in the run any more."""
        return self.entry.get("message") if self.done else None

    @property
    def finished_before(self) -> str | None:
        """Where it is not finished, the folder of an earlier attempt that is."""
        return self.entry.get("finished_before")

    @property
    def folder(self) -> str | None:
        return self.artifact.folder.name if self.artifact else None

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The final ones that are there and finite, with `guessing_loss`, the loss of a model that knows nothing. None
        of a stage whose folder is missing."""
        if self.missing:
            return {}
        found = {name: value for name, value in self.entry["metrics"].items() if shapes.is_told(value)}
        if vocab_size := found.get("vocab_size"):
            found["guessing_loss"] = math.log(vocab_size)
        return found

    @cached_property
    def curves(self) -> dict[str, Line]:
        return curves(self.rows)


@dataclass(frozen=True)
class Run:
    """A run folder, read once."""

    folder: Path
    status: dict[str, Any]
    stages: dict[str, Stage]
    evaluation: dict[str, Any] | None
    """evaluation.json, if it is there, whole, and of the models that the run has now."""
    faults: list[Fault]
    """Files that are left out, or in part."""
    recipe: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """What the recipe says."""
    sweep: dict[str, Any] | None = None
    """sweep.json, each of its rows with `losses`, the held-out ones over steps."""
    answers: list[dict[str, Any]] = field(default_factory=list)
    """Held-out prompts as evaluation.jsonl has them: `prompt`, and by model `answers`, `scores`, `qualities`. Those of
    `samples` where there are none."""
    samples: list[dict[str, Any]] = field(default_factory=list)
    """In the same form, of the ppo stage itself."""

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def rounds(self) -> list[dict[str, Any]]:
        rounds: list[dict[str, Any]] = self.status.get("rounds", [])
        return rounds

    @property
    def warnings(self) -> list[str]:
        """The faults and missing folders for a terminal, in a line each: folder or file, line or key, and the cure."""
        faults = [f"{self.folder}/{fault}" for fault in self.faults if not fault.is_usual]
        return missing_folders(flat(self.status)) + faults

    @property
    def seconds(self) -> float | None:
        """Of all stages of all rounds, as far as they are known."""
        found = [entry["seconds"] for entry in flat(self.status).values() if entry["seconds"] is not None]
        return float(sum(found)) if found else None

    @cached_property
    def evidence(self) -> Evidence:
        """What held-out answers say of PPO against SFT."""
        found = gather(self.evaluation, self.answers, self.samples, self.metrics("ppo"))
        return replace(found, paid_by=paid_by(self.settings.get("ppo")))

    def metrics(self, stage: str) -> dict[str, Any]:
        """Final metrics of a stage, empty where the run does not have it."""
        return self.stages[stage].metrics if stage in self.stages else {}


def read_run(run_dir: str | Path) -> Run:
    """All that the report shows. What cannot be read is in `faults`, and left out.

    Raises SettingsError where there is nothing to report on: `run_dir` is not the folder of a run, or its summary.json
    is damaged and it has no stages.
    """
    run_dir = Path(run_dir)
    faults: list[Fault] = []
    again = shlex.join(["rlhf", "run", str(run_dir / "recipe.yaml"), "--run-dir", str(run_dir)])
    files = Reader(
        run_dir, faults, f"put it back as it was, or move its folder away and `{again}` makes the stage anew"
    )
    status = nested(_status(files))
    stages = {name: _stage(name, entry, files) for name, entry in status["stages"].items()}
    recipe, settings = _recipe(files)
    evaluation, answers = _evaluation(files, stages)
    samples = [_as_evaluated(sample) for sample in stages["ppo"].samples] if "ppo" in stages else []
    return Run(
        run_dir,
        status,
        stages,
        evaluation,
        faults,
        recipe,
        settings,
        _sweep(files, stages),
        answers or samples,
        samples,
    )


def _status(files: Reader) -> dict[str, dict[str, Any]]:
    """As `run_status` has it; where summary.json is missing or damaged, what the folders of stages say."""
    left = "delete it, and " if (files.folder / "summary.json").exists() else ""
    cure = f"{left}the next `rlhf run` writes it anew"
    instead = "; what is said of the stages is from their folders"
    entries = files.whole("stages", "summary.json", shapes.summary, cure, must=True, instead=instead)
    if entries is None:
        entries = _entries_of_folders(files)
    if not entries:
        return run_status(files.folder)  # which says what is wrong
    return with_progress(files.folder, entries)


def _entries_of_folders(files: Reader) -> dict[str, Entry]:
    """The newest finished folder of each stage, the newest of all where none is finished."""
    found: dict[str, Entry] = {}
    sealed: dict[Path, bool] = {}
    for folder in stage_folders(files.folder):
        try:
            sealed[folder] = Artifact(folder).sealed
        except SettingsError as error:
            told = str(error).removeprefix(str(folder)).partition("; ")[0]
            files.add("stages", folder.name, f"{told}, and is left out", "change its mode")
    for folder in sorted(sealed, key=lambda folder: (sealed[folder], _changed(folder))):
        manifest = Reader(folder, [], "").whole("stages", "manifest.json", shapes.shape(shapes.Manifest)) or {}
        model = f"{folder.name}/model" if (folder / "model").is_dir() else None
        state = stage_status(folder).get("state")
        status = "done" if sealed[folder] else state if state in ("waiting", "failed", "stopped") else "running"
        found[folder.name.partition("-")[0]] = Entry(status, folder.name, model, None, manifest.get("metrics", {}))
    return found


def _changed(folder: Path) -> float:
    """When it was finished, or something last came into it."""
    manifest = folder / "manifest.json"
    return (manifest if manifest.is_file() else folder).stat().st_mtime


def _stage(name: str, entry: dict[str, Any], run: Reader) -> Stage:
    folder = entry["folder"]
    if not folder:
        return Stage(name, entry)
    files = Reader(run.folder / folder, run.faults, run.cure, f"{folder}/")
    manifest = files.whole("made", "manifest.json", shapes.shape(shapes.Manifest)) or {}
    files.sealed = {file: manifest.get("sizes", {}).get(file) for file in manifest.get("files", {})}
    files.finished = bool(manifest) or (entry["status"] == "done" and "message" not in entry)
    rows = files.lines("curves", "metrics.jsonl", shapes.logged)
    found: dict[str, Any] = {}
    if name == "pretrain":
        found["samples"] = files.lines("curves", "samples.jsonl", shapes.shape(shapes.Text))
        found["corpus"] = files.whole("made", "corpus.json", shapes.shape(shapes.Corpus)) or {}
    elif name == "reward" and files.finished:
        found["card"] = files.whole("card", "card.json", shapes.shape(shapes.Card))
        found["worst"] = files.lines("card", "worst_pairs.jsonl", shapes.shape(shapes.Worst))
    elif name == "ppo":
        found["samples"] = files.lines("answers", "samples.jsonl", shapes.shape(shapes.Sample))
    return Stage(name, entry, Artifact(files.folder), manifest, rows, **found)


def _recipe(files: Reader) -> tuple[str | None, dict[str, Any]]:
    path, cure = files.folder / "recipe.yaml", "put it back as it was: the run wrote it"

    def read(text: bytes) -> tuple[str, dict[str, Any]]:
        try:
            config = read_yaml(str(path), {}, "recipe")
        except SettingsError as error:
            raise Damaged(str(error).removeprefix(str(path))) from None
        settings: Any = OmegaConf.to_container(config) if isinstance(config, DictConfig) else {}
        if all(part is None for part in settings.values()):  # OmegaConf makes a key of a lone word
            raise Damaged(": holds no settings")
        return text.decode("utf-8-sig"), {str(name): part for name, part in settings.items()}

    return files.whole("made", "recipe.yaml", read, cure, must=True, parse=bytes) or (None, {})


def _evaluation(files: Reader, stages: dict[str, Stage]) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """The figures and the answers of the run's evaluation, as far as they are whole, and of the models that it has."""
    cure = f"`{shlex.join(['rlhf', 'eval', str(files.folder)])}` makes it anew"
    figures, answers, name = None, [], FIGURES
    try:
        if found := load_figures(files.folder):
            shapes.of_evaluation(found)
            if not _is_of(found["models"], stages):
                raise Damaged(" is of other models than those that the run has now")
            figures, name = found, ANSWERS
            answers = load_answers(files.folder, found["answers_digest"])
            for row in answers:
                shapes.of_evaluation(row)
    except Damaged as fault:
        files.add("evaluation" if name == FIGURES else "answers", name, f"{fault}, and is left out", cure)
        answers = []
    return figures, answers


def _sweep(files: Reader, stages: dict[str, Stage]) -> dict[str, Any] | None:
    """The run's last sweep; None where there was none."""
    cure = "the same `rlhf pretrain --sweep` writes it anew, and trains nothing again"
    found = files.whole("sweep", SWEEP, shapes.sweep, cure)
    if not found or not found["rows"]:
        return None
    read = {stage.folder: stage.rows for stage in stages.values()}
    for row in found["rows"]:
        folder = row["folder"]
        if row["val_loss"] is not None and folder and folder not in read:
            variant = Reader(files.folder / folder, files.faults, files.cure, f"{folder}/")
            read[folder] = variant.lines("sweep", "metrics.jsonl", shapes.logged)
        row["losses"] = sorted(
            {row["step"]: row["val_loss"] for row in read.get(folder, []) if "val_loss" in row}.items()
        )
    return found


def _is_of(models: dict[str, Any], stages: dict[str, Stage]) -> bool:
    """Whether the models are those that the stages have now, or had before where they are not finished, as far as a
    stage made them. Their folders bear keys."""
    for name, figures in models.items():
        stage = stages.get(MADE_BY[name])
        is_of_stage = stage is not None and figures["model"].startswith(f"{stage.name}-")
        if stage and stage.folder and is_of_stage and figures["model"] not in (stage.folder, stage.finished_before):
            return False
    return True


def _as_evaluated(sample: dict[str, Any]) -> dict[str, Any]:
    """A row of the ppo stage's samples.jsonl in the form of evaluation.jsonl."""
    names = [name for name in ("sft", "ppo") if name in sample]
    return {
        "prompt": sample["prompt"],
        "answers": {name: sample[name] for name in names},
        "scores": {name: sample[f"{name}_score"] for name in names if f"{name}_score" in sample},
        "qualities": {name: sample[f"{name}_quality"] for name in names if f"{name}_quality" in sample},
    }
