"""Conversations: prompts as lists of messages, and how cells of a row become prompts and responses."""

import json
from typing import Any

from rlhf.data.sources import describe

Messages = list[dict[str, str]]  # [{"role": …, "content": …}, …]

ROLES = ("system", "user", "assistant", "tool")
ANSWER_MARKER = "\n\nAssistant:"  # begins an answer in transcripts such as Anthropic's HH


class Unusable(Exception):
    """Why one row cannot be used. Rows are counted by `reason`; `detail` is what this one row adds to it."""

    def __init__(self, reason: str, detail: str = "", ties: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail
        self.ties = ties


def prompt_text(prompt: Messages) -> str:
    """The prompt as people and judges read it: one user message as it is, else `role: content` lines."""
    if len(prompt) == 1 and prompt[0]["role"] == "user":
        return prompt[0]["content"]
    return "\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def prompt_key(prompt: Messages) -> str:
    """Equal for prompts that differ in outer whitespace alone; what splits and duplicates go by."""
    return json.dumps([[message["role"], message["content"].strip()] for message in prompt])


def as_text(value: Any, name: str, empty: str) -> str:
    """A text that says something; `empty` is the reason when it does not."""
    if value is None:
        raise Unusable(empty)
    if not isinstance(value, str):
        raise Unusable(f"{name} is {describe(value)}, not text")
    if not value.strip():
        raise Unusable(empty)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:  # no tokenizer takes it
            raise Unusable(f"{name} holds half a character (a lone surrogate)") from None
    return value


def as_prompt(value: Any) -> Messages:
    """A prompt given as text or as messages, which must leave the word to the assistant."""
    if isinstance(value, list):
        return awaiting_answer(as_messages(value, "prompt"))
    return [{"role": "user", "content": as_text(value, "prompt", empty="empty prompt")}]


def awaiting_answer(messages: Messages) -> Messages:
    """The messages themselves, if the next turn is the assistant's."""
    last = messages[-1]["role"]
    if last not in ("user", "tool"):
        raise Unusable("the last turn of the prompt is not the user's", f" but has the role {last!r}")
    return messages


def as_messages(value: Any, name: str) -> Messages:
    """Messages with known roles and some text in each."""
    if not isinstance(value, list):
        raise Unusable(f"{name} is {describe(value)}, not a list of messages")
    if not value:
        raise Unusable("empty prompt")
    messages = []
    for message in value:
        if not isinstance(message, dict) or "role" not in message:
            raise Unusable(f"{name} holds something that is not a message with role and content")
        role = message["role"]
        if role not in ROLES:
            raise Unusable("unknown role", f" {role!r}; known are {', '.join(ROLES)}")
        content = as_text(message.get("content"), f"the content of a {role} turn", empty=f"empty {role} turn")
        messages.append({"role": role, "content": content})
    return messages


def as_conversation(value: Any, name: str) -> tuple[Messages, str]:
    """Messages split at their last turn, which must be the assistant's: (prompt, response)."""
    if not _holds_messages(value):
        raise Unusable(f"{name} is {describe(value)}, not a list of messages")
    response = _last_turn(value, name)
    return awaiting_answer(as_messages(value[:-1], name)), response


def as_transcript(value: Any, name: str) -> tuple[Messages, str]:
    """A Human/Assistant transcript split at its last answer: (prompt, response), which joined are the transcript.

    At the last one, since earlier answers belong to the prompt. The prompt stays one text, markers and all.
    """
    before, marker, response = as_text(value, name, empty="empty response").rpartition(ANSWER_MARKER)
    if not marker:
        cure = r"""; add a column 'prompt', or write "\n\nHuman:" and "\n\nAssistant:" before the turns"""
        raise Unusable(f"{name} is text without a prompt", cure)
    as_text(before, name, empty="empty prompt")
    return as_prompt(before + marker), as_text(response, name, empty="empty response")


def as_response(value: Any, name: str, prompt: Messages) -> str:
    """A response given as text, or as one assistant message with or without its prompt before it."""
    if not _holds_messages(value):
        return as_text(value, name, empty="empty response")
    before = value[:-1]
    if before and prompt_key(as_messages(before, name)) != prompt_key(prompt):
        raise Unusable(f"{name} has turns that are not in the prompt")
    return _last_turn(value, name)


def _holds_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(message, dict) for message in value)


def _last_turn(value: list[dict[str, Any]], name: str) -> str:
    if value[-1].get("role") != "assistant":
        raise Unusable(f"the last turn of {name} is not the assistant's")
    return as_text(value[-1].get("content"), "the content of an assistant turn", empty="empty response")
