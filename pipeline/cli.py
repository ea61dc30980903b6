"""The command line: `rlhf run demo`. A command imports what it needs when it runs: --help stays quick."""

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf.data.errors import RefusedError, SettingsError
from rlhf.pipeline import streams
from rlhf.pipeline.data_cli import data_app
from rlhf.pipeline.errors import DEBUG, RunFailed, RunStopped
from rlhf.pipeline.tables import show_table
from rlhf.stages.secrets import mask
from rlhf.stages.signals import exit_on_signal, handled

if TYPE_CHECKING:
    from rlhf.pipeline.plan import Scope
    from rlhf.stages.artifact import Artifact

PROFILE = "RLHF_PROFILE"
"""In the environment of a stage that is to record a trace."""

app = typer.Typer(
    name="rlhf",
    help="From raw text to a PPO-tuned language model: pretrain, sft, reward, ppo.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data_app, name="data")

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
ToOption = Annotated[str | None, typer.Option("--to", metavar="STAGE", help="Last stage to run.")]
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


# `python -m MODULE`, with errors shown as one line
_WITHOUT_TRACEBACK = (
    "import runpy, sys; sys.tracebacklimit = 0; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


@app.callback()
def _rlhf(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks; may stand anywhere.")] = False,
) -> None:
    pass  # read by main, which shows the errors


@app.command()
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

    What is finished is reused, what was interrupted is resumed, the rest is run.
    """
    from rlhf.pipeline.plan import Scope

    _run(recipe, overrides, run_dir, Scope(from_, to, frozenset(force or ())), verify)


@app.command()
def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    run_dir: RunDirOption = None,
    from_: FromOption = None,
    to: ToOption = None,
    force: ForceOption = None,
) -> None:
    """Say what `rlhf run` would do, and why."""
    from rlhf.pipeline.plan import Scope, make_plan
    from rlhf.pipeline.recipe import load_recipe

    folder = run_dir or _default_run_dir(recipe)
    steps = make_plan(load_recipe(recipe, overrides or ()), folder, Scope(from_, to, frozenset(force or ())))
    rows = [(s.stage, s.action, s.folder.name if s.folder else "", s.reason) for s in steps]
    show_table(("stage", "action", "folder", "why"), rows)
    print(f"run folder: {folder}")


@app.command()
def status(run_dir: RunArgument, as_json: JsonOption = False) -> None:
    """Show how far a run is."""
    import json

    from rlhf.pipeline.summary import run_status

    stages = run_status(run_dir)
    if as_json:
        print(json.dumps({"stages": stages}, indent=1))
    else:
        _stage_table(stages)


@app.command()
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
    """One stage alone: a base model from raw text, or several to compare.

    The model it starts from, if any, may be any Hugging Face folder or hub id.
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

    app.command(stage, help=f"{summary}\n\nThe models it starts from may be any Hugging Face folder or hub id.")(
        command
    )


_stage_command("sft", "One stage alone: fine-tune on demonstrations.")
_stage_command("reward", "One stage alone: learn from ranked answers.")
_stage_command("ppo", "One stage alone: PPO against a reward model.")


@app.command("eval")
def evaluate(
    run_dir: RunArgument,
    attention: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Draw what each head looks at in a text into RUN/attention.html.", show_default=False
        ),
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(
            metavar="STAGE", help="Whose attention: pretrain, sft or ppo; by default the last.", show_default=False
        ),
    ] = None,
) -> None:
    """Evaluate the newest finished ppo model anew, or draw a model's attention."""
    from rlhf.pipeline.plan import newest_sealed

    if attention is not None:
        model = _newest_policy(run_dir, stage).model
        return _become("rlhf.stages.attention", [str(model), str(run_dir / "attention.html"), attention])
    if stage is not None:
        raise SettingsError(f"--stage {stage}: goes with --attention TEXT; without it, ppo is evaluated")
    artifact = newest_sealed("ppo", run_dir)
    if artifact is None:
        raise SettingsError(f"{run_dir}: no finished ppo stage here; `rlhf status {run_dir}` shows how far it is")
    _become("rlhf.stages.ppo.evaluate", [str(artifact.folder)])


def _newest_policy(run_dir: Path, stage: str | None) -> "Artifact":
    """The newest finished language model, of the last stage that has one or of the one that is named."""
    from rlhf.pipeline.plan import newest_sealed

    policies = ("ppo", "sft", "pretrain")
    if stage is not None and stage not in policies:
        raise SettingsError(f"--stage {stage}: not a stage with a language model; choose of {', '.join(policies)}")
    for name in policies if stage is None else (stage,):
        if (artifact := newest_sealed(name, run_dir)) is not None:
            return artifact
    named = stage or "pretrain, sft or ppo"
    raise SettingsError(f"{run_dir}: no finished {named} stage here; `rlhf status {run_dir}` shows how far it is")


@app.command()
def report(run_dir: RunArgument) -> None:
    """Write the run's report.html anew."""
    from rlhf.pipeline.report import render
    from rlhf.pipeline.summary import run_status

    run_status(run_dir)  # refuses what is no run folder
    print(render(run_dir))


@app.command("estimate")
def _estimate(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="For this device instead of the one that is here: h100, h200, a100-40gb, l40s, 4090, t4 … or cpu.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say how much memory and time each stage would take, before anything is run.

    Of a model only its config is read. A stage that does not fit is told with the settings to change, those first that
    gain most; the exit code is 0 all the same.
    """
    import json

    from rlhf.pipeline.estimate import estimate, show
    from rlhf.pipeline.recipe import load_recipe

    found = estimate(load_recipe(recipe, overrides or ()), device)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        show(found)


@app.command("verify")
def _verify(run_dir: RunArgument, as_json: JsonOption = False) -> None:
    """Hash every file of a run's finished stages and checkpoints.

    Names what is missing, changed or came later, each with the cure. Exit code 0 if all is as it was sealed and saved,
    1 if not, 2 if RUN is no run folder. Nothing is changed.
    """
    from rlhf.pipeline import verify

    found = verify.verify(run_dir)
    for line in [verify.as_json(found)] if as_json else verify.lines(found):
        print(line)
    if found.damage:
        raise RunFailed(f"{run_dir}: {len(found.damage)} things are not as they were, named above")


@app.command("clean")
def _clean(
    run_dir: RunArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Delete finished and unfinished stages too.")] = False,
) -> None:
    """Delete what nothing in a run leads to any more, after it was listed with sizes and reasons.

    Without --yes only what is of no use to anybody goes: files that a kill left half written, and checkpoints of
    finished stages. With --yes also stages that took training to make: finished ones that summary.json does not name
    (nor sweep.json, nor a stage that stays), and unfinished ones that recipe.yaml does not lead to. What somebody else
    put into the folder always stays. Refused while a run works there.
    """
    from rlhf.pipeline.clean import clean

    clean(run_dir, yes)


@app.command()
def chat(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model folder or hub id.")],
    temperature: Annotated[float, typer.Option(help="Above 0; lower is more predictable.")] = 0.7,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    multi_turn: Annotated[bool, typer.Option("--multi-turn", help="Let the model see the earlier turns.")] = False,
    seed: Annotated[int | None, typer.Option(help="For the same answers again.", show_default=False)] = None,
) -> None:
    """Talk to a model, line by line.

    Lines are typed, until ctrl-d, or piped in. Each opens a new conversation unless --multi-turn is given.
    """
    options = ["--temperature", str(temperature), "--max-new-tokens", str(max_new_tokens)]
    options += ["--multi-turn"] if multi_turn else []
    options += ["--seed", str(seed)] if seed is not None else []
    _become("rlhf.stages.chat", [model, *options])


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
    from rlhf.pipeline.runner import run

    if profile:
        os.environ[PROFILE] = "1"  # the stage may be another process
    folder = run_dir or _default_run_dir(recipe)
    source = Path(recipe) if Path(recipe).is_file() else None
    loaded = load_recipe(recipe, overrides or ())
    entries = run(loaded, folder, scope, lambda text: print(text, flush=True), source, verify)
    _stage_table({stage: asdict(entry) for stage, entry in entries.items()})
    print(f"report: {folder / 'report.html'}")
    if profile:
        trace = folder / (entries[str(scope.last)].folder or "") / "profile" / "trace.json.gz"
        none = "none: the stage was finished before; with --force it runs anew"
        print(f"profile: {trace if trace.is_file() else none}")


def _sweep(sweep: str, recipe: str, overrides: list[str], run_dir: Path, force: bool) -> None:
    from rlhf.pipeline.sweep import load_sweep, run_sweep, table

    source = Path(recipe) if Path(recipe).is_file() else None
    variants = load_sweep(sweep, recipe, overrides)
    rows = run_sweep(variants, run_dir, force, lambda text: print(text, flush=True), source)
    show_table(*table(rows))
    print(f"report: {run_dir / 'report.html'}")
    if failed := [row for row in rows if row["error"] is not None]:
        raise RunFailed(f"{len(failed)} of {len(rows)} variants failed; run again to go on. {failed[0]['error']}")


def _default_run_dir(recipe: str) -> Path:
    from rlhf.pipeline.recipe import recipe_name

    return Path("runs") / recipe_name(recipe)


def _become(module: str, arguments: list[str]) -> None:
    """Turn into a process that may import torch; its exit code and its Ctrl-C are its own."""
    sys.stdout.flush()
    start = ["-m", module] if os.environ.get(DEBUG) else ["-c", _WITHOUT_TRACEBACK, module]
    os.execv(sys.executable, [sys.executable, *start, *arguments])


def _stage_table(stages: dict[str, dict[str, Any]]) -> None:
    from rlhf.pipeline.summary import duration, headline, outcome

    rows = []
    for stage, entry in stages.items():
        steps = entry.get("steps")
        progress = f"step {entry['step']} of {steps}" if steps else ""
        rows.append((
            stage, outcome(entry), duration(entry["seconds"]),
            headline(stage, entry["metrics"]) or entry.get("message") or progress, entry["model"] or "",
        ))  # fmt: skip
    show_table(("stage", "status", "time", "result", "model"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 refused, 130/143 stopped by a signal."""
    if arguments is None:
        streams.prepare()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "--debug" in words:
        os.environ[DEBUG] = "1"
    words = [word for word in words if word != "--debug"]
    streams.show_all_signs()
    try:
        with handled(exit_on_signal):
            app(words)
    except RunStopped as stop:
        print(stop, file=sys.stderr)
        raise
    except SystemExit as stop:
        if stop.code in (130, 143):
            print("stopped; run again to go on", file=sys.stderr)
        raise
    except RefusedError as error:
        _show(error, str(error))
        sys.exit(2)
    except RunFailed as error:
        _show(error, str(error))
        sys.exit(1)
    except Exception as error:
        _show(error, f"{type(error).__name__}: {error} (--debug shows where)")
        sys.exit(1)


def _show(error: Exception, message: str) -> None:
    if os.environ.get(DEBUG):
        print(mask("".join(traceback.format_exception(error))), file=sys.stderr)
    print(mask(f"error: {message}"), file=sys.stderr)
