"""What is done with a finished model: `rlhf chat` and `rlhf export`."""

from pathlib import Path
from typing import Annotated

import typer

from rlhf.data.errors import SettingsError
from rlhf.pipeline.tools_cli import MODEL, become

model_app = typer.Typer()

DTYPES = ("bf16", "fp16", "fp32")


@model_app.command()
def chat(
    models: Annotated[list[str], typer.Argument(metavar="MODEL …", help=f"{MODEL} Of several, each answers.")],
    reward: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Show the score that this reward model gives each answer."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(min=0, help="Lower is more predictable; 0 takes the likeliest token each time.")
    ] = 0.7,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    multi_turn: Annotated[
        bool, typer.Option("--multi-turn", help="Let lines that are piped in be one conversation, too.")
    ] = False,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="A system message.", show_default=False)] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**63 - 1, help="For the same answers again.", show_default=False)
    ] = None,
) -> None:
    """Talk to a model, or to several side by side.

    What is typed is one conversation, until ctrl-d; /help tells the commands. Of lines that are piped in each opens a
    new one.
    """
    from rlhf.pipeline.references import POLICIES, REWARDS, loadable

    options = ["--temperature", str(temperature), "--max-new-tokens", str(max_new_tokens)]
    options += ["--multi-turn"] if multi_turn else []
    options += ["--reward", loadable(reward, REWARDS, "--reward")] if reward is not None else []
    options += [f"--system={system}"] if system is not None else []
    options += ["--seed", str(seed)] if seed is not None else []
    become("rlhf.stages.chat", [*(loadable(model, POLICIES) for model in models), *options])


@model_app.command()
def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL)],
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
    """Write a model for others, with a model card.

    Weights, tokenizer and chat template are written. It loads in transformers, and in TRL. LoRA adapters are merged.
    The card (README.md) tells base, data, figures and versions as the manifests have them; its license is yours to fill
    in.
    """
    from rlhf.pipeline.references import POLICIES, loadable

    if dtype is not None and dtype not in DTYPES:
        raise SettingsError(f"--dtype {dtype}: choose of {', '.join(DTYPES)}")
    options = ["--dtype", dtype] if dtype is not None else []
    options += ["--adapter-only"] if adapter_only else []
    options += ["--push-to-hub", push_to_hub] if push_to_hub is not None else []
    become("rlhf.stages.export", [loadable(model, POLICIES), str(out), *options])
