"""What looks at recipes and runs: `rlhf estimate`, `verify`, `clean` and `schema`."""

import os
import sys
from typing import Annotated

import typer

from rlhf.pipeline.errors import DEBUG, RunFailed
from rlhf.pipeline.run_cli import JsonOption, Overrides, RecipeArgument, RunArgument

tools_app = typer.Typer()

MODEL = "A run folder (its newest language model), a stage's folder, a model folder or a hub id."
"""What every MODEL may be; `references.model_at` finds it."""

# `python -m MODULE`, with errors shown as one line, and none for Ctrl-C
_WITHOUT_TRACEBACK = """
import runpy, sys
sys.tracebacklimit = 0
try:
    runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)
except KeyboardInterrupt:
    sys.exit(130)
"""


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
    """Say how much memory and time each stage would take.

    Nothing is run, and of a model only the config is read. A stage that does not fit is told with the settings to
    change, those first that gain most; the exit code is 0 all the same. With --devices each stage is planned on all of
    them, as its accelerate config says or, without one, in the first of ddp and fsdp2 that fits.
    """
    import json

    from rlhf.pipeline.estimate import estimate, show
    from rlhf.pipeline.progress import telling
    from rlhf.pipeline.recipe import load_recipe

    with telling("starting", lambda text: print(text, file=sys.stderr, flush=True)) as tell:
        found = estimate(load_recipe(recipe, overrides or ()), device, devices, tell)
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
        several = len(found.damage) > 1
        what = f"{len(found.damage)} things are not as they were" if several else "1 thing is not as it was"
        raise RunFailed(f"{run_dir}: {what}, named above")


@tools_app.command("clean")
def _clean(
    run_dir: RunArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Delete finished and unfinished stages too.")] = False,
) -> None:
    """Delete what nothing in a run leads to any more.

    It is listed first, with sizes and reasons. Without --yes only what is of no use to anybody goes: files that a kill
    left half written, and checkpoints of finished stages. With --yes also stages that took training to make: finished
    ones that summary.json does not name (nor sweep.json, nor a stage that stays), and unfinished ones that recipe.yaml
    does not lead to. What somebody else put into the folder always stays. Refused while a run works there.
    """
    from rlhf.pipeline.clean import clean

    clean(run_dir, yes)


@tools_app.command("schema")
def _schema() -> None:
    """Print the JSON schema of recipes, for editors.

    With it they complete and check a recipe. The first line of a recipe tells an editor with a YAML language server
    where the schema lies: after `rlhf schema > rlhf.schema.json` write `# yaml-language-server:
    $schema=rlhf.schema.json`. `rlhf init` does both.
    """
    from rlhf.pipeline.schema import as_text

    print(as_text())


def become(module: str, arguments: list[str]) -> None:
    """Turn into a process that may import torch; its exit code and its Ctrl-C are its own."""
    sys.stdout.flush()
    start = ["-m", module] if os.environ.get(DEBUG) else ["-c", _WITHOUT_TRACEBACK, module]
    os.execv(sys.executable, [sys.executable, *start, *arguments])
