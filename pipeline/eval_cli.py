"""`rlhf eval`: the models of a run compared, or the attention of one."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf.data.errors import SettingsError, printable
from rlhf.pipeline.run_cli import JsonOption, RunArgument
from rlhf.pipeline.sample_cli import EndpointOption, KeyVariableOption, ServedOption, refuse_unclear_judge
from rlhf.pipeline.tools_cli import become

if TYPE_CHECKING:
    from rlhf.stages.artifact import Artifact

eval_app = typer.Typer()


@eval_app.command("eval")
def evaluate(
    run_dir: RunArgument,
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Held-out prompts to answer; by default 128.", show_default=False)
    ] = None,
    num_samples: Annotated[
        int | None, typer.Option(min=1, help="Answers of each model to each; by default 4.", show_default=False)
    ] = None,
    best_of: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Draw the best-of-n curve of SFT up to N; by default 16, 0 for none.",
            show_default=False,
        ),
    ] = None,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:FUNCTION",
            help="(prompts, responses) -> qualities; by default the recipe's judge.",
            show_default=False,
        ),
    ] = None,
    endpoint: EndpointOption = None,
    model: ServedOption = None,
    key_variable: KeyVariableOption = None,
    tasks: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="Tasks of lm-eval too, with commas (the extra eval).", show_default=False),
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Tasks of your own for lm-eval.", show_default=False)
    ] = None,
    cheap: Annotated[bool, typer.Option("--cheap", help="Measure as little as a run does after a stage.")] = False,
    as_json: JsonOption = False,
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
    """Compare base, SFT and PPO, or draw a model's attention.

    They are compared on what is held out: the same prompts go through every model: perplexities, scores, win rates with
    95 % intervals, KL, and what SFT reaches by drawing several answers. RUN/evaluation.json holds the figures,
    evaluation.jsonl the answers side by side, and report.html is drawn anew. docs/evaluation.md says what the figures
    mean.
    """
    if attention is not None:
        source = _newest_policy(run_dir, stage).model
        return become("rlhf.stages.attention", [str(source), str(run_dir / "attention.html"), attention])
    if stage is not None:
        raise SettingsError(f"--stage {stage}: goes with --attention TEXT; all stages are evaluated")
    refuse_unclear_judge("--judge", judge, endpoint, model, key_variable, fallback=True)
    if include_path is not None and tasks is None:
        raise SettingsError("--include-path goes with --tasks")
    import json
    import sys
    from contextlib import redirect_stdout

    from rlhf.pipeline import evaluation
    from rlhf.pipeline.evaluation_tables import show
    from rlhf.pipeline.progress import telling
    from rlhf.pipeline.references import POLICIES
    from rlhf.pipeline.runner import render_report
    from rlhf.pipeline.summary import Entry, as_sealed, read_summary, run_status
    from rlhf.stages.evaluation.config import EvaluationSettings
    from rlhf.stages.evaluation.config import cheap as cheap_form

    run_status(run_dir)  # refuses what is no run folder
    evaluation.refuse_no_place(run_dir)
    given: dict[str, Any] = {"num_prompts": num_prompts, "num_samples": num_samples, "best_of": best_of}
    given |= {"judge": judge}
    by_recipe = evaluation.asked_in(run_dir)
    if endpoint is not None:
        by_recipe["judge"] = None
        given |= {"judge_from": {"url": endpoint, "model": model, "key_variable": key_variable}}
    if tasks is not None:
        given |= {"tasks": tasks.split(","), "include_path": include_path and str(include_path)}
    base = cheap_form(None).model_dump() if cheap else {}
    options = {name: value for name, value in given.items() if value is not None}
    asked = EvaluationSettings.load(base | by_recipe | options, "eval")
    entries = as_sealed(run_dir, read_summary(run_dir))
    warnings = []
    if not any(entry.status == "done" and name.split()[0] in POLICIES for name, entry in entries.items()):
        earlier = _newest_policy(run_dir, None)
        entries |= {earlier.manifest["stage"]: Entry("done", earlier.folder.name)}
        told = f"measured is {earlier.folder.name}, of an earlier one"
        warnings.append(f"no model of the last attempt is finished; {told}")
    evaluation.refuse_damaged_stages(run_dir, entries)
    tell_aside = telling("starting", lambda text: print(text, file=sys.stderr, flush=True))
    with tell_aside as tell, redirect_stdout(sys.stderr):  # what a judge prints is none of the figures
        found = evaluation.evaluate(run_dir, evaluation.finished(run_dir, entries), asked, tell)
    for warning in [*warnings, *found.get("left_out", [])]:
        print(printable(f"warning: {warning}"), file=sys.stderr)
    if as_json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        show(found)
    render_report(run_dir)


def _newest_policy(run_dir: Path, stage: str | None) -> "Artifact":
    """The newest finished language model, of the last stage that has one or of the one that is named."""
    from rlhf.pipeline.references import POLICIES, newest_sealed

    if stage is not None and stage not in POLICIES:
        raise SettingsError(f"--stage {stage}: not a stage with a language model; choose of {', '.join(POLICIES)}")
    for name in POLICIES if stage is None else (stage,):
        if (artifact := newest_sealed(name, run_dir)) is not None:
            return artifact
    named, status = stage or "pretrain, sft or ppo", shlex.join(["rlhf", "status", str(run_dir)])
    raise SettingsError(f"{run_dir}: no finished {named} stage here; `{status}` shows how far it is")
