"""evaluation.json as tables for people: the figures of each model, win rates, best-of-n, tasks of lm-eval."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlhf.pipeline.report.evaluation import task_rows
from rlhf.pipeline.tables import show_table
from rlhf.stages.evaluation.records import Figures
from rlhf.stages.metric_names import metric, number, share, span


def show(found: Mapping[str, Any]) -> None:
    """Print what evaluation.json says; what it leaves out is not known."""
    found = Figures.model_validate(found).model_dump()
    models = found["models"]
    columns: dict[str, dict[str, str]] = {
        "model": {name: f"{name} ({model['model']})" for name, model in models.items()},
        "text ppl": _column(models, "text_perplexity"),
        "response ppl": _column(models, "response_perplexity"),
        "score": {name: _mean(model["score"]) for name, model in models.items()},
        "quality": {name: _mean(model["quality"]) for name, model in models.items()},
        "KL from sft": {name: _with(model["kl"], model["kl_interval"]) for name, model in models.items()},
        "tokens": _column(models, "length"),
        "ended": _column(models, "eos_share"),
        "distinct-2": _column(models, "distinct_2"),
        "repeated": _column(models, "repetition"),
        "refused": _column(models, "refusal_share"),
    }
    _show(list(columns), [[cells[name] for cells in columns.values()] for name in models])
    if told := _held_out(found):
        print(f"held out: {told}")
    if found["pairs"]:
        print()
        _show(
            ("better", "by", "wins", "ties", "losses", "win rate", "at equal length"),
            [
                [
                    f"{pair['one']} than {pair['other']}", pair["by"],
                    *(str(pair[name]) for name in ("wins", "ties", "losses")),
                    _with(pair["win_rate"], pair["interval"], share),
                    _with(pair["length_controlled"], pair["length_controlled_interval"], share),
                ]
                for pair in found["pairs"]
            ],
        )  # fmt: skip
    if found["best_of_n"]:
        print()
        _show(
            ("best of", "KL", "score", "quality"),
            [
                [str(row["n"]), number(row["kl"]), _with(row["score"], row["score_interval"]), number(row["quality"])]
                for row in found["best_of_n"]
            ],
        )
        if origin := _chosen_from(found["settings"]):
            print(f"best of: {origin}")
    if found["tasks"]:
        print()
        rows = task_rows(found["tasks"], found["tasks"])
        show_table(("task", "metric", *found["tasks"]), [[row["task"], row["metric"], *row["cells"]] for row in rows])


def _show(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table without the columns that would be empty."""
    kept = [place for place in range(len(titles)) if {row[place] for row in rows} != {number(None)}]
    show_table([titles[place] for place in kept], [[row[place] for place in kept] for row in rows])


def _chosen_from(settings: Mapping[str, Any]) -> str | None:
    """Which answers the best are of; None where that is not known. The figures of the models are of others."""
    given, total = settings["num_samples"], settings["best_of"]
    if not given or not total:
        return None
    if total <= given:
        return f"the first {total} of the {given} answers of sft above to each prompt"
    return (
        f"{total} answers of sft to each prompt, the {given} above and {total - given} more; "
        f"1 is the mean of all {total}"
    )


def _held_out(found: Mapping[str, Any]) -> str:
    """What the figures rest on, in words; where it is not the same for every model, from the least to the most."""
    told, settings = [], found["settings"]
    for key, what in (("num_text_tokens", "text"), ("num_response_tokens", "responses")):
        if nums := span(num for model in found["models"].values() if (num := model[key])):
            told.append(f"{nums} tokens of {what}")
    if settings["num_prompts"]:
        told.append(f"{number(settings['num_prompts'])} prompts (answers to each: {settings['num_samples']})")
    return ", ".join(told)


def _column(models: Mapping[str, Any], name: str) -> dict[str, str]:
    return {model: metric(figures[name], name) for model, figures in models.items()}


def _mean(spread: Mapping[str, Any] | None) -> str:
    return number(None) if spread is None else f"{number(spread['mean'])} ± {number(spread['std'])}"


def _with(value: float | None, interval: Sequence[float] | None, text: Callable[[float], str] = number) -> str:
    if value is None or not interval:
        return number(None) if value is None else text(value)
    return f"{text(value)} ({text(interval[0])} to {text(interval[1])})"
