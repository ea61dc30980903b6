"""An input and an output, each as it is (LongForm, and many sets of tasks); with an instruction it is Alpaca."""

from typing import Any

from rlhf.data.examples import Demonstration
from rlhf.data.formats import Format
from rlhf.data.messages import as_prompt, as_response


def _read(row: dict[str, Any]) -> Demonstration:
    prompt = as_prompt(row["input"])
    return Demonstration(prompt, as_response(row["output"], "output", prompt))


def _recognises(row: dict[str, Any]) -> bool:
    return "instruction" not in row


FORMATS = (Format("input_output", "demonstrations", ("input", "output"), _read, recognises=_recognises),)
