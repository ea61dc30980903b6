"""What `rlhf init` tells of a text file from its beginning: of a long one no more is read."""

import re
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlhf.data.files import DOCUMENTS, UTF16, suffixes
from rlhf.data.recognise import Recognised
from rlhf.data.rows import read_text
from rlhf.data.sources import Source

LONG = 20_000_000
"""Bytes of a text file, of which no more than the beginning is read; its size says the rest."""
_BEGINNING = 10_000  # bytes
_OF_PROMPTS = re.compile(r"(?:^|[._-])(?:prompts?|questions?)(?:[._-]|$)", re.IGNORECASE)


def are_prompts(file: Path) -> bool:
    """Whether a text file looks like a list of prompts: its name says so, or most lines at its beginning ask."""
    if not file.is_file() or suffixes(file)[0] not in DOCUMENTS:
        return False
    if _OF_PROMPTS.search(file.name):
        return True
    lines = [line.strip() for line in _beginning(file).splitlines() if line.strip()]
    return len(lines) > 1 and sum(line.endswith("?") for line in lines) > len(lines) / 2


def is_long(path: str) -> bool:
    """Whether it is a text file of which no more than the beginning is read."""
    file = Path(path).expanduser()
    return suffixes(file)[0] in DOCUMENTS and not suffixes(file)[1] and file.is_file() and file.stat().st_size > LONG


def long_text(file: Path) -> Recognised | None:
    """What a long text file holds; None where it does not begin with text, of which the readers say more."""
    try:
        text = _beginning(file)
    except ValueError:
        return None
    length = file.stat().st_size * len(text) // _BEGINNING
    return Recognised("text", format="text", rows=1, examples=1, length=length) if text.strip() else None


def as_one(texts: Sequence[Recognised]) -> Recognised:
    """The texts of a folder as one source."""
    first_bad = next((one.first_bad for one in texts if one.bad), "")
    sums = {name: sum(getattr(one, name) for one in texts) for name in ("rows", "bad", "examples", "length")}
    return replace(texts[0], **sums, first_bad=first_bad, warnings=[told for one in texts for told in one.warnings])


def _beginning(file: Path) -> str:
    """The first letters of a text file. Raises ValueError where they are none."""
    if suffixes(file)[1]:  # its reader unpacks all of it
        [text] = read_text(Source(path=str(file))).rows
        return text[:_BEGINNING]
    with file.open("rb") as opened:
        content = opened.read(_BEGINNING)
    decoder = getincrementaldecoder("utf-16" if content.startswith(UTF16) else "utf-8-sig")()
    text = decoder.decode(content)  # without a letter that is cut at the end
    if "\0" in text:
        raise ValueError("a zero is no letter")
    return text
