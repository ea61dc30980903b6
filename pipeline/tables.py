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


def size_text(size: int) -> str:
    """Bytes as people read them."""
    value, units = float(size), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.1f} {units[0]}" if units[0] != "bytes" else f"{size} bytes"
