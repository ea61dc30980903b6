"""Secrets of the environment, tokens and passwords: they are masked in what we say and never written down. No torch."""

import json
import os
from collections.abc import Iterator, Mapping

ENDINGS = ("TOKEN", "KEY", "SECRET", "PASSWORD")
"""How the name of a variable ends whose value is a secret, such as HF_TOKEN or WANDB_API_KEY."""
SHORTEST = 8
"""Characters; what is shorter is a switch or a name, and would be masked in the middle of words."""


def secrets() -> dict[str, str]:
    """The secrets of this process's environment, by variable."""
    found = {name: value.strip() for name, value in os.environ.items() if name.upper().endswith(ENDINGS)}
    return {name: value for name, value in found.items() if len(value) >= SHORTEST}


def mask(text: str) -> str:
    """The text with *** in place of each secret."""
    for value in sorted(set(secrets().values()), key=len, reverse=True):
        for form in (value, json.dumps(value)[1:-1]):
            text = text.replace(form, "***")
    return text


def exposed(value: object, place: str = "") -> Iterator[tuple[str, str]]:
    """(dotted place, variable) of each text in nested settings that holds a secret."""
    yield from _exposed(value, place, secrets())


def _exposed(value: object, place: str, known: dict[str, str]) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _exposed(str(name), place, known)
            yield from _exposed(part, f"{place}.{name}" if place else str(name), known)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from _exposed(part, f"{place}.{number}", known)
    elif isinstance(value, str):
        yield from ((place, name) for name, secret in known.items() if secret in value)
