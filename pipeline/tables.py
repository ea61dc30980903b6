"""Tables on the terminal."""

import sys
from collections.abc import Sequence


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on a terminal; elsewhere aligned plain lines, as wide as they are, one for each row.

    On a terminal that is too narrow for its words each row is told by itself, headed by its first cell.
    """
    rows = [[in_one_line(cell) for cell in row] for row in rows]
    columns = [in_one_line(name) for name in columns]
    if sys.stdout.isatty():
        return _draw(columns, rows)
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def in_one_line(text: str) -> str:
    """Line breaks and what else would do something to a terminal, as Python writes them: \\n."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def _draw(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.columns import Columns
    from rich.console import Console
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console, cells = Console(), list(zip(columns, *rows, strict=True))
    longest_words = [max(len(word) for cell in column for word in cell.split() or [""]) for column in cells]
    if sum(longest_words) + 2 * len(columns) <= console.width:
        table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for name, *column in cells:  # rich shrinks what may wrap, and that first
            table.add_column(name, overflow="fold", no_wrap=not any(" " in cell for cell in column))
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
        return
    for first, *others in rows:
        told = [Text(f"{name} {cell}") for name, cell in zip(columns[1:], others, strict=True) if cell]
        console.print(Text(first, style="bold"), Padding(Columns(told, padding=(0, 2)), (0, 0, 0, 2)))


def size_text(size: int) -> str:
    """Bytes as people read them."""
    value, units = float(size), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.1f} {units[0]}" if units[0] != "bytes" else f"{size} bytes"
