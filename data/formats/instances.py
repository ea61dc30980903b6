"""Self-Instruct: an instruction with several instances, each an input (may be empty) and an output.

A row gives one demonstration per instance.
"""

from typing import Any

from rlhf.data.examples import Demonstration
from rlhf.data.formats import Format
from rlhf.data.messages import Unusable, as_list, as_question, as_response


def _read(row: dict[str, Any]) -> list[Demonstration | Unusable]:
    instances = as_list(row["instances"], "instances")
    if not isinstance(instances, list) or not all(isinstance(instance, dict) for instance in instances):
        raise Unusable("instances is not a list of objects with input and output")
    return [_instance(row["instruction"], instance) for instance in instances]


def _instance(instruction: Any, instance: dict[str, Any]) -> Demonstration | Unusable:
    try:
        prompt = as_question({"instruction": instruction, "input": instance.get("input")})
        return Demonstration(prompt, as_response(instance.get("output"), "output", prompt))
    except Unusable as unusable:
        return unusable


FORMATS = (Format("instances", "demonstrations", ("instruction", "instances"), _read),)
