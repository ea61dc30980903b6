"""What the orchestrator's tests are made of: tiny data, and stages that only pretend to train."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlhf.pipeline.recipe import section_class
from rlhf.stages.artifact import identify, seal
from rlhf.stages.evaluation.config import EvaluationSettings
from rlhf.stages.evaluation.subjects import find_subjects
from rlhf.stages.settings_file import read_settings

SHOWN = (
    "text_perplexity", "response_perplexity", "kl", "length", "eos_share", "distinct_2", "repetition", "refusal_share",
)  # fmt: skip
"""Figures of an evaluation that are one number each."""


class FakeStages:
    """Stands in for the four train functions; what they do is written down in `trained`."""

    def __init__(self) -> None:
        self.trained: list[str] = []
        self.in_stage: dict[str, Callable[[Path], None]] = {}
        """Called before a stage would be sealed."""
        self.metrics: dict[str, dict[str, float]] = {}
        """Final metrics of a stage beside its loss."""
        self.alike: set[str] = set()
        """Stages that make the same model whatever their settings are."""
        self.reports = 0
        self.evaluated: list[list[str]] = []
        """The models of each evaluation."""
        self.in_evaluation: Callable[[], None] = lambda: None
        """Called in each."""

    def train(self, stage: str, folder: Path) -> None:
        self.trained.append(stage)
        settings = read_settings(folder, section_class(stage))
        identity = identify(settings)
        (folder / "status.json").write_text('{"state": "running", "step": 3, "steps": 10, "message": ""}')
        if stage in self.in_stage:
            self.in_stage[stage](folder)
        (folder / "model").mkdir(exist_ok=True)
        (folder / "model" / "config.json").write_text(
            json.dumps({"made_by": stage if stage in self.alike else identity.key})
        )
        seal(folder, identity, {"loss": 1.5, **self.metrics.get(stage, {})}, 1, {})
        (folder / "status.json").write_text('{"state": "done", "step": 10, "steps": 10, "message": ""}')

    def evaluate(
        self, run_dir: Path, done: dict[str, Path], asked: EvaluationSettings, say: Callable[[str], None]
    ) -> dict[str, Any]:
        self.in_evaluation()
        subjects = find_subjects(run_dir, done)
        self.evaluated.append(list(subjects))
        figures = dict.fromkeys(("score", "quality", "kl_interval", *SHOWN))
        models = {name: figures | {"model": one.name, "digest": one.digest} for name, one in subjects.items()}
        found = {"form": asked.form, "models": models, "pairs": [], "best_of_n": None, "tasks": None}
        (run_dir / "evaluation.json").write_text(json.dumps(found))
        (run_dir / "evaluation.jsonl").write_text("")
        return found

    def render(self, run_dir: Path) -> Path:
        self.reports += 1
        (run_dir / "report.html").write_text("report")
        return run_dir / "report.html"


ROWS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": "one two three"}, {"text": "four five six"}],
    "demonstrations": [{"prompt": "a", "response": "b"}, {"prompt": "c", "response": "d"}],
    "rankings": [{"prompt": "a", "chosen": "b", "rejected": "c"}, {"prompt": "d", "chosen": "e", "rejected": "f"}],
    "prompts": [{"prompt": "a"}, {"prompt": "b"}],
}


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_recipe(folder: Path, **content: Any) -> None:
    (folder / "recipe.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(content)))


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file below a folder with its bytes and its time of change."""
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}
