"""Which model a name means, for every command and setting that takes one: of a run, a stage, a folder or the hub."""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf.data.errors import SettingsError
from rlhf.data.hub import refuse_missing_folder, refuse_unknown
from rlhf.stages.artifact import Artifact
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.reward.config import RewardSettings
from rlhf.stages.settings import StageSettings

POLICIES = ("ppo", "sft", "pretrain")
"""Stages with a language model, the best first."""
REWARDS = ("reward",)


def model_at(reference: str, stages: Sequence[str], where: str = "") -> str:
    """The model that is meant: of a run the newest one of the first of `stages` that is finished, of a stage its own.

    What is no folder here may be a hub id, and stays as it is. Raises SettingsError for a folder that is none of
    these, and for what can only be a path; `where` is the option or setting that names it.
    """
    before = f"{where}: " if where else ""
    folder = Path(reference)
    if not folder.is_dir():
        refuse_missing_folder(reference, where)
        return reference
    if any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        return reference
    if Artifact(folder).sealed:
        if not Artifact(folder).model.is_dir():
            raise SettingsError(f"{before}{folder}: this stage makes no model; name one of {', '.join(stages)}")
        return str(Artifact(folder).model)
    if (folder / "settings.yaml").is_file():
        status = shlex.join(["rlhf", "status", str(folder.parent)])
        raise SettingsError(f"{before}{folder}: this stage is not finished; `{status}` shows how far it is")
    for stage in stages:
        if (found := newest_sealed(stage, folder)) is not None:
            return str(found.model)
    raise SettingsError(
        f"{before}{folder}: holds no config.json, and is no stage or run that has a model finished "
        f"({', '.join(stages)})"
    )


def loadable(reference: str, stages: Sequence[str], where: str = "") -> str:
    """The same, where the hub is asked for what is no folder here: before torch is imported, which takes longer."""
    found = model_at(reference, stages, where)
    refuse_unknown(found, where)
    return found


def with_models(settings: StageSettings) -> StageSettings:
    """Settings whose models are folders or hub ids, where they named runs or stages."""
    found: dict[str, Any] = {}
    for name in settings.input_fields:
        reference = getattr(settings, name)
        if reference is not None and name != "tokenizer":
            stages = REWARDS if name == "reward_model" else POLICIES
            found[name] = model_at(reference, stages, f"{settings.stage}.{name}")
    if isinstance(settings, RewardSettings):
        found["compare_with"] = [model_at(model, REWARDS, "reward.compare_with") for model in settings.compare_with]
    if isinstance(settings, PPOSettings):
        found["rewards"] = [
            spec.model_copy(update={"model": spec.model and model_at(spec.model, REWARDS, f"ppo.rewards.{n}")})
            for n, spec in enumerate(settings.rewards)
        ]
    changed = {name: value for name, value in found.items() if value != getattr(settings, name)}
    return settings.model_copy(update=changed) if changed else settings


def models_of(settings: StageSettings) -> Iterator[tuple[str, str]]:
    """Each model or tokenizer that a stage starts from or is compared with, after the setting that names it."""
    for name, reference in settings.inputs().items():
        if reference is not None:
            yield f"{settings.stage}.{name}", reference
    if isinstance(settings, RewardSettings):
        yield from (("reward.compare_with", reference) for reference in settings.compare_with)


def newest_sealed(stage: str, run_dir: Path) -> Artifact | None:
    """The stage's artifact that was finished last, whatever made it."""
    return max(sealed(stage, run_dir), key=lambda a: a.manifest["made_with"]["finished"], default=None)


def sealed(stage: str, run_dir: Path) -> list[Artifact]:
    """The finished folders of a stage in a run."""
    return [a for a in map(Artifact, sorted(run_dir.glob(f"{stage}-*"))) if a.sealed]
