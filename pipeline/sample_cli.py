"""`rlhf sample` and `rlhf judge`: answers of any checkpoint into a feedback store, and judges that rank them."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from rlhf.data.errors import RefusedError, SettingsError
from rlhf.pipeline.data_cli import FormatOption, MapOption, MaxDroppedOption, source_of
from rlhf.pipeline.errors import RunFailed, begun
from rlhf.pipeline.feedback_cli import StoreArgument
from rlhf.pipeline.tools_cli import MODEL, become

sample_app = typer.Typer()

EndpointOption = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Have a model judge, behind an OpenAI-compatible server: http://127.0.0.1:8000."),
]
ServedOption = Annotated[
    str | None, typer.Option("--model", metavar="NAME", help="That model, by the server's name for it.")
]
KeyVariableOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="Environment variable that holds the server's API key.")
]


def refuse_unclear_judge(
    option: str, function: str | None, endpoint: str | None, model: str | None, key_variable: str | None, fallback: bool
) -> None:
    """Raise SettingsError where it is not clear who judges: the function that `option` names, or a model. With a
    `fallback` neither need be named."""
    num_judges = sum(judge is not None for judge in (function, endpoint))
    if (endpoint is None) != (model is None) or num_judges > 1 or (num_judges == 0 and not fallback):
        raise SettingsError(f"say who judges: {option} MODULE:FUNCTION, or --endpoint URL with --model NAME")
    if key_variable is not None and endpoint is None:
        raise SettingsError("--key-variable goes with --endpoint")


@sample_app.command()
def sample(
    models: Annotated[list[str], typer.Argument(metavar="MODEL …", help=f"{MODEL} Several take turns.")],
    prompts: Annotated[str, typer.Option(metavar="PATH", help="A file, folder, module:function or hub id.")],
    store: Annotated[Path, typer.Option(metavar="STORE", help="A feedback store; made if it is not there.")],
    num_answers: Annotated[int, typer.Option(min=2, help="Answers per prompt.")] = 4,
    temperature: Annotated[
        str, typer.Option(metavar="NUMBERS", help="One or several, which take turns: 0.7,1.0.")
    ] = "1.0",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    seed: Annotated[int, typer.Option(help="For the same answers again.")] = 0,
    overlap: Annotated[int, typer.Option(min=0, help="How many of the prompts are for all raters.")] = 0,
    round_: Annotated[int, typer.Option("--round", min=1, help="Round of the answers; a later one is rated anew.")] = 1,
    mapping: MapOption = None,
    format_: FormatOption = None,
    max_dropped: MaxDroppedOption = 0.0,
) -> None:
    """Sample answers to prompts into a feedback store.

    They are there to be ranked. Which model wrote which answer is recorded, and hidden from those who rank. Answers
    that say the same are drawn again. What is in the store stays, so after an interruption the same command goes on.
    """
    from rlhf.pipeline.references import POLICIES, loadable

    source = source_of(prompts, "prompts", mapping, format_)
    words = [
        *(loadable(model, POLICIES) for model in models),
        "--prompts",
        source.model_dump_json(),
        "--store",
        str(store),
    ]
    for name, value in (
        ("--num-answers", num_answers),
        ("--temperature", temperature),
        ("--max-new-tokens", max_new_tokens),
        ("--seed", seed),
        ("--overlap", overlap),
        ("--round", round_),
        ("--max-dropped", max_dropped),
    ):
        words += [name, str(value)]
    become("rlhf.stages.sample", words)


@sample_app.command()
def judge(
    store: StoreArgument,
    function: Annotated[
        str | None, typer.Option("--with", metavar="MODULE:FUNCTION", help="(prompts, responses) -> qualities.")
    ] = None,
    endpoint: EndpointOption = None,
    model: ServedOption = None,
    key_variable: KeyVariableOption = None,
) -> None:
    """Have a judge rank the answers in a feedback store.

    It is a function of yours, or a model behind a server. A model is shown two answers at a time, every pair in both
    orders; where it does not name the same one both times, they are tied. What it said is kept beside the store, and
    nothing is asked twice. Exit code 1 where some prompts could not be judged; the same command tries those again.
    """
    from rlhf.data.feedback.store import Store
    from rlhf.pipeline.progress import telling
    from rlhf.stages.judging import FunctionJudge, ModelJudge, cost, judge_store, model_judge

    refuse_unclear_judge("--with", function, endpoint, model, key_variable, fallback=False)
    who: FunctionJudge | ModelJudge
    if function is not None:
        who = FunctionJudge(function)
    else:
        assert endpoint is not None
        assert model is not None
        who = model_judge(store, endpoint, model, key_variable)
    asking = f"asking the judge {who.name}" + (f" at {endpoint}" if endpoint else "")
    tell_aside = telling(asking, lambda text: print(text, file=sys.stderr, flush=True))
    with Store.open(store) as opened, tell_aside as tell, begun():
        try:
            told = judge_store(opened, who, tell)
        except RefusedError:
            raise
        except ValueError as error:
            raise RunFailed(f"{error}; what was judged before stays") from error
    print(f"{store}: {told.num_judged} prompts judged by {who.name}, {told.num_failed + told.num_left} not")
    if spent := cost(who):
        print(f"  {spent}")
    if told.num_failed:
        left = f", {told.num_left} not tried after that" if told.num_left else ""
        raise RunFailed(f"{told.num_failed} prompts could not be judged{left}. {told.first_failure}")
