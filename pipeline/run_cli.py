"""`rlhf run`, `plan` and `status`, and each stage as a command of its own."""

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf.data.errors import SettingsError, printable
from rlhf.pipeline.errors import RunFailed
from rlhf.pipeline.tables import in_one_line, show_table

if TYPE_CHECKING:
    from rlhf.pipeline.plan import Scope
    from rlhf.pipeline.recipe import Recipe

PROFILE = "RLHF_PROFILE"
"""In the environment of a stage that is to record a trace."""

WAITING = 3
"""Exit code of a run that waits for people: it is neither done nor has it failed."""

run_app = typer.Typer()

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A YAML file or the name of a shipped recipe (demo).")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings to change, dotted: ppo.learning_rate=1e-5."),
]
RunDirOption = Annotated[
    Path | None,
    typer.Option("--run-dir", help="Folder of the run; runs/RECIPE by default.", show_default=False),
]
FromOption = Annotated[
    str | None,
    typer.Option("--from", metavar="STAGE", help="First stage to run; those before must be finished."),
]
ToOption = Annotated[str | None, typer.Option("--to", metavar="STAGE", help="Last stage to run, of the first round.")]
ForceOption = Annotated[
    list[str] | None,
    typer.Option("--force", metavar="STAGE", help="Run this stage anew beside its earlier result (repeatable)."),
]
StageRunDirOption = Annotated[
    Path, typer.Option("--run-dir", help="Folder for the result; finished stages in it give the inputs.")
]
StageForceOption = Annotated[bool, typer.Option("--force", help="Run anew beside an earlier result.")]
VerifyOption = Annotated[
    bool,
    typer.Option(
        "--verify",
        help="First hash every file of what is reused or started from; else models have their sizes compared.",
    ),
]
ProfileOption = Annotated[
    bool,
    typer.Option(
        "--profile", help="Record a few steps with torch's profiler: profile/trace.json.gz in the stage's folder."
    ),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@run_app.command()
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    run_dir: RunDirOption = None,
    from_: FromOption = None,
    to: ToOption = None,
    force: ForceOption = None,
    verify: VerifyOption = False,
) -> None:
    """Run a recipe.

    What is finished is reused, what was interrupted is resumed, the rest is run. Exit code 3 where it waits for people
    to rank answers: run it again when they have.
    """
    from rlhf.pipeline.plan import Scope

    _run(recipe, overrides, run_dir, Scope(from_, to, frozenset(force or ())), verify)


@run_app.command()
def follow(
    run_dir: RunArgument,
    machine: Annotated[
        int, typer.Argument(metavar="MACHINE", min=1, help="Number of this machine: 1, 2 …; number 0 has `rlhf run`.")
    ],
) -> None:
    """Do another machine's part of a run on several machines.

    It starts its part of each stage; the first machine, number 0, has `rlhf run`. All see the run folder, and have the
    same working directory and packages. It ends when the run does, with code 1 if a stage did not come to its end.
    """
    from rlhf.pipeline.follow import follow

    raise typer.Exit(follow(run_dir.absolute(), machine, lambda text: print(text, flush=True)))


@run_app.command()
def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    run_dir: RunDirOption = None,
    from_: FromOption = None,
    to: ToOption = None,
    force: ForceOption = None,
) -> None:
    """Say what `rlhf run` would do, and why.

    Data are hashed, and their rows not read: `rlhf run` does that before it trains, `rlhf data check` at once.
    """
    from rlhf.pipeline.plan import Scope, make_plan, with_running
    from rlhf.pipeline.preflight import misused_models
    from rlhf.pipeline.progress import waiting
    from rlhf.pipeline.recipe import load_recipe
    from rlhf.pipeline.references import models_of

    folder = run_dir or _default_run_dir(recipe)
    with waiting("looking at data and models"):
        loaded = load_recipe(recipe, overrides or ())
        steps = make_plan(loaded, folder, Scope(from_, to, frozenset(force or ())))
        steps = with_running(steps, folder)
    rows = [(s.name, s.action, s.folder.name if s.folder else "", s.reason) for s in steps]
    show_table(("stage", "action", "folder", "why"), rows)
    for step in steps:
        for note in step.notes:
            print(f"{step.name}: {note}")
    models = {where: name for step in steps if step.settings for where, name in models_of(step.settings)}
    for where, name in models.items():
        if not Path(name).is_dir():
            print(f"{where}: no folder {name} here, so it is a hub id; `rlhf run` asks the hub before it trains")
    if any(step.action in ("run", "resume") for step in steps):
        print("rows were not read: `rlhf run` does so before it trains, `rlhf data check PATH --as KIND` at once")
    print(f"run folder: {in_one_line(str(folder))}")
    if problems := list(misused_models(steps, loaded)):
        raise SettingsError("\n".join(problems))


@run_app.command()
def status(run_dir: RunArgument, as_json: JsonOption = False) -> None:
    """Show how far a run is."""
    import json

    from rlhf.pipeline.summary import messages, nested, run_status

    stages = run_status(run_dir)
    if as_json:
        print(json.dumps(nested(stages), indent=1))
    else:
        _stage_table(stages)
        for told in messages(stages):
            print(printable(told))


@run_app.command()
def pretrain(
    recipe: RecipeArgument,
    run_dir: StageRunDirOption,
    overrides: Overrides = None,
    force: StageForceOption = False,
    sweep: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Train the variants of a YAML file or a shipped sweep (parts, sizes): a list of settings to lay over "
            "the recipe's, or a mapping of lists, of which every combination is tried.",
            show_default=False,
        ),
    ] = None,
    profile: ProfileOption = False,
) -> None:
    """One stage alone: a base model from raw text.

    With --sweep several, to compare. The model it starts from, if any, may be any Hugging Face folder or hub id.
    """
    from rlhf.pipeline.plan import Scope

    if sweep is None:
        scope = Scope("pretrain", "pretrain", frozenset(["pretrain"] if force else ()))
        _run(recipe, overrides, run_dir, scope, profile=profile)
    elif profile:
        raise SettingsError("--profile: records one stage, and --sweep trains several; leave one of them out")
    else:
        _sweep(sweep, recipe, overrides or [], run_dir, force)


def _stage_command(stage: str, summary: str) -> None:
    """One stage alone, as a command of its own."""

    def command(
        recipe: RecipeArgument,
        run_dir: StageRunDirOption,
        overrides: Overrides = None,
        force: StageForceOption = False,
        verify: VerifyOption = False,
        profile: ProfileOption = False,
    ) -> None:
        from rlhf.pipeline.plan import Scope

        _run(recipe, overrides, run_dir, Scope(stage, stage, frozenset([stage] if force else ())), verify, profile)

    run_app.command(stage, help=f"{summary}\n\nThe models it starts from may be any Hugging Face folder or hub id.")(
        command
    )


_stage_command("sft", "One stage alone: fine-tune on demonstrations.")
_stage_command("reward", "One stage alone: learn from ranked answers.")
_stage_command("ppo", "One stage alone: PPO against a reward model.")


def _run(
    recipe: str,
    overrides: list[str] | None,
    run_dir: Path | None,
    scope: "Scope",
    verify: bool = False,
    profile: bool = False,
) -> None:
    from dataclasses import asdict

    from rlhf.pipeline.recipe import load_recipe
    from rlhf.pipeline.references import POLICIES
    from rlhf.pipeline.runner import run

    if profile:
        os.environ[PROFILE] = "1"  # the stage may be another process
    folder = run_dir or _default_run_dir(recipe)
    source = Path(recipe) if Path(recipe).is_file() else None
    loaded = load_recipe(recipe, overrides or ())
    entries = run(loaded, folder, scope, lambda text: print(text, flush=True), source, verify)
    shown = list(entries) if scope.alone is None else [scope.alone]
    _stage_table({stage: asdict(entries[stage]) for stage in shown})
    _verdicts(folder, shown)
    print(f"report: {folder / 'report.html'}")
    if any(entries[name].status == "done" for name in entries if name.partition(" ")[0] in POLICIES):
        told = shlex.quote(str(folder))
        print(f"next: rlhf chat {told}, rlhf eval {told} (more figures), rlhf export {told} OUT (a model for others)")
    if profile:
        made = folder / (entries[str(scope.last)].folder or "")
        trace = made / "profile" / "trace.json.gz"
        print(f"profile: {trace if trace.is_file() else _why_no_trace(made, loaded, recipe, overrides)}")
    if any(entry.status == "waiting" for entry in entries.values()):
        raise typer.Exit(WAITING)


def _why_no_trace(folder: Path, recipe: "Recipe", name: str, overrides: list[str] | None) -> str:
    """That a finished stage records nothing, and the command that trains it from the same models in a run folder of its
    own."""
    from rlhf.pipeline.differences import filled_in

    run_dir, stage = folder.parent, folder.name.partition("-")[0]
    inputs = [f"{stage}.{field}={value}" for field, value in filled_in(recipe, folder).items()]
    words = [stage, name, *(overrides or ()), *inputs, "--run-dir", f"{run_dir}-profiled", "--profile"]
    return f"none, since {stage} was finished before; `{shlex.join(['rlhf', *words])}` trains it once more elsewhere"


def _sweep(sweep: str, recipe: str, overrides: list[str], run_dir: Path, force: bool) -> None:
    from rlhf.pipeline.sweep import load_sweep, run_sweep, table

    source = Path(recipe) if Path(recipe).is_file() else None
    variants = load_sweep(sweep, recipe, overrides)
    rows = run_sweep(variants, run_dir, force, lambda text: print(text, flush=True), source)
    show_table(*table(rows))
    print(f"report: {run_dir / 'report.html'}")
    if failed := [row for row in rows if row["error"] is not None]:
        raise RunFailed(f"{len(failed)} of {len(rows)} variants failed; run again to go on. {failed[0]['error']}")


def _verdicts(run_dir: Path, stages: list[str]) -> None:
    """What the report says of these stages, so far as they are finished, in a line each."""
    from rlhf.pipeline.report.judgement import SIGNS, judge_run
    from rlhf.pipeline.report.run import read_run

    read = read_run(run_dir)
    for stage, verdict in judge_run(read).items():
        if stage in stages and read.stages[stage].done:
            print(f"{SIGNS[verdict.tone]} {verdict.sentence}".replace("\u00a0", " "))


def _default_run_dir(recipe: str) -> Path:
    from rlhf.pipeline.recipe import recipe_name

    return Path("runs") / recipe_name(recipe)


def _stage_table(stages: dict[str, dict[str, Any]]) -> None:
    from rlhf.pipeline.summary import duration, headline, outcome

    rows = []
    for stage, entry in stages.items():
        steps = entry.get("steps")
        progress = f"step {entry['step']} of {steps}" if steps else ""
        if left := entry.get("seconds_left"):
            progress += f", about {duration(left)} left"
        rows.append((
            stage, outcome(entry), duration(entry["seconds"]),
            headline(stage, entry["metrics"]) or progress, entry["model"] or "",
        ))  # fmt: skip
    show_table(("stage", "status", "time", "result", "model"), rows)
