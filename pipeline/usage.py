"""A command line that cannot be read, as one line like any other error."""

from typing import Any

import typer

UsageError: type[Exception] = typer.BadParameter.__mro__[1]
"""Typer's own, under whatever name it has click."""


def told(error: Any) -> str:
    """What is wrong with the words, what would work, and where to read on."""
    kind, context = type(error).__name__, error.ctx
    command = context.command_path if context is not None else ""
    if kind == "NoSuchOption" and context is not None:
        options = [name for param in context.command.params for name in param.opts if name.startswith("--")]
        what = f"no option {error.option_name}; {_nearest(error.option_name, [*options, '--help'])}"
    elif kind == "MissingParameter" and error.param is not None:
        param = error.param
        name = param.opts[0] if param.param_type_name == "option" else param.metavar or param.name.upper()
        about = getattr(param, "help", None)
        what = f"{name} is missing" + (f": {about.rstrip('.')}" if about else "")
    else:
        message = error.format_message().strip().rstrip(".")
        what = message[:1].lower() + message[1:]
    if context is None:  # not every error knows its command
        return what
    return f"{command}: {what}{' ' if what.endswith('?') else '; '}`{command} --help` tells more"


def is_help(error: Exception) -> bool:
    """Whether it holds the help of a command that was given no words, and none is wrong."""
    return type(error).__name__ == "NoArgsIsHelpError"


def _nearest(name: str, names: list[str]) -> str:
    from rlhf.stages.settings import nearest

    return nearest(name, names)
