"""`rlhf data agreement`, `export` and `import`: what a feedback store holds, what comes out of it and goes into it."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from rlhf.data.errors import RefusedError, SettingsError
from rlhf.pipeline.data_cli import FormatOption, MapOption, MaxDroppedOption, PathArgument, show_losses, source_of
from rlhf.pipeline.tables import show_table

feedback_app = typer.Typer()

StoreArgument = Annotated[Path, typer.Argument(metavar="STORE", help="A feedback store.")]
MAX_PAIRS = 20  # rows of the table of two raters each


@feedback_app.command("agreement")
def data_agreement(
    store: StoreArgument, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Say how far the raters of a store agree.

    And what their rankings depend on besides.
    """
    from rlhf.data.feedback.agreement import agreement
    from rlhf.data.feedback.store import Store

    with Store.open(store) as opened:
        found = agreement(opened.rankings())
    if as_json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        _show_agreement(store, found)


@feedback_app.command("export")
def data_export(
    store: StoreArgument,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The file to write: .jsonl or .json.")],
    form: Annotated[
        str, typer.Option("--as", metavar="FORM", help="rankings, pairs (.jsonl), argilla or label-studio (.json).")
    ],
    rule: Annotated[
        str,
        typer.Option(metavar="RULE", help="How several raters become one: majority, mean_rank or bradley_terry."),
    ] = "majority",
    raters: Annotated[
        str, typer.Option(metavar="WHO", help="Who counts: people-first (judges where no person), people, judges, all.")
    ] = "people-first",
    force: Annotated[bool, typer.Option("--force", help="Write over OUT.")] = False,
) -> None:
    """Write the rankings of a feedback store, one for each prompt."""
    from rlhf.data.feedback.export import export
    from rlhf.data.feedback.store import Store

    with Store.open(store) as opened:
        told = export(opened, out, form, rule, raters, force)  # type: ignore[arg-type]  # it refuses other words
    print(f"{out}: {told.rows} rows as {form}, of {told.num_prompts} prompts and {told.num_rankings} rankings")
    print(f"  one rater: {told.num_single}; several, all of one mind: {told.num_agreed}")
    print(
        f"  several that differ: {told.num_disagreed}, resolved by {rule}" + _in_brackets(told.num_circles, "circles")
    )
    left_out = f"; {told.num_tied_pairs} tied pairs make no row" if form == "pairs" else ""
    print(f"  all answers tied: {told.num_tied}; all bad, said a rater: {told.num_all_bad}{left_out}")
    print(f"  flagged: {told.num_flagged}; skipped: {told.num_skipped}; no ranking to write: {told.num_left_out}")
    for num, what in (
        (told.num_scores_left_out, "scores of several raters, who measure each in their own way, not written"),
        (told.num_strengths_left_out, f"strengths, for which {form} has no place, not written"),
    ):
        if num:
            print(f"  {what}: {num} prompts")


@feedback_app.command("import")
def data_import(
    path: PathArgument,
    store: Annotated[Path, typer.Argument(metavar="STORE", help="A feedback store; made if it is not there.")],
    mapping: MapOption = None,
    format_: FormatOption = None,
    rater: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Whose rankings they are, and replace others of theirs; by default the file's name."
        ),
    ] = None,
    kind: Annotated[str, typer.Option(metavar="KIND", help="What the rater is: person, judge or endpoint.")] = "person",
    gold: Annotated[
        bool, typer.Option("--gold", help="These are the right ranks, of questions that all raters shall get.")
    ] = False,
    max_dropped: MaxDroppedOption = 0.0,
) -> None:
    """Put rankings of any format into a feedback store.

    Any that `rlhf data check --as preferences` reads. Annotators whom an export of Argilla or Label Studio names are
    raters of their own. Importing a file again adds nothing.
    """
    from rlhf.data.feedback.importing import import_gold, import_rankings
    from rlhf.data.feedback.schema import remove
    from rlhf.data.feedback.store import Store

    if gold and rater is not None:
        raise SettingsError("--rater: gold questions are nobody's rankings; leave it or --gold out")
    source = source_of(path, "preferences", mapping, format_)
    is_new = not store.exists()
    with Store.create(store) if is_new else Store.open(store) as opened:
        try:
            if gold:
                told = import_gold(opened, source, max_dropped)
            else:
                told = import_rankings(opened, source, rater, kind, max_dropped)
        except RefusedError:
            if is_new and not opened.progress().num_prompts:
                opened.close()
                remove(store)
            raise
    show_losses(told.report)
    found = f" ({told.report.format})" * bool(told.report.format)
    if gold:
        print(f"{store}: {told.num_prompts} gold questions from {path}{found}")
    else:
        print(f"{store}: {told.num_rankings} rankings of {told.num_prompts} prompts from {path}{found}")
        print(f"  raters: {', '.join(told.raters)}; there before: {told.num_known}")
    for num, what in (
        (told.num_replaced, "rankings replaced that these raters had given before"),
        (told.num_equal_answers, "answers left out that equal another of their ranking"),
        (told.num_new_rounds, "prompts that had other answers; these are a new round, now the one to rate"),
    ):
        if num:
            print(f"  {what}: {num}")


def _show_agreement(store: Path, found: dict[str, Any]) -> None:
    """The JSON for people."""
    if not found["num_rankings"]:
        raise SettingsError(f"{store}: nobody has ranked anything yet")
    print(f"{store}: {found['num_rankings']} rankings of {found['num_prompts']} prompts")
    print(f"{found['num_shared_prompts']} prompts have several raters")
    print()
    rows = [
        [name.replace("_", " "), _alpha(found, name), _percent(share["share"]), str(share["num_pairs"])]
        for name, share in found["agreement"].items()
        if share["num_pairs"]
    ]
    if rows:
        show_table(("among", "alpha", "agree", "pairs"), rows)
        print()
    if len(found["pairs"]) > 1:
        worst = sorted(found["pairs"], key=lambda pair: pair["share"])[:MAX_PAIRS]
        two = [[*p["raters"], str(p["num_prompts"]), _percent(p["share"])] for p in worst]
        show_table(("rater", "and", "prompts", "agree"), two)
        if len(worst) < len(found["pairs"]):
            print(f"… and {len(found['pairs']) - len(worst)} pairs of raters that agree more")
        print()
    show_table(
        ("rater", "kind", "ranked", "with rest", "with people", "gold", "seconds", "first is best"),
        [_rater_row(row) for row in found["raters"]],
    )
    _show_biases(found)


def _rater_row(row: dict[str, Any]) -> list[str]:
    gold = row["gold"]
    right = (
        f"{round(gold['share'] * gold['num_questions'])} of {gold['num_questions']}" if gold["num_questions"] else ""
    )
    return [
        row["rater"],
        row["kind"],
        str(row["num_rankings"]),
        _percent(row["with_rest"]["share"]),
        _percent(row["with_people"]["share"]),
        right,
        "" if row["seconds"] is None else f"{row['seconds']:.1f}" + " fast" * row["fast"],
        _percent(row["position"]["first_is_best"]),
    ]


def _show_biases(found: dict[str, Any]) -> None:
    position = found["position"]
    if position["num_rankings"]:
        low, high, chance = position["low"], position["high"], position["expected"]
        told = "as chance would have it" if low <= chance <= high else "not by chance: the order shown sways the raters"
        print()
        print(
            f"the answer shown first is best in {_percent(position['first_is_best'])}"
            f" ({_percent(low)} to {_percent(high)}; by chance {_percent(chance)}): {told}"
        )
        print(f"left as shown: {_percent(position['as_shown'])} (by chance {_percent(position['expected_as_shown'])})")
    if len(found["time"]) > 1:
        print()
        rows = [
            [f"{quarter['up_to_seconds']:.1f}", str(quarter["num_rankings"]), _percent(quarter["agreement"])]
            for quarter in found["time"]
        ]
        show_table(("seconds up to", "rankings", "agree with others"), rows)


def _in_brackets(num: int, what: str) -> str:
    return f" ({num} {what}, tied)" if num else ""


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def _alpha(found: dict[str, Any], who: str) -> str:
    """Alpha with its interval, as far as there is one."""
    alpha, interval = found["alpha"].get(who), found["alpha_interval"].get(who)
    told = "" if alpha is None else f"{alpha:.3f}"
    return told if interval is None else f"{told} ({interval[0]:.3f} to {interval[1]:.3f})"
