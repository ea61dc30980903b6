"""Names of columns: alike whatever their letter case and the blanks around them, and the exact one comes first."""

from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from functools import lru_cache
from typing import Any

SHOWN = 12  # names of columns that an error lists
COLUMNS_FOUND = " (columns found: "


def plain(name: object) -> str:
    """What names that are alike have in common."""
    return str(name).strip().casefold()


def find(name: str, columns: Iterable[str]) -> str | None:
    """The column of this name, or the only one whose name is alike."""
    columns = tuple(columns)
    if name in columns:
        return name
    alike = [column for column in columns if plain(column) == plain(name)]
    return alike[0] if len(alike) == 1 else None


def with_plain_names(row: dict[str, Any], spelled: frozenset[str]) -> dict[str, Any]:
    """A row with its columns under plain names too: `Question` is also `question`, if no other column is.

    `spelled` are known names that are not plain themselves; a column that is alike is also that one.
    """
    aliases = _aliases(tuple(row), spelled)
    return row | {name: row[column] for name, column in aliases} if aliases else row


@lru_cache(maxsize=1024)  # rows of one source mostly have the same columns
def _aliases(columns: tuple[object, ...], spelled: frozenset[str]) -> tuple[tuple[str, str], ...]:
    known = {plain(name): name for name in spelled}
    alike: dict[str, list[str]] = {}
    for column in (one for one in columns if isinstance(one, str)):
        alike.setdefault(known.get(plain(column), plain(column)), []).append(column)
    return tuple((name, found[0]) for name, found in alike.items() if len(found) == 1 and found[0] != name)


def columns_found(columns: Iterable[object]) -> str:
    """What to add to an error that a column is missing."""
    return f"{COLUMNS_FOUND}{names(columns)})"


def with_map(name: str, column: str = "YOURS") -> str:
    """How to say that `column` holds what we call `name`: in a recipe, and to the commands that read rows."""
    return f"map: {{{name}: {column}}} (`rlhf data`: --map {name}={column})"


def names(columns: Iterable[object]) -> str:
    """The first columns of a row, without the plain names that were added to it."""
    told = list(first_of_alike(columns))
    return ", ".join([*told[:SHOWN], *(["…"] if len(told) > SHOWN else [])]) or "none"


def first_of_alike(columns: Iterable[object]) -> Iterator[str]:
    """The columns of a row as they are called there, without plain names of the same."""
    seen: set[str] = set()
    for column in columns:
        if plain(column) not in seen:
            seen.add(plain(column))
            yield str(column)


def did_you_mean(name: str, known: Iterable[object]) -> str:
    """A question that an error about an unknown name ends with, where one is near; else nothing."""
    by_plain = {plain(one): str(one) for one in known}
    near = get_close_matches(plain(name), by_plain, n=1)
    return f"; did you mean {by_plain[near[0]]!r}?" if near else ""
