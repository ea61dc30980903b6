"""A question and its answer: GSM8K (answer), OpenOrca (response, with a system_prompt), MetaMathQA (query)."""

from collections.abc import Callable
from typing import Any

from rlhf.data.examples import Demonstration
from rlhf.data.formats import Format
from rlhf.data.messages import as_question, as_response


def _reader(question: str, answer: str) -> Callable[[dict[str, Any]], Demonstration]:
    def read(row: dict[str, Any]) -> Demonstration:
        prompt = as_question({question: row[question]})
        return Demonstration(prompt, as_response(row[answer], answer, prompt))

    return read


FORMATS = tuple(
    Format(f"{question}_{answer}", "demonstrations", (question, answer), _reader(question, answer))
    for question, answer in (("question", "answer"), ("question", "response"), ("query", "response"))
)
