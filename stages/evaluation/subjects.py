"""Which models of a run are evaluated, and whether they are whole. No torch."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf.data.errors import SettingsError
from rlhf.stages.artifact import Artifact, model_digest
from rlhf.stages.evaluation.places import model_as_read
from rlhf.stages.evaluation.records import NAMES, read_figures
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.settings_file import read_settings, settings_in


@dataclass(frozen=True)
class Subject:
    """A model that is evaluated."""

    reference: str
    """Folder or hub id."""

    @property
    def made_by(self) -> Artifact | None:
        """The sealed stage whose model it is."""
        folder = Path(self.reference)
        artifact = Artifact(folder.parent)
        return artifact if folder.name == "model" and artifact.sealed else None

    @property
    def stage(self) -> str | None:
        """Name of that stage."""
        return self.made_by.manifest["stage"] if self.made_by else None

    @property
    def name(self) -> str:
        """The stage's folder, or the reference as it is."""
        return self.made_by.folder.name if self.made_by else self.reference

    @property
    def digest(self) -> str:
        return model_digest(self.reference, "evaluation")

    def started_from(self, run_dir: Path) -> "Subject":
        """The model that its stage, sft or ppo, started from. Raises SettingsError as `_now` does."""
        assert self.made_by is not None
        folder = self.made_by.folder
        model = settings_in(folder).get("model")
        if not isinstance(model, str):
            raise SettingsError(f"{folder / 'settings.yaml'}: names no model to start from; put it back as it was")
        return Subject(_now(f"{self.stage}.model", model, folder, run_dir))

    def refuse_damage(self) -> None:
        """Raise SettingsError, with the cure, where its files are not all there, or not as its stage sealed them."""
        if self.made_by is not None:
            self.made_by.refuse_damage(hashes=False, below="model/")
        elif Path(self.reference).is_dir() and self.digest and not any(Path(self.reference).glob("*.safetensors")):
            raise SettingsError(
                f"{self.reference}: holds no weights (*.safetensors); restore them, or write it anew with "
                "save_pretrained"
            )


def in_run(reference: str, run_dir: Path) -> str:
    """A model as it is named in settings: what a stage of this run made lies in the run, which may have been moved or
    copied since. Raises SettingsError where it does not: what lies at its old place is another run's.
    """
    folder = Path(reference)
    if not folder.is_absolute():
        return reference
    own = run_dir.absolute() / folder.parent.name / folder.name
    if own.is_dir():
        return str(own)
    if folder.parent.name in _own_folders(run_dir):
        raise missing_stage(run_dir, folder.parent.name)
    return reference


def _now(name: str, reference: str, folder: Path, run_dir: Path) -> str:
    """Where a model lies that the finished stage in `folder` read, by its setting `stage.setting`. Raises
    SettingsError as `in_run` and `model_as_read` do."""
    return in_run(model_as_read(name, reference, folder), run_dir)


def missing_stage(run_dir: Path, name: str) -> SettingsError:
    """Says that what a finished stage made is not, or not whole, in its run any more."""
    again = shlex.join(["rlhf", "run", str(run_dir / "recipe.yaml"), "--run-dir", str(run_dir)])
    return SettingsError(
        f"{run_dir}: the folder {name} of this run is not finished or missing; copy it whole from the run that this is "
        f"a copy of, or `{again}` makes it anew"
    )


def _own_folders(run_dir: Path) -> set[str]:
    """Of the finished stages of all rounds, as summary.json names them."""
    path = run_dir / "summary.json"
    if not path.is_file():
        return set()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        entries = [entry for stages in (content["stages"], *content.get("rounds", [])) for entry in stages.values()]
        return {entry["folder"] for entry in entries if entry["status"] == "done" and entry["folder"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SettingsError(f"{path}: not a summary of a run ({error}); delete it and run again") from None


def find_subjects(run_dir: Path, done: Mapping[str, Path]) -> dict[str, Subject]:
    """The models to compare, in the order of NAMES, given the sealed folders of finished stages (of the last round).

    sft is what PPO started from, and base what SFT started from, whichever stage or hub made them.
    """
    found: dict[str, Subject] = {}
    newest = next((stage for stage in ("ppo", "sft", "pretrain") if stage in done), None)
    subject = Subject(str(done[newest].absolute() / "model")) if newest else None
    if subject and newest == "ppo":
        found["ppo"] = subject
        while subject and subject.stage == "ppo":  # a later round may start from the round before
            subject = subject.started_from(run_dir)
        newest = "sft"
    if subject and newest == "sft":
        found["sft"] = subject
        subject = subject.started_from(run_dir) if subject.stage == "sft" else None
    if subject:
        found["base"] = subject
    return {name: found[name] for name in NAMES if name in found}


def ppo_settings(folder: Path, run_dir: Path) -> PPOSettings:
    """Those of a ppo stage, with the reward models where they are now. Raises SettingsError as `_now` does."""
    settings = read_settings(folder, PPOSettings)

    def now(name: str, model: str | None) -> str | None:
        return model and _now(f"ppo.{name}", model, folder, run_dir)

    specs = [
        spec.model_copy(update={"model": now(f"rewards.{n}", spec.model)}) for n, spec in enumerate(settings.rewards)
    ]
    reward_model = now("reward_model", settings.reward_model)
    return settings.model_copy(update={"reward_model": reward_model, "rewards": specs})


def reward_models(settings: PPOSettings) -> list[str]:
    """The models that score answers."""
    return [model for model in (settings.reward_model, *(spec.model for spec in settings.rewards)) if model is not None]


def refuse_damage(run_dir: Path, done: Mapping[str, Path]) -> None:
    """Raise SettingsError, with the cure, where something that an evaluation of these stages opens is not there, or not
    as it was sealed. No model is loaded for that."""
    subjects = find_subjects(run_dir, done)
    for subject in subjects.values():
        if subject.made_by is not None:
            subject.made_by.refuse_damage(hashes=False, below="settings.yaml")
    scorers = [str(done["reward"].absolute() / "model")] if "sft" in subjects and "reward" in done else []
    if "ppo" in subjects:
        scorers = reward_models(ppo_settings(done["ppo"], run_dir))
    for model in [*subjects.values(), *map(Subject, scorers)]:
        model.refuse_damage()


def is_current(run_dir: Path, done: Mapping[str, Path]) -> bool:
    """Whether the run's evaluation is of the models that are there now."""
    models = (read_figures(run_dir) or {"models": {}})["models"]
    now = {name: subject.digest for name, subject in find_subjects(run_dir, done).items()}
    return {name: figures["digest"] for name, figures in models.items()} == now
