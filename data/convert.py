"""Rows of any format, written down as the toolkit's own JSON Lines."""

import json
from pathlib import Path
from typing import Any

from rlhf.data import formats
from rlhf.data.errors import SettingsError
from rlhf.data.examples import Demonstration, Prompt, Ranking
from rlhf.data.files import new_file
from rlhf.data.messages import Messages
from rlhf.data.report import Report
from rlhf.data.rows import iterate, refuse_losses
from rlhf.data.sources import Source


def convert(source: Source, kind: str, out: Path, max_dropped: float = 0.0, force: bool = False) -> Report:
    """Write the examples of a source to `out`, one a line, all or nothing; reading it gives equal examples.

    Rankings keep their ties, those without any other answer too. Prompts keep the rest of their row, except columns by
    which it would be read as another format; what of it JSON cannot hold becomes text. Raises DataError as reading for
    training does (`max_dropped` is a share of the rows), SettingsError where `out` cannot be written or is there
    already and `force` is not given.
    """
    if out.suffix != ".jsonl":
        raise SettingsError(f"{out}: the name must end in .jsonl, by which it is read as JSON Lines")
    if source.local.is_dir() and out.resolve().is_relative_to(source.local.resolve()):
        raise SettingsError(f"{out}: lies in the folder that is read, {source.path}; write it elsewhere")
    report = Report(kind)
    with new_file(out, force) as file:
        for example in iterate(source, kind, report, keep_ties=True):
            file.write(_line(own_row(example)))
        refuse_losses(report, source, max_dropped)
    return report


def own_row(example: str | Demonstration | Ranking | Prompt) -> dict[str, Any]:
    """The row that reads as this example under the toolkit's own column names."""
    if isinstance(example, str):
        return {"text": example}
    if isinstance(example, Prompt):
        return _prompt_row(example)
    if isinstance(example, Demonstration):
        return {"prompt": _cell(example.prompt), "response": example.response}
    row = {"prompt": _cell(example.prompt), "responses": example.responses, "ranks": _plain(example.ranks)}
    if example.strengths is not None:
        row["strengths"] = _plain(example.strengths)
    if example.source:
        row["source"] = example.source
    return row


def _prompt_row(prompt: Prompt) -> dict[str, Any]:
    """The prompt beside its row, less the columns by which something else would be read in its place."""
    row = {name: value for name, value in prompt.row.items() if name != "messages"}
    row = {"prompt": None} | row | {"prompt": _cell(prompt.messages)}  # comes first
    for known in formats.formats():
        if known.kind == "prompts" and "prompt" in known.columns and known.fits(row):
            row = {name: value for name, value in row.items() if name == "prompt" or name not in known.columns}
    return row


def _line(row: dict[str, Any]) -> bytes:
    try:
        return json.dumps(row, ensure_ascii=False, default=str).encode() + b"\n"
    except UnicodeEncodeError:  # half a character in a column that is not ours
        return json.dumps(row, default=str).encode() + b"\n"


def _cell(prompt: Messages) -> str | Messages:
    """One user message as its text, any other prompt as messages."""
    return prompt[0]["content"] if len(prompt) == 1 and prompt[0]["role"] == "user" else prompt


def _plain(numbers: list[float]) -> list[float]:
    """Whole numbers without their ".0"."""
    return [int(number) if number.is_integer() else number for number in numbers]
