"""Under which names a row's columns are read: those of the source's `map`, and plain ones."""

from contextlib import suppress
from functools import cache
from typing import Any

from rlhf.data import formats
from rlhf.data.columns import columns_found, did_you_mean, find, plain, with_plain_names
from rlhf.data.errors import DataError
from rlhf.data.messages import LISTS, SYSTEM, Unusable, as_list
from rlhf.data.own import COLUMNS
from rlhf.data.sources import Row, Source


def with_our_names(row: Row, source: Source, kind: str) -> Row:
    """The row with the columns that the source's `map` names under our names too, and all under their plain names."""
    if not isinstance(row, dict):
        return row
    mapped: dict[str, Any] = {}
    for name, column in source.map.items():
        found = find(column, row)
        if found is None:
            raise Unusable(f"no column {column!r} to read as {name}", columns_found(row))
        mapped[name] = row[found]
    row = row | mapped if mapped else row
    if kind == "text":
        return row
    row = with_plain_names(row, _spelled())
    if source.map:
        row = row | _said_otherwise(source)
    for name in LISTS:
        if isinstance(row.get(name), str):
            with suppress(Unusable):  # a broken one matters to those alone who read it
                row = row | {name: as_list(row[name], name)}
    return row


def _said_otherwise(source: Source) -> dict[str, None]:
    """Columns with the name of a system message, of which the source's `map` says that they hold something else."""
    other = {plain(column) for name, column in source.map.items() if name not in SYSTEM}
    return {name: None for name in SYSTEM if name in other and name not in source.map}


@cache
def _spelled() -> frozenset[str]:
    """Names of columns in formats that have capitals."""
    return frozenset(name for known in formats.formats() for name in known.columns if name != plain(name))


def check_map(source: Source, columns: dict[str, None]) -> None:
    """Refuse a map with a name that is not ours, or with a column that is in none of the rows."""
    for name, column in source.map.items():
        if name not in COLUMNS:
            known = did_you_mean(name, COLUMNS) or f"; there are {', '.join(COLUMNS)}"
            raise DataError(f"{source.path}: map: no column of ours is called {name!r}{known}")
        if not any(plain(column) == plain(one) for one in columns):
            there = did_you_mean(column, columns) or columns_found(columns)
            raise DataError(f"{source.path}: map: no column {column!r} to read as {name}{there}")
