"""The run: check everything, then stage by stage plan, train, and write down how far it is."""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from shutil import rmtree
from time import monotonic

from rlhf.data.errors import ConnectionLost, Diverged, RefusedError, SettingsError
from rlhf.pipeline import gates
from rlhf.pipeline.clean import Item, alone_in_stages, delete, run_temporaries
from rlhf.pipeline.errors import RunFailed, RunStopped, begun
from rlhf.pipeline.evaluation import keep_current
from rlhf.pipeline.launch import ERROR_LOG, NO_TRACEBACK, run_stage
from rlhf.pipeline.lock import LOCK, held
from rlhf.pipeline.plan import Scope, Step, make_plan, plan_stage
from rlhf.pipeline.preflight import Say, refuse_bad_input, refuse_foreign_files
from rlhf.pipeline.progress import waiting
from rlhf.pipeline.recipe import Recipe, to_yaml
from rlhf.pipeline.summary import (
    Entry,
    duration,
    headline,
    in_round,
    rated_elsewhere,
    rated_now,
    read_summary,
    stage_status,
    write_summary,
)
from rlhf.stages.alone import alone_in
from rlhf.stages.artifact import Artifact, remove_temporaries
from rlhf.stages.checkpoints import CannotWrite, newest_checkpoint
from rlhf.stages.disk import replace_text
from rlhf.stages.evaluation.records import FIGURES
from rlhf.stages.secrets import mask
from rlhf.stages.settings_file import write_settings
from rlhf.stages.signals import exit_on_signal, handled

SECONDS_FOR_ANOTHER = 40.0
"""Patience with another run in the folder: the stage of a run that was killed may still be saving."""
_TELL_HOW_TO_GO_ON = [kind.__name__ for kind in (CannotWrite, ConnectionLost, Diverged)]
"""Each is a `ToldHowToGoOn`, whose text says all."""


def run(
    recipe: Recipe,
    run_dir: Path,
    scope: Scope | None = None,
    say: Say = print,
    source: Path | None = None,
    verify: bool = False,
) -> dict[str, Entry]:
    """Run what the plan says, reuse the rest; returns the entries of summary.json.

    `source` is the file that the recipe was read from; it is never written over. With `verify` the files of what is
    reused or started from are hashed first.
    Raises RefusedError before anything is trained or written, RunFailed when a stage breaks or the reward model
    fails a gate, and RunStopped (a SystemExit) after a signal; in the last two cases running again resumes.
    """
    scope = scope or Scope()
    with checked([recipe], run_dir, scope, say, source, verify) as (lock, [steps]):
        entries, changed, failed = run_steps(steps, recipe, run_dir, scope, lock, say, recipe.evaluate)
        if changed or _report_is_old(run_dir):
            render_report(run_dir)
    if failed:
        raise RunFailed(gates.refusal(failed, str(run_dir / "report.html")))
    return entries


@contextmanager
def checked(
    recipes: Sequence[Recipe], run_dir: Path, scope: Scope, say: Say, source: Path | None, verify: bool = False
) -> Iterator[tuple[int, list[list[Step]]]]:
    """Have the run folder to ourselves, with everything checked that can be: the lock, and each recipe's plan."""

    def plan() -> list[list[Step]]:
        plans = [make_plan(recipe, run_dir, scope) for recipe in recipes]
        for recipe in recipes:
            refuse_foreign_files(run_dir, recipe, source)
        return plans

    with ExitStack() as stack:
        stack.enter_context(handled(exit_on_signal))
        lock = stack.enter_context(held(run_dir, SECONDS_FOR_ANOTHER, say)) if run_dir.is_dir() else None
        with waiting("looking at data and models"):
            plans = plan()
            refuse_bad_input([step for steps in plans for step in steps], recipes[0], run_dir, say, verify)
        if lock is None:  # only now: a refused run leaves no folder behind
            _create(run_dir)
            lock = stack.enter_context(held(run_dir, SECONDS_FOR_ANOTHER, say))
            if any(path.name != LOCK for path in run_dir.iterdir()):  # another run was here first
                plans = plan()
        with suppress(RefusedError), alone_in_stages(run_dir):
            for path in run_temporaries(run_dir):  # of a run that was killed; nobody else writes here now
                delete(Item(path, "", is_work=False))
        with begun():
            yield lock, plans


def run_steps(
    steps: list[Step], recipe: Recipe, run_dir: Path, scope: Scope, lock: int, say: Say, evaluate: bool = False
) -> tuple[dict[str, Entry], bool, list[str]]:
    """Carry out a plan: the entries of summary.json, whether anything changed, and the gates that ended it early.

    With `evaluate` the models are measured after each stage that was trained, and where a killed run did not do it.
    """
    earlier = read_summary(run_dir)
    entries = _first_entries(steps, recipe, run_dir, earlier)
    changed = write_summary(run_dir, entries)  # first: it marks the folder, and the files beside it, as ours
    write_recipe(run_dir, recipe)
    made: dict[str, Path | None] = {}
    to_evaluate = evaluate
    for step in steps:
        rewards = in_round("reward", step.round)
        if step.stage == "ppo" and step.action != "skip" and rewards in entries:
            failed = entries[rewards].metrics.get("gates_failed", [])
            if failed:
                return entries, changed, failed
        if step.action in ("run", "skip") and step.folder is None:  # its inputs exist now, and with them its key
            step = plan_stage(recipe, step.stage, run_dir, made, scope, step.round) or step
        if step.action != "skip" or scope.alone is None:
            say(_describe(step))
        for note in step.notes:
            say(f"{step.name}: {note}")
        if step.action in ("run", "resume"):
            changed = True
            if not _train(step, recipe, run_dir, entries, lock, say):
                return entries, changed, []
            if evaluate and step.stage in ("pretrain", "sft", "ppo"):  # which make a model that answers
                keep_current(run_dir, entries, recipe, step.stage, lock, say)
                to_evaluate = False
        elif step.action == "reuse":
            assert step.folder is not None
            # A kill after the seal may have left them.
            rmtree(step.folder / "checkpoints", ignore_errors=True)
            remove_temporaries(step.folder)
            entries[step.name] = _finished(step, recipe, run_dir, earlier.get(step.name, entries[step.name]))
            changed |= write_summary(run_dir, entries)
        made.pop(step.stage, None)
        if step.action != "skip":
            made[step.stage] = step.folder
    if to_evaluate:  # of a run that was killed meanwhile
        changed |= keep_current(run_dir, entries, recipe, recipe.stages[-1], lock, say)
    return entries, changed, []


def _train(step: Step, recipe: Recipe, run_dir: Path, entries: dict[str, Entry], lock: int, say: Say) -> bool:
    """Run one stage to its seal, and keep summary.json true whatever happens; False where it waits for people."""
    stage, folder, settings = step.name, step.folder, step.settings
    assert folder is not None
    assert settings is not None
    with alone_in(folder):  # else it is refused before anything there is another
        write_settings(folder, settings)
    before = _seconds(folder, entries[stage])
    if (told := rated_now(folder)) and told["step"] < told["steps"] and not rated_elsewhere(folder):
        # no need to start it
        entries[stage] = Entry("waiting", folder=folder.name, seconds=before)
        write_summary(run_dir, entries)
        return False
    entry = entries[stage] = Entry("running", folder=folder.name, seconds=before)
    write_summary(run_dir, entries)
    began = monotonic()

    def ended(status: str) -> float:
        """Seconds of this attempt."""
        taken = monotonic() - began
        seconds = round((before or 0.0) + taken, 2)
        entries[stage] = replace(entry, status=status, seconds=seconds)
        write_summary(run_dir, entries)
        _keep_in_folder(folder, status, seconds)
        return taken

    try:
        run_stage(step.stage, folder, recipe, lock)
        if not Artifact(folder).sealed and (told := stage_status(folder)).get("state") == "waiting":
            ended("waiting")
            say(f"{stage}: waiting: {told['message']}")
            return False
        if not Artifact(folder).sealed:
            raise RunFailed("it ended without sealing its folder (no manifest.json)")
    except RefusedError:
        ended("failed")
        raise
    except (SystemExit, KeyboardInterrupt) as stop:
        code = 130 if isinstance(stop, KeyboardInterrupt) else stop.code
        if code not in (130, 143):
            ended("failed")
            ended_so = f"{stage}: ended itself with code {code}"
            raise RunFailed(f"{ended_so}; {_how_to_go_on(folder, ended_itself=True)}") from stop
        if Artifact(folder).sealed:  # the signal came too late to interrupt it
            ended("done")
            entries[stage] = _finished(step, recipe, run_dir, entries[stage])
            write_summary(run_dir, entries)
            raise RunStopped(f"{stage}: done; stopped after it; run again to go on", int(code)) from None
        is_told = stage_status(folder).get("state") == "stopped"  # the stage said itself where it goes on
        ended("stopped")
        raise RunStopped(
            "" if is_told else f"{stage}: stopped; {_how_to_go_on(folder, is_stopped=True)}", int(code)
        ) from None
    except Exception as error:
        ended("failed")
        message = mask(str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}")
        kind, _, said = message.partition(": ")  # of a stage with processes of its own, its message alone is known
        if kind in _TELL_HOW_TO_GO_ON:
            raise RunFailed(f"{stage}: {said}{_log_of(folder)[0]}") from error
        raise RunFailed(f"{stage}: {message}; {_how_to_go_on(folder)}") from error
    taken = ended("done")
    entries[stage] = _finished(step, recipe, run_dir, entries[stage])
    write_summary(run_dir, entries)
    say(f"{stage}: done in {duration(taken)}  {headline(stage, entries[stage].metrics)}".rstrip())
    return True


def _keep_in_folder(folder: Path, status: str, seconds: float) -> None:
    """Have status.json say how the stage ended where the stage could not, as when it was still importing, and how long
    it took."""
    with suppress(RefusedError, OSError), alone_in(folder):  # not over what another process says that trains there
        told = stage_status(folder)
        state = status if told.get("state", "running") == "running" else told["state"]
        replace_text(folder / "status.json", json.dumps(told | {"state": state, "seconds": seconds}))


def _seconds(folder: Path, entry: Entry) -> float | None:
    """What the stage took so far."""
    return entry.seconds if entry.folder == folder.name else stage_status(folder).get("seconds")


def _describe(step: Step) -> str:
    where = f" {step.folder.name}" if step.folder else ""
    # which checkpoints were passed over the stage says itself
    reason = "; ".join(part for part in step.reason.split("; ") if not part.startswith("passed over"))
    return f"{step.name}: {step.action}{where} ({reason})"


def _how_to_go_on(folder: Path, is_stopped: bool = False, ended_itself: bool = False) -> str:
    """Where a stage that did not come to its end goes on. There is something to correct where the stage broke, and none
    where its process was killed, which leaves no traceback of the stage."""
    log, is_traceback = _log_of(folder)
    to_correct = (is_traceback if log else ended_itself) and not is_stopped
    cure = "correct it and run again" if to_correct else "run again"
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        return f"no checkpoint yet{log}; {cure}"
    new = ", or starts over in a new folder if data, code or a setting of the result was changed" if to_correct else ""
    return f"state is kept in {folder}{log}; {cure}: it goes on from step {checkpoint.step}{new}"


def _log_of(folder: Path) -> tuple[str, bool]:
    """Where what a stage left behind is to be read, nothing if it is nowhere, and whether that is its traceback."""
    path = folder / ERROR_LOG
    if not path.exists():
        return "", False
    is_traceback = not path.read_text(encoding="utf-8").startswith(NO_TRACEBACK)
    return f" ({'traceback' if is_traceback else 'what its processes said'} in {path})", is_traceback


def _first_entries(steps: list[Step], recipe: Recipe, run_dir: Path, earlier: Mapping[str, Entry]) -> dict[str, Entry]:
    """What summary.json says before the first stage starts; stages of other recipes drop out."""
    entries = {}
    for step in steps:
        old = earlier.get(step.name)
        same = old is not None and step.folder is not None and old.folder == step.folder.name
        entries[step.name] = replace(old, status="planned") if old and same else Entry("planned")
        if step.action == "reuse":
            entries[step.name] = _finished(step, recipe, run_dir, entries[step.name])
    return entries


def _finished(step: Step, recipe: Recipe, run_dir: Path, old: Entry) -> Entry:
    """The entry of a sealed stage; a reward model is held against the recipe's bars as they are now."""
    assert step.folder is not None
    artifact = Artifact(step.folder)
    metrics = artifact.manifest["metrics"]
    if step.stage == "reward" and recipe.reward and (failed := gates.failures(recipe.reward, metrics)):
        metrics = metrics | {"gates_failed": failed}
    return Entry(
        "done",
        folder=step.folder.name,
        model=artifact.model.relative_to(run_dir).as_posix() if step.stage != "feedback" else None,
        seconds=_seconds(step.folder, old),
        metrics=metrics,
    )


def _create(run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--run-dir {run_dir}: cannot be made: {error.strerror}; choose another") from None


def write_recipe(run_dir: Path, recipe: Recipe) -> None:
    """Replace recipe.yaml, unless it says the same already."""
    path, text = run_dir / "recipe.yaml", to_yaml(recipe)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        replace_text(path, text)


def _report_is_old(run_dir: Path) -> bool:
    """Whether report.html is of before the last change, as after a signal while it was drawn."""
    report, shown = run_dir / "report.html", [run_dir / "summary.json", run_dir / FIGURES]
    changed = max(path.stat().st_mtime_ns for path in shown if path.is_file())
    return not report.is_file() or report.stat().st_mtime_ns < changed


def render_report(run_dir: Path) -> None:
    """Write report.html; RunFailed if that breaks."""
    from rlhf.pipeline import report  # matplotlib takes its time

    try:
        with waiting("drawing the report"):
            report.render(run_dir)
    except Exception as error:
        told = error if isinstance(error, RefusedError) else f"{type(error).__name__}: {error}"
        again = shlex.join(["rlhf", "report", str(run_dir)])
        raise RunFailed(f"report: {told}; the stages are finished, `{again}` tries again") from error
