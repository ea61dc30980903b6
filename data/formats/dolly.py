"""Dolly (databricks-dolly-15k): an instruction with an optional context, and its response.

The context stands on a line of its own after the instruction.
"""

from typing import Any

from rlhf.data.examples import Demonstration
from rlhf.data.formats import Format
from rlhf.data.messages import as_question, as_response


def _read(row: dict[str, Any]) -> Demonstration:
    question = {name: row.get(name) for name in ("instruction", "context")}
    prompt = as_question(question)
    return Demonstration(prompt, as_response(row["response"], "response", prompt))


FORMATS = (Format("dolly", "demonstrations", ("instruction", "response"), _read),)
