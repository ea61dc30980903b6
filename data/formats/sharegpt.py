"""ShareGPT: turns of `from` and `value` (or role and content) under `conversations` or `conversation`.

The last turn must be the assistant's and is the response; all before it is the prompt, earlier answers too, so nothing
is learned from those. `function_call` is a turn of the assistant, `observation` one of a tool.
"""

from collections.abc import Iterator
from typing import Any

from rlhf.data.examples import Demonstration, Prompt
from rlhf.data.formats import Format
from rlhf.data.messages import as_conversation, as_messages, awaiting_answer


def _formats(name: str, column: str) -> Iterator[Format]:
    def read(row: dict[str, Any]) -> Demonstration:
        return Demonstration(*as_conversation(row[column], column))

    def read_prompt(row: dict[str, Any]) -> Prompt:
        messages = as_messages(row[column], column)
        if len(messages) > 1 and messages[-1]["role"] == "assistant":  # a demonstration: its prompt
            messages = messages[:-1]
        return Prompt(awaiting_answer(messages), row)

    yield Format(name, "demonstrations", (column,), read)
    yield Format(name, "prompts", (column,), read_prompt)


FORMATS = (*_formats("sharegpt", "conversations"), *_formats("sharegpt_conversation", "conversation"))
