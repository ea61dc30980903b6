"""Alpaca: an instruction with an optional input, and its output; also with earlier rounds.

The input stands on a line of its own after the instruction. `history` is a list of pairs of a question and an answer
(LLaMA-Factory, ms-swift). Keys may differ from row to row; what is missing, blank or null is left out of the prompt.
"""

from typing import Any

from rlhf.data.examples import Demonstration
from rlhf.data.formats import Format
from rlhf.data.messages import as_question, as_response


def _read(row: dict[str, Any]) -> Demonstration:
    question = {name: row.get(name) for name in ("instruction", "input")}
    prompt = as_question(question, row.get("history"))
    return Demonstration(prompt, as_response(row["output"], "output", prompt))


FORMATS = (Format("alpaca", "demonstrations", ("instruction", "output"), _read),)
