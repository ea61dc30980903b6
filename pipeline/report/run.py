"""What a report reads of a run folder: its stages with their metrics, and the evaluation where there is one."""

import json
import math
import shlex
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf.data.errors import SettingsError
from rlhf.pipeline.report.curves import Line, curves
from rlhf.pipeline.report.ppo_verdict import Evidence, gather
from rlhf.pipeline.summary import flat, missing_folders, nested, outcome, run_status
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
    artifact: Artifact | None
    manifest: dict[str, Any]
    """Empty until it is finished."""

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
    def folder(self) -> str | None:
        return self.artifact.folder.name if self.artifact else None

    @cached_property
    def metrics(self) -> dict[str, Any]:
        """The final ones that are there and finite, with `guessing_loss`, the loss of a model that knows nothing."""
        found = {name: value for name, value in self.entry["metrics"].items() if _is_told(value)}
        if vocab_size := found.get("vocab_size"):
            found["guessing_loss"] = math.log(vocab_size)
        return found

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """Of metrics.jsonl."""
        return self.artifact.metrics if self.artifact else []

    @cached_property
    def curves(self) -> dict[str, Line]:
        return curves(self.rows)

    @cached_property
    def samples(self) -> list[dict[str, Any]]:
        return self.artifact.samples if self.artifact else []

    @cached_property
    def card(self) -> dict[str, Any] | None:
        """The report card of a finished reward model."""
        found = self._json("card.json") if self.manifest else None
        return found if isinstance(found, dict) else None

    @cached_property
    def corpus(self) -> dict[str, Any]:
        """What became of the documents of pretraining."""
        return self._json("corpus.json") or {}

    def _json(self, name: str) -> Any:
        path = self.artifact.folder / name if self.artifact else None
        return read_json(path) if path and path.is_file() else None


@dataclass(frozen=True)
class Run:
    """A run folder, read once."""

    folder: Path
    status: dict[str, Any]
    stages: dict[str, Stage]
    evaluation: dict[str, Any] | None
    """evaluation.json, if it is there, whole, and of the models that the run has now."""
    faults: dict[str, str]
    """By its name a file of the evaluation that is not taken, with what is wrong with it."""
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
        cure = f"`rlhf eval {shlex.quote(str(self.folder))}` makes it anew"
        faults = [f"{self.folder / name}{what}, and is left out; {cure}" for name, what in self.faults.items()]
        return missing_folders(flat(self.status)) + faults

    @property
    def seconds(self) -> float:
        """Of all stages of all rounds."""
        return float(sum(entry["seconds"] or 0 for entry in flat(self.status).values()))

    @property
    def recipe(self) -> str | None:
        path = self.folder / "recipe.yaml"
        return path.read_text(encoding="utf-8") if path.is_file() else None

    @cached_property
    def evidence(self) -> Evidence:
        """What held-out answers say of PPO against SFT."""
        return gather(self.evaluation, self.answers, self.samples, self.metrics("ppo"))

    def metrics(self, stage: str) -> dict[str, Any]:
        """Final metrics of a stage, empty where the run does not have it."""
        return self.stages[stage].metrics if stage in self.stages else {}


def read_run(run_dir: str | Path) -> Run:
    """Raises RefusedError where `run_dir` is not the folder of a run, or what a stage wrote into it is damaged."""
    run_dir = Path(run_dir)
    status = nested(run_status(run_dir))
    stages = {name: _stage(name, entry, run_dir) for name, entry in status["stages"].items()}
    evaluation, answers, faults = None, [], {}
    try:
        evaluation = load_figures(run_dir)
    except Damaged as fault:
        faults[FIGURES] = str(fault)
    if evaluation and not _is_of(evaluation["models"], stages):
        evaluation, faults[FIGURES] = None, " is of other models than those that the run has now"
    try:
        answers = load_answers(run_dir, evaluation["answers_digest"]) if evaluation else []
    except Damaged as fault:
        faults[ANSWERS] = str(fault)
    samples = [_as_evaluated(sample) for sample in stages["ppo"].samples] if "ppo" in stages else []
    return Run(run_dir, status, stages, evaluation, faults, answers or samples, samples)


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise SettingsError(f"{path}: is damaged; delete it, and what wrote it makes it anew") from None


def _stage(name: str, entry: dict[str, Any], run_dir: Path) -> Stage:
    artifact = Artifact(run_dir / entry["folder"]) if entry["folder"] else None
    return Stage(name, entry, artifact, artifact.manifest if artifact and artifact.sealed else {})


def _is_told(value: Any) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def _is_of(models: dict[str, Any], stages: dict[str, Stage]) -> bool:
    """Whether the models are those that the stages have now, as far as a stage made them. Their folders bear keys."""
    for name, figures in models.items():
        stage = MADE_BY[name]
        folder = stages[stage].folder if stage in stages else None
        if folder and figures["model"].startswith(f"{stage}-") and figures["model"] != folder:
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
