"""Rows as a source numbers them."""

from pathlib import Path
from typing import Any

from rlhf.data.sources import Source, read_rows


def rows_of(path: Path | str, **settings: Any) -> list[Any]:
    return list(read_rows(Source(path=str(path), **settings)))
