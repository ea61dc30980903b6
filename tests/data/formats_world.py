"""Rows of other people's formats, read as a source of them would be."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlhf.data.check import check
from rlhf.data.report import Report
from rlhf.data.rows import Loaded, load
from rlhf.data.sources import Source


def read(*rows: Any, kind: str = "preferences", keep_ties: bool = False) -> Loaded[Any]:
    """What a file with these rows holds, with nothing said about their format."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return load(Source(path=str(file)), kind, keep_ties)


def dropped(loaded: Loaded[Any]) -> dict[str, list[int]]:
    """Numbers of the rows that each reason cost."""
    report = loaded.report
    assert report.kept + sum(drop.count for drop in report.dropped.values()) == report.rows
    return {reason: drop.rows for reason, drop in report.dropped.items()}


def counts(report: Report) -> dict[str, tuple[int, list[int]]]:
    """How many rows each reason cost, and the numbers of the first."""
    return {reason: (drop.count, drop.rows) for reason, drop in report.dropped.items()}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def tool(content: str) -> dict[str, str]:
    return {"role": "tool", "content": content}


def said(*turns: str) -> list[dict[str, str]]:
    """ShareGPT turns from `human: Hi`."""
    return [dict(zip(("from", "value"), turn.split(": ", 1), strict=True)) for turn in turns]


def ranks(source: Source) -> list[list[float]]:
    """Ranks of all that can be used, ties kept."""
    return [ranking.ranks for ranking in load(source, "preferences", keep_ties=True).rows]


def why(source: Source, kind: str = "preferences") -> dict[str, list[int]]:
    return {reason: drop.rows for reason, drop in load(source, kind).report.dropped.items()}


def found(source: Source, kind: str = "preferences") -> tuple[Any, ...]:
    """(format, rows, kept, {reason: (count, rows)}, pairs, ties, prompts) as `rlhf data check` tells them."""
    told = check(source, kind)
    dropped = {reason: (drop["count"], drop["rows"]) for reason, drop in told["dropped"].items()}
    return (
        *(told[name] for name in ("format", "rows", "kept")),
        dropped,
        *(told[n] for n in ("pairs", "ties", "prompts")),
    )


def table(folder: Path, text: str, encoding: str = "utf-8", **settings: Any) -> Source:
    """A CSV file; keyword arguments are further fields of the source."""
    (folder / "long.csv").write_bytes(text.encode(encoding))
    return Source(path=str(folder / "long.csv"), **settings)


def answers(*values: Any, name: str = "rank", prompt: str = "Q") -> list[dict[str, Any]]:
    """Rows of one answer each: a, b, c and d with these ranks, or whatever `name` is."""
    return [{"prompt": prompt, "response": text, name: value} for text, value in zip("abcd", values, strict=False)]
