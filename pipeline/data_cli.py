"""`rlhf data`: look at rows before training on them, and write them down in the toolkit's own format."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlhf.data.errors import DataError, SettingsError
from rlhf.pipeline.progress import waiting
from rlhf.pipeline.tables import show_table

if TYPE_CHECKING:
    from rlhf.data.report import Report
    from rlhf.data.sources import Source

data_app = typer.Typer(
    help="Look at rows before training on them, convert them.", no_args_is_help=True, rich_markup_mode=None
)

PathArgument = Annotated[str, typer.Argument(metavar="PATH", help="A file, folder, module:function or hub id.")]
KindOption = Annotated[str, typer.Option("--as", metavar="KIND", help="text, demonstrations, preferences or prompts.")]
MapOption = Annotated[
    list[str] | None,
    typer.Option("--map", metavar="NAME=COLUMN", help="Which column holds NAME: prompt=question (repeatable)."),
]
FormatOption = Annotated[
    str | None,
    typer.Option("--format", metavar="NAME", help="The rows' format, where their columns leave a choice."),
]
MaxDroppedOption = Annotated[float, typer.Option(min=0, max=1, help="Share of unusable rows to go on without.")]
_WITH_PROMPTS = ("rows", "kept", "prompts", "duplicates")
COUNTS = {
    "text": ("rows", "kept", "duplicates"),
    "demonstrations": _WITH_PROMPTS,
    "prompts": _WITH_PROMPTS,
    "preferences": ("rows", "kept", "prompts", "pairs", "ties", "duplicates"),
}
"""What there is to count of each kind."""
BAR = 40  # characters of the longest bar of a histogram


@data_app.command("check")
def data_check(
    path: PathArgument,
    kind: KindOption,
    mapping: MapOption = None,
    format_: FormatOption = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Measure lengths in tokens: a model's folder or hub id."),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(min=1, metavar="TOKENS", help="Count what this max_length would cut or leave out."),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Look for prompts that this set holds too."),
    ] = None,
    against_kind: Annotated[
        str | None,
        typer.Option("--against-as", metavar="KIND", help="Kind of that set, if it is another."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Count what rows would be used, which dropped, and why.

    Exit code 2 if no row can be used.
    """
    from rlhf.data.check import NOTHING_LEFT, check
    from rlhf.data.own import cure
    from rlhf.data.sources import Source

    if against_kind is not None and against is None:
        raise SettingsError(f"--against-as {against_kind}: say with --against PATH which set is meant")
    other = None if against is None else Source(path=against)
    source = source_of(path, kind, mapping, format_)
    with waiting(f"reading {path}") as say:
        found = check(
            source, kind, tokenizer, max_length, other, against_kind, lambda rows: say(f"{rows} rows of {path} read")
        )
    if as_json:
        print(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        _show(path, found, "characters" if tokenizer is None else "tokens", against)
    if not found["kept"]:
        whys = [why + found["details"].get(why, "") for why in found["dropped"]]  # the table has shown them
        needed = next(filter(None, (cure(source, kind, why) for why in whys)), "")
        raise DataError(f"{path}: {NOTHING_LEFT}{needed}")


@data_app.command("convert")
def data_convert(
    path: PathArgument,
    kind: KindOption,
    out: Annotated[Path, typer.Argument(metavar="OUT.jsonl", help="The file to write.")],
    mapping: MapOption = None,
    format_: FormatOption = None,
    max_dropped: MaxDroppedOption = 0.0,
    force: Annotated[bool, typer.Option("--force", help="Write over OUT.jsonl.")] = False,
) -> None:
    """Write rows of any format in the toolkit's own.

    Rankings keep their ties, strengths and source; prompts keep the rest of their row.
    """
    from rlhf.data.convert import convert

    with waiting(f"reading {path}"):
        report = convert(source_of(path, kind, mapping, format_), kind, out, max_dropped, force)
    show_losses(report)
    print(
        f"{out}: {report.kept} of {report.rows} rows of {path} as {kind}" + f" ({report.format})" * bool(report.format)
    )


def show_losses(report: "Report") -> None:
    """On stderr what was dropped, and what else there is to know of a source."""
    for losses, where in ((report.dropped, ""), (report.parts, " in rows that were kept")):
        for reason, drop in losses.items():
            print(f"dropped {drop.count}: {reason} {_rows(drop.count, drop.rows)}{where}", file=sys.stderr)
    for warning in report.warnings:
        print(f"warning: {warning}", file=sys.stderr)


def source_of(path: str, kind: str, mapping: list[str] | None, format_: str | None) -> "Source":
    """The source that the words of a command describe."""
    from rlhf.data.sources import Source

    columns: dict[str, str] = {}
    for pair in mapping or ():
        name, _, column = pair.partition("=")
        if not name or not column:
            raise SettingsError(f"--map {pair}: write NAME=COLUMN, for example --map prompt=question")
        columns[name] = column
    text: dict[str, Any] = {"column": columns.pop("text")} if kind == "text" and "text" in columns else {}
    return Source(path=path, map=columns, format=format_, **text)


def _show(path: str, found: dict[str, Any], unit: str, against: str | None) -> None:
    """The JSON for people."""
    from rlhf.data.check import NOTHING_LEFT

    print(f"{path} as {found['kind']}" + (f" ({found['format']})" if found["format"] else ""))
    counts = COUNTS[found["kind"]]
    if sys.stdout.isatty():
        show_table(counts, [[str(found[name]) for name in counts]])
    else:
        print("  ".join(f"{name} {found[name]}" for name in counts))
    for name, title in (("dropped", "dropped"), ("parts", "left out of kept rows")):
        if found[name]:
            print()
            show_table(
                (title, "why", "where"),
                [
                    (str(drop["count"]), why + found["details"].get(why, ""), _rows(drop["count"], drop["rows"]))
                    for why, drop in found[name].items()
                ],
            )
    lines = []
    if found["kind"] == "text" and found["duplicates"]:
        lines.append("duplicates are trained on too, unless pretrain.deduplicate is set (exact, or minhash)")
    if found["longer_wins"] is not None:
        lines.append(f"the better answer is the longer one (in {unit}) in {found['longer_wins']:.1%} of pairs")
    opposed = found["contradictions"]
    if opposed["count"]:
        rows = "; ".join(f"{earlier} and {later}" for earlier, later in opposed["rows"])
        more = "; …" if opposed["count"] > len(opposed["rows"]) else ""
        lines.append(f"contradictions {opposed['count']}: the same two answers, ranked both ways (rows {rows}{more})")
    if (shared := found["shared_prompts"]) is not None:
        where = _rows(shared["count"], shared["rows"])
        lines.append(f"prompts that {against} holds too {shared['count']} {where}".rstrip())
    if found["lengths"]:
        _show_block(lines)
        lines = []
    for name, lengths in (found["lengths"] or {}).items():
        if name == "max_length":
            shares = f"{lengths['truncated']:.1%} would be truncated, {lengths['left_out']:.1%} left out"
            lines.append(f"max_length {lengths['tokens']}: {shares}")
        else:
            _show_histogram(name, lengths)
    # that nothing is left is an error, which comes last
    lines += [f"warning: {warning}" for warning in found["warnings"] if not warning.startswith(NOTHING_LEFT)]
    _show_block(lines)
    for sample in found["samples"]:
        print(f"\nas read, row {sample['row']}")
        _show_sample(sample)


def _show_block(lines: list[str]) -> None:
    if lines:
        print("", *lines, sep="\n")


def _show_histogram(name: str, lengths: dict[str, Any]) -> None:
    print(f"\n{name} tokens: " + ", ".join(f"{key} {lengths[key]}" for key in ("min", "p50", "p90", "p99", "max")))
    most = max(bucket["count"] for bucket in lengths["buckets"])
    for bucket in lengths["buckets"]:
        bar = "█" * -(-BAR * bucket["count"] // most)  # rounded up: one is seen too
        print(f"  to {bucket['to']:>7} {bucket['count']:>9} {bar}".rstrip())


def _show_sample(sample: dict[str, Any]) -> None:
    """One example, its texts as JSON writes them: line ends and spaces are seen."""
    ranks = sample.get("ranks", [])
    for name, value in sample.items():
        if name == "responses":
            strengths = sample.get("strengths", [""] * len(ranks))
            for response, rank, strength in zip(value, ranks, strengths, strict=True):
                said = f" (strength {strength})" if strength != "" else ""
                print(f"  rank {rank}{said}: {json.dumps(response, ensure_ascii=False)}")
            if more := sample.get("more_answers"):
                print(f"  … and {more} more")
        elif isinstance(value, str):
            print(f"  {name}: {json.dumps(value, ensure_ascii=False)}")


def _rows(count: int, rows: list[int]) -> str:
    """The first few row numbers of so many: (rows 1, 2, …)."""
    if not rows:
        return ""
    return f"(row{'s' if count > 1 else ''} {', '.join(map(str, rows))}{', …' if count > len(rows) else ''})"
