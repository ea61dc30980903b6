"""What is wrong with a file that a run wrote, in words that follow on its name."""

import re

from pydantic import ValidationError

from rlhf.data.errors import plain_words
from rlhf.stages.evaluation.records import Damaged


def in_words(error: ValueError, number: int | None = None) -> str:
    """Of JSON that pydantic does not take, of a file, or of its line of this `number`."""
    place = f" line {number}" if number else ""
    if isinstance(error, Damaged):
        return f"{place}{error}"
    if isinstance(error, ValidationError):
        worst = error.errors()[0]
        key = ".".join(map(str, worst["loc"])) or f"the whole {'line' if number else 'file'}"
        return f"{place}: {key} is damaged, or of another version ({plain_words(worst)})"
    told = re.sub(r"EOF while parsing an? \w+", "it breaks off", str(error))
    told = told.replace("recursion limit exceeded", "it is nested too deeply")
    return f"{place}: is damaged ({told.replace('at line 1 column', 'at column') if number else told})"
