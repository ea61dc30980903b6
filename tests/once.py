"""What this process would make anew each time, and which is the same each time."""

from functools import cache

import typer.main


@cache
def make_once() -> None:
    """From now on it parses the signatures of commands once."""
    typer.main.get_command = cache(typer.main.get_command)
