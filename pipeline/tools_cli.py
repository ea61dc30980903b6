"""What looks at recipes and runs: `rlhf eval`, `report`, `estimate`, `verify`, `clean` and `schema`."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlhf.data.errors import SettingsError
from rlhf.pipeline.errors import DEBUG, RunFailed
from rlhf.pipeline.run_cli import JsonOption, Overrides, RecipeArgument, RunArgument

if TYPE_CHECKING:
    from rlhf.stages.artifact import Artifact

tools_app = typer.Typer()

POLICIES = ("ppo", "sft", "pretrain")
"""Stages with a language model, the best first."""

# `python -m MODULE`, with errors shown as one line
_WITHOUT_TRACEBACK = (
    "import runpy, sys; sys.tracebacklimit = 0; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


@tools_app.command("eval")
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
        return become("rlhf.stages.attention", [str(model), str(run_dir / "attention.html"), attention])
    if stage is not None:
        raise SettingsError(f"--stage {stage}: goes with --attention TEXT; without it, ppo is evaluated")
    artifact = newest_sealed("ppo", run_dir)
    if artifact is None:
        raise SettingsError(f"{run_dir}: no finished ppo stage here; `rlhf status {run_dir}` shows how far it is")
    become("rlhf.stages.ppo.evaluate", [str(artifact.folder)])


def _newest_policy(run_dir: Path, stage: str | None) -> "Artifact":
    """The newest finished language model, of the last stage that has one or of the one that is named."""
    from rlhf.pipeline.plan import newest_sealed

    if stage is not None and stage not in POLICIES:
        raise SettingsError(f"--stage {stage}: not a stage with a language model; choose of {', '.join(POLICIES)}")
    for name in POLICIES if stage is None else (stage,):
        if (artifact := newest_sealed(name, run_dir)) is not None:
            return artifact
    named = stage or "pretrain, sft or ppo"
    raise SettingsError(f"{run_dir}: no finished {named} stage here; `rlhf status {run_dir}` shows how far it is")


@tools_app.command()
def report(run_dir: RunArgument) -> None:
    """Write the run's report.html anew."""
    from rlhf.pipeline.progress import waiting
    from rlhf.pipeline.summary import run_status

    run_status(run_dir)  # refuses what is no run folder
    with waiting("drawing the report"):
        from rlhf.pipeline.report import render  # matplotlib takes its time

        page = render(run_dir)
    print(page)


@tools_app.command("estimate")
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
    devices: Annotated[
        str | None,
        typer.Option(metavar="NUMBERxNAME", help="For so many of a device: 64xH100, 8xA100-80GB.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say how much memory and time each stage would take, before anything is run.

    Of a model only its config is read. A stage that does not fit is told with the settings to change, those first that
    gain most; the exit code is 0 all the same. With --devices each stage is planned on all of them, as its accelerate
    config says or, without one, in the first of ddp and fsdp2 that fits.
    """
    import json

    from rlhf.pipeline.estimate import estimate, show
    from rlhf.pipeline.progress import waiting
    from rlhf.pipeline.recipe import load_recipe

    with waiting("working it out"):
        found = estimate(load_recipe(recipe, overrides or ()), device, devices)
    if as_json:
        print(json.dumps(found, indent=1))
    else:
        show(found)


@tools_app.command("verify")
def _verify(run_dir: RunArgument, as_json: JsonOption = False) -> None:
    """Hash every file of a run's finished stages and checkpoints.

    Names what is missing, changed or came later, each with the cure. Exit code 0 if all is as it was sealed and saved,
    1 if not, 2 if RUN is no run folder. Nothing is changed.
    """
    from rlhf.pipeline import verify
    from rlhf.pipeline.progress import waiting

    with waiting("hashing") as tell:
        found = verify.verify(run_dir, tell)
    for line in [verify.as_json(found)] if as_json else verify.lines(found):
        print(line)
    if found.damage:
        raise RunFailed(f"{run_dir}: {len(found.damage)} things are not as they were, named above")


@tools_app.command("clean")
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


@tools_app.command("schema")
def _schema() -> None:
    """Print the JSON schema of recipes, by which editors complete and check them.

    The first line of a recipe tells an editor with a YAML language server where the schema lies: after
    `rlhf schema > rlhf.schema.json` write `# yaml-language-server: $schema=rlhf.schema.json`. `rlhf init` does both.
    """
    from rlhf.pipeline.schema import as_text

    print(as_text())


def become(module: str, arguments: list[str]) -> None:
    """Turn into a process that may import torch; its exit code and its Ctrl-C are its own."""
    sys.stdout.flush()
    start = ["-m", module] if os.environ.get(DEBUG) else ["-c", _WITHOUT_TRACEBACK, module]
    os.execv(sys.executable, [sys.executable, *start, *arguments])
