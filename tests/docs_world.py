"""What the documentation says: its pages, their fenced blocks, and the commands in these."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typer.main import get_command

from rlhf.pipeline.commands import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def read(page: Path) -> tuple[list[Block], str]:
    """The fenced blocks of a page, and its text without them."""
    found, prose, start = [], [], None
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if line.startswith("```"):
            if start is None:
                start = number
            else:
                text = "".join(f"{one}\n" for one in lines[start + 1 : number])
                found.append(Block(page.relative_to(ROOT).as_posix(), start + 1, lines[start][3:], text))
                start = None
        elif start is None:
            prose.append(line)
    assert start is None, f"{page.name}:{start}: a block that does not end"
    return found, "\n".join(prose)


def blocks(*languages: str) -> list[Block]:
    """Of all pages; without languages, all of them."""
    found = [block for page in PAGES for block in read(page)[0]]
    return [block for block in found if not languages or block.language in languages]


def commands(block: Block) -> Iterator[list[str]]:
    """The commands of a block of bash that is not a script, as words."""
    if not block.text.startswith("#!"):
        for line in block.text.replace("\\\n", " ").splitlines():
            if words := shlex.split(line, comments=True):
                yield words


def inline(page: Path) -> list[str]:
    """The code in the sentences and tables of a page."""
    return [" ".join(code.split()).replace("\\|", "|") for code in re.findall(r"(?<!`)`([^`]+)`", read(page)[1])]


def parse(words: list[str]) -> tuple[Any, dict[str, Any]]:
    """The command that `rlhf WORDS` would be, and its parameters. Raises UsageError as the command line would."""
    command, name, context = get_command(app), "rlhf", None
    while True:
        context = command.make_context(name, words, parent=context)
        if not hasattr(command, "resolve_command"):
            return command, context.params
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])


def options(command: Any) -> set[str]:
    """The names of a command's options."""
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
