"""What is done with a finished model: `rlhf chat` and `rlhf export`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rlhf.data.errors import SettingsError
from rlhf.pipeline.tools_cli import POLICIES, become

model_app = typer.Typer()

DTYPES = ("bf16", "fp16", "fp32")

_MODEL = "A run folder (its newest language model), a stage's folder, a model folder or a hub id."


@model_app.command()
def chat(
    models: Annotated[list[str], typer.Argument(metavar="MODEL …", help=f"{_MODEL} Of several, each answers.")],
    reward: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Show the score that this reward model gives each answer."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="Above 0; lower is more predictable.")] = 0.7,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    multi_turn: Annotated[
        bool, typer.Option("--multi-turn", help="Let lines that are piped in be one conversation, too.")
    ] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message.", show_default=False)] = None,
    seed: Annotated[int | None, typer.Option(help="For the same answers again.", show_default=False)] = None,
) -> None:
    """Talk to a model, or to several side by side.

    What is typed is one conversation, until ctrl-d; /help tells the commands. Of lines that are piped in each opens a
    new one.
    """
    options = ["--temperature", str(temperature), "--max-new-tokens", str(max_new_tokens)]
    options += ["--multi-turn"] if multi_turn else []
    options += ["--reward", model_at(reward, ["reward"])] if reward is not None else []
    options += [f"--system={system}"] if system is not None else []
    options += ["--seed", str(seed)] if seed is not None else []
    become("rlhf.stages.chat", [*(model_at(model, POLICIES) for model in models), *options])


@model_app.command()
def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=_MODEL)],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write; nothing is written over.")],
    dtype: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="Write weights as bf16, fp16 or fp32; by default fp32.", show_default=False),
    ] = None,
    adapter_only: Annotated[
        bool, typer.Option("--adapter-only", help="Write the LoRA adapter alone, for PEFT.")
    ] = False,
    push_to_hub: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Then upload it, to a private repository if there is none of this name."),
    ] = None,
) -> None:
    """Write a model for others: weights, tokenizer, chat template and a model card.

    It loads in transformers, and in TRL. LoRA adapters are merged. The card (README.md) tells base, data, figures and
    versions as the manifests have them; its license is yours to fill in.
    """
    if dtype is not None and dtype not in DTYPES:
        raise SettingsError(f"--dtype {dtype}: choose of {', '.join(DTYPES)}")
    options = ["--dtype", dtype] if dtype is not None else []
    options += ["--adapter-only"] if adapter_only else []
    options += ["--push-to-hub", push_to_hub] if push_to_hub is not None else []
    become("rlhf.stages.export", [model_at(model, POLICIES), str(out), *options])


def model_at(reference: str, stages: Sequence[str]) -> str:
    """The model that is meant: of a run the newest one of the first of `stages` that is finished, of a stage its own.

    Raises SettingsError for a folder that is none of these.
    """
    from rlhf.pipeline.plan import newest_sealed
    from rlhf.stages.artifact import Artifact

    folder = Path(reference)
    if not folder.is_dir():
        if folder.is_absolute() or reference.startswith((".", "~")) or reference.count("/") > 1 or folder.exists():
            raise SettingsError(f"{reference}: no such folder; give a run's, a stage's or a model's, or a hub id")
        return reference
    if any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        return reference
    if Artifact(folder).sealed:
        return str(folder / "model")
    if (folder / "settings.yaml").is_file():
        raise SettingsError(f"{folder}: this stage is not finished; `rlhf status {folder.parent}` shows how far it is")
    for stage in stages:
        if (found := newest_sealed(stage, folder)) is not None:
            return str(found.model)
    raise SettingsError(
        f"{folder}: neither a model (no config.json) nor a stage or run that has one finished ({', '.join(stages)})"
    )
