"""Tables on the terminal."""

import sys
from collections.abc import Sequence


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on a terminal, aligned plain lines elsewhere."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*columns)
        for row in rows:
            table.add_row(*map(Text, row))
        Console().print(table)
        return
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for row in (columns, *rows):
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
