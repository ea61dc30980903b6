"""Rows of other people's formats, read as a source of them would be."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rlhf.data.check import check
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


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


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
