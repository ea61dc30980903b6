"""Rows of other people's formats, read as a source of them would be."""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
