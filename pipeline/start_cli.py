"""Where to begin: `rlhf init`."""

import shlex
from typing import Annotated

import typer

from rlhf.pipeline.tables import show_table

start_app = typer.Typer()


@start_app.command("init")
def _init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What to call the recipe: NAME.yaml is written.")],
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILES …",
            help="Files, folders, hub ids or module:function; by default the data files of this folder.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Start from this model, a folder or hub id, instead of from raw text."),
    ] = None,
    mapping: Annotated[
        list[str] | None,
        typer.Option(
            "--map",
            metavar="[FILE:]NAME=COLUMN",
            help="Which column holds NAME, prompt=question, in FILE or in all files that need it (repeatable).",
        ),
    ] = None,
) -> None:
    """Write a commented recipe for your files.

    What a file holds (raw text, demonstrations, preferences or prompts) is told from its first rows. The recipe has the
    stages that can run from them, with sizes for this machine, and every important setting with what it means. Nothing
    is written over.
    """
    from rlhf.pipeline.init import init
    from rlhf.pipeline.progress import waiting
    from rlhf.pipeline.references import POLICIES, model_at

    if model is not None:
        model_at(model, POLICIES, "--model")  # refuses what is none
    with waiting("looking at the files") as tell:
        written = init(name, files or [], model, tell, mapping or [])
    show_table(("file", "holds", "used as"), written.files)
    for place, why in written.left.items():
        print(f"left out: {place}: {why}")
    for warning in written.warnings:
        print(f"warning: {warning}")
    print(f"{written.recipe}: {', '.join(written.stages)}")
    recipe = shlex.quote(str(written.recipe))
    print(f"next: rlhf estimate {recipe} (memory and time), then rlhf run {recipe}")
