"""Write docs/commands.md from the commands' own help: `python docs/make_commands.py`. A test compares."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from rlhf.pipeline.commands import app

PAGE = Path(__file__).parent / "commands.md"
WIDTH = 100
INTRODUCTION = """# Commands

<!-- written by docs/make_commands.py -->

What `rlhf COMMAND --help` says, of every command. `--debug` may stand anywhere and shows tracebacks.

| exit code | |
|---|---|
| 0 | done |
| 1 | something broke, or did not hold: a failed stage, a reward model below its bar, a damaged file |
| 2 | refused before anything was trained: a recipe, data, a folder |
| 3 | waits for people to [rank answers](feedback.md#in-a-run) |
| 130, 143 | stopped by Ctrl-C, by SIGTERM; the same command goes on |
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION]
    for name, command, context in commands(get_command(app), "rlhf"):
        parts.append(f"## {name}\n\n```text\n{helped(command, context)}\n```\n")
    return "\n".join(parts)


def commands(command: Any, name: str, parent: Any = None) -> Iterator[tuple[str, Any, Any]]:
    """Every command, with its full name and a context to ask for its help in.

    Typer has a click of its own, whose classes have no public names.
    """
    settings = command.context_settings | {"terminal_width": WIDTH}
    context = command.context_class(command, info_name=name, parent=parent, **settings)
    yield context.command_path, command, context
    for part in command.list_commands(context) if hasattr(command, "list_commands") else ():
        yield from commands(command.get_command(context, part), part, context)


def helped(command: Any, context: Any) -> str:
    """The help of a command, as lines without blanks at their ends."""
    return "\n".join(line.rstrip() for line in command.get_help(context).strip().splitlines())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
