"""What a run would do with each stage, and why: no folder, run; no manifest in it, resume; sealed, reuse."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

from rlhf.data.errors import RefusedError, SettingsError
from rlhf.data.sources import Source
from rlhf.pipeline.differences import UPSTREAM, differences, identity_of, unheard, why_new
from rlhf.pipeline.lock import holder_of
from rlhf.pipeline.recipe import Recipe
from rlhf.pipeline.references import models_of, newest_sealed, with_models
from rlhf.pipeline.summary import as_sealed, in_round, rated_now, read_summary, stage_status, with_progress
from rlhf.stages.artifact import STEPS, Artifact, Identity, data_digests, identify, input_digest
from rlhf.stages.checkpoints import newest_checkpoint
from rlhf.stages.disk import refuse_other_than_utf8
from rlhf.stages.feedback.config import RANKINGS, FeedbackSettings
from rlhf.stages.settings import StageSettings, nearest

UPSTREAM_LATER = {("feedback", "model"): "ppo", ("feedback", "earlier"): "feedback"}
"""Which stage fills in what in later rounds, where that differs from UPSTREAM."""
ROUND = ("feedback", "reward", "ppo")
"""What is gone through again in each round."""
FORCED = "--force; the earlier result is kept"
"""Why a stage runs that was finished."""

Made = Mapping[str, Path | None]
"""Stages with a result: its sealed folder, or None where the result is still to be made."""


@dataclass(frozen=True)
class Step:
    """What happens to one stage."""

    stage: str
    action: Literal["run", "resume", "reuse", "skip"]
    reason: str
    settings: StageSettings | None = None
    """With the input models filled in."""
    folder: Path | None = None
    """None where the key depends on an input that is still to be made."""
    identity: Identity | None = None
    round: int = 1
    notes: tuple[str, ...] = ()
    """Which models are meant, and what people said that it will not have."""

    @property
    def name(self) -> str:
        """The stage, with its round from the second one on."""
        return in_round(self.stage, self.round)


@dataclass(frozen=True)
class Scope:
    """Which part of a recipe to run: stages from `first` to `last`, those in `force` anew.

    `first` and `last` are meant in the first round: later ones are run where there is no `last`.
    """

    first: str | None = None
    last: str | None = None
    force: frozenset[str] = field(default_factory=frozenset)

    @property
    def alone(self) -> str | None:
        """The stage that alone is asked for, where it is one."""
        return self.first if self.first == self.last else None

    def check(self, recipe: Recipe) -> None:
        """Refuse stage names that the recipe does not have."""
        for option, stages in (
            ("--from", [self.first]),
            ("--to", [self.last]),
            ("--force", sorted(self.force)),
        ):
            for stage in filter(None, stages):
                if stage not in STEPS:
                    raise SettingsError(f"{option} {stage}: no such stage; {nearest(stage, list(STEPS))}")
                if stage not in recipe.stages:
                    raise SettingsError(f"{stage}: the recipe has no section '{stage}'; add one")
        if not any(self.side(stage) == "inside" for stage in STEPS):
            raise SettingsError(f"--from {self.first} comes after --to {self.last}: no stage to run")
        for stage in self.force:
            if self.side(stage) != "inside":
                raise SettingsError(f"--force {stage}: lies outside of --from and --to; widen them")

    def side(self, stage: str, round_: int = 1) -> Literal["before", "inside", "after"]:
        """Where a stage lies."""
        if round_ > 1:
            return "after" if self.last else "inside"
        place = STEPS.index(stage)
        if self.first and place < STEPS.index(self.first):
            return "before"
        return "after" if self.last and place > STEPS.index(self.last) else "inside"


def make_plan(recipe: Recipe, run_dir: Path, scope: Scope | None = None) -> list[Step]:
    """A step per stage of the run. Takes digests of data and inputs, reads no rows, trains and writes nothing.

    Raises RefusedError for data or models that are not there.
    """
    scope = scope or Scope()
    scope.check(recipe)
    check_run_dir(run_dir)
    made: dict[str, Path | None] = {}
    steps = []
    for round_, stage in [*product([1], STEPS), *product(range(2, recipe.rounds + 1), ROUND)]:
        step = plan_stage(recipe, stage, run_dir, made, scope, round_)
        if step is None:
            continue
        steps.append(step)
        made.pop(stage, None)  # what a round skips, it has not from the round before
        if step.action != "skip":
            made[stage] = step.folder if step.action == "reuse" else None
    return _with_what_force_costs(steps, run_dir) if scope.force else steps


def _with_what_force_costs(steps: list[Step], run_dir: Path) -> list[Step]:
    """The same, the last stage that is forced with a note of the finished ones that wait for its new model."""
    done = {name for name, entry in as_sealed(run_dir, read_summary(run_dir)).items() if entry.status == "done"}
    forced = max((n for n, step in enumerate(steps) if step.reason == FORCED), default=len(steps))
    lost = [step.name for step in steps[forced + 1 :] if step.name in done and step.folder is None]
    if lost:
        note = (
            f"what was made from its earlier result has to be made again, unless the new one is the same: "
            f"{', '.join(lost)}; old results stay, but summary.json does not name them any more"
        )
        steps[forced] = replace(steps[forced], notes=(*steps[forced].notes, note))
    return steps


def with_running(steps: list[Step], run_dir: Path) -> list[Step]:
    """The same, a stage that another run trains at this moment with that as its reason, as `rlhf status` tells it.

    For who only looks: to who has the run folder's lock, what a kill left would seem to be running.
    """
    if all(step.action != "resume" for step in steps):
        return steps
    running = {
        run_dir / entry["folder"]: f", step {entry['step']} of {entry['steps']}" if entry["steps"] else ""
        for entry in with_progress(run_dir, read_summary(run_dir)).values()
        if entry["status"] == "running" and entry["folder"]
    }
    holder = holder_of(run_dir)
    who = "in another rlhf run" + (f" ({holder})" if holder else "")
    return [
        replace(step, reason=f"running{running[step.folder]}, {who}")
        if step.action == "resume" and step.folder in running
        else step
        for step in steps
    ]


def plan_stage(recipe: Recipe, stage: str, run_dir: Path, made: Made, scope: Scope, round_: int = 1) -> Step | None:
    """One stage's step, given the results before it; None if the run does not have this stage."""
    step = _plan_stage(recipe, stage, run_dir, made, scope, round_)
    if step is None:
        return None
    notes: list[str] = []
    if step.action in ("run", "resume") and (section := recipe.section(stage)) is not None:
        notes += _meant(section)
        if isinstance(step.settings, FeedbackSettings):
            notes += unheard(step.settings, step.identity, run_dir, step.reason)
    return replace(step, round=round_, notes=tuple(notes))


def _meant(section: StageSettings) -> Iterator[str]:
    """Which models those are that a recipe names as runs or stages."""
    for (where, named), (_, model) in zip(models_of(section), models_of(with_models(section)), strict=True):
        if model != named:
            name = where.removeprefix(f"{section.stage}.")
            yield f"starts from {model}" if name == "model" else f"its {name} is {model}"


def _plan_stage(recipe: Recipe, stage: str, run_dir: Path, made: Made, scope: Scope, round_: int) -> Step | None:
    settings = recipe.section(stage)
    side = scope.side(stage, round_)
    if settings is None:
        # A recipe for one stage alone finds its inputs among what the run folder holds.
        found = newest_sealed(stage, run_dir) if side == "before" else None
        if found is None:
            return None
        refuse_missing_files(found)
        return Step(stage, "reuse", "the newest one here", folder=found.folder)
    if side != "inside":
        return _outside(stage, settings, recipe, run_dir, made, scope, round_)
    settings, waiting = fill_inputs(settings, recipe, made, run_dir, round_)
    if waiting:
        _find_inputs(settings)
        inputs = " and ".join(waiting)
        return Step(stage, "run", f"its input {inputs} will be new", settings)
    settings, identity = _choose_attempt(settings, run_dir, force=stage in scope.force)
    artifact = Artifact(run_dir / identity.folder_name)
    if _holds(artifact, identity):
        return Step(stage, "reuse", "finished; nothing it depends on changed", settings, artifact.folder, identity)
    if artifact.folder.exists():
        return Step(stage, "resume", _how_far(artifact.folder), settings, artifact.folder, identity)
    reason = FORCED if stage in scope.force and settings.attempt else why_new(identity, run_dir)
    return Step(stage, "run", reason, settings, artifact.folder, identity)


def upstreams_of(recipe: Recipe, round_: int) -> dict[tuple[str, str], str]:
    """Which stage fills in which field of which stage that the recipe leaves empty."""
    return UPSTREAM | (UPSTREAM_LATER | {("ppo", "model"): recipe.ppo_from} if round_ > 1 else {})


def fill_inputs(
    settings: StageSettings, recipe: Recipe, made: Made, run_dir: Path, round_: int = 1
) -> tuple[StageSettings, list[str]]:
    """Settings with empty models and rankings filled in from the stages before; and the stages to be waited for.

    A model that is named as a run or a stage becomes that one's.
    """
    filled: dict[str, Any] = {"round": round_} if settings.stage == "feedback" else {}
    waiting = []
    upstreams = upstreams_of(recipe, round_)
    for name in dict.fromkeys((*settings.input_fields, *settings.data_fields)):
        upstream = upstreams.get((settings.stage, name))
        if upstream is None or getattr(settings, name) is not None:
            continue
        if name not in settings.inputs() and upstream not in recipe.stages:
            continue  # it can do without
        if upstream not in made:
            raise SettingsError(
                f"{settings.stage}.{name}: not set, and {run_dir} has no finished {upstream}; "
                f"name a model folder or hub id, or run {upstream} first"
            )
        folder = made[upstream]
        if folder is None:
            waiting.append(upstream)
        elif upstream == "feedback":
            filled[name] = Source(path=str(folder.absolute() / RANKINGS))
        else:
            filled[name] = str(Artifact(folder.absolute()).model)
    return with_models(settings.model_copy(update=filled)), waiting


def _find_inputs(settings: StageSettings) -> None:
    """Refuse what is not there, for a stage whose key cannot be taken yet."""
    for name, model in settings.inputs().items():
        if model is not None:
            input_digest(name, model, settings.stage)
    data_digests(settings)


def check_run_dir(run_dir: Path) -> None:
    """Refuse a run folder that cannot be one."""
    refuse_other_than_utf8(run_dir, "--run-dir ")
    there = next(path for path in (run_dir, *run_dir.absolute().parents) if os.path.lexists(path))
    if not there.is_dir():
        raise SettingsError(f"--run-dir {run_dir}: {there} is not a folder; choose another")


def _holds(artifact: Artifact, identity: Identity) -> bool:
    """Whether it is sealed with this identity's result; its name holds only part of the key."""
    if not artifact.sealed:
        return False
    found = artifact.manifest.get("key")
    if found != identity.key:
        raise SettingsError(
            f"{artifact.folder}: its manifest.json has the key {found}, but a folder of this name stands for "
            f"{identity.key} (was it copied or renamed?); move it out of the run folder and run again"
        )
    refuse_missing_files(artifact)
    return True


def refuse_missing_files(artifact: Artifact) -> None:
    """Refuse a sealed folder that lost a file. What the files hold is not looked at: a plan must be quick."""
    for name in artifact.manifest["files"]:
        if not (artifact.folder / name).is_file():
            raise SettingsError(
                f"{artifact.folder.name}: {name} is missing since it was sealed; restore it, "
                "or delete the folder to make it anew"
            )


def _outside(
    stage: str, settings: StageSettings, recipe: Recipe, run_dir: Path, made: Made, scope: Scope, round_: int
) -> Step:
    """A stage that is not to be run: its result if there is one; before --from, another recipe's will do."""
    before = scope.side(stage, round_) == "before"
    limit = f"before {scope.first}" if before else f"after {scope.last}"
    identity = None
    try:
        settings, waiting = fill_inputs(settings, recipe, made, run_dir, round_)
        if not waiting:
            settings, identity = _choose_attempt(settings, run_dir)
    except RefusedError:
        pass  # without inputs it has no result either
    if identity and _holds(Artifact(folder := run_dir / identity.folder_name), identity):
        return Step(stage, "reuse", f"{limit}; finished", settings, folder, identity)
    other = newest_sealed(stage, run_dir)
    if not before or other is None:
        return Step(stage, "skip", limit)
    refuse_missing_files(other)
    changes = ", ".join(differences(identity, identity_of(other))) if identity else "other inputs"
    return Step(stage, "reuse", f"{limit}; the newest one here, made differently: {changes}", folder=other.folder)


def _choose_attempt(settings: StageSettings, run_dir: Path, force: bool = False) -> tuple[StageSettings, Identity]:
    """The highest attempt that has a folder, or with `force` the one after it."""
    folders = {path.name for path in run_dir.glob(f"{settings.stage}-*")}
    found = [identify(settings)]
    while found[-1].folder_name in folders:
        found.append(replace(found[0], settings=found[0].settings | {"attempt": settings.attempt + len(found)}))
    place = len(found) - 1 if force else max(len(found) - 2, 0)  # the last one has no folder
    return settings.model_copy(update={"attempt": settings.attempt + place}), found[place]


def _how_far(folder: Path) -> str:
    """How an unfinished stage ended, in the words of `rlhf status`, and where it goes on from its newest checkpoint."""
    if told := rated_now(folder):
        return f"waiting: {told['message']}"
    passed_over: list[str] = []
    checkpoint = newest_checkpoint(folder, passed_over=passed_over.append)
    skipped = "".join(f"; {text}" for text in passed_over)
    told = stage_status(folder)
    ended = {"stopped": "stopped", "failed": "failed", "refused": "failed"}.get(told.get("state", ""), "interrupted")
    if checkpoint is None:
        return f"{ended}{skipped or ' before its first checkpoint'}; starts over"
    steps = told.get("steps")
    return f"{ended}{skipped}; goes on from step {checkpoint.step}" + (f" of {steps}" if steps else "")
