"""Conversations: prompts as lists of messages, and how cells of a row become prompts and responses."""

import json
from contextlib import suppress
from typing import Any

from rlhf.data.columns import with_map
from rlhf.data.files import DECODER, describe, json_detail

Messages = list[dict[str, str]]  # [{"role": …, "content": …}, …]

ROLES = ("system", "user", "assistant", "tool")
# Names that ShareGPT and its kin, and older or newer interfaces, give to these roles.
ROLE_OF = {role: role for role in ROLES} | {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "developer": "system",
}
_TALK = '[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]'
_TEXTS, _NUMBERS = r'["a \"quoted\" text", "b"]', "[1, 2]"
# Columns of ours and of formats that hold nothing but lists, each with what its cell of a table may hold.
LISTS = {
    "messages": _TALK,
    "conversations": _TALK,
    "conversation": _TALK,
    "responses": _TEXTS,
    "completions": _TEXTS,
    "ranks": _NUMBERS,
    "strengths": _NUMBERS,
    "instances": '[{"input": "", "output": "Hello"}]',
}
SYSTEM = ("system", "system_prompt")  # columns that hold a system message; the first that says something does
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
    if not value or value.isspace():
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
    """Messages, as role and content or as ShareGPT's from and value, with known roles and some text in each."""
    value = as_list(value, name)
    if not isinstance(value, list):
        raise no_list(value, name, "a list of messages")
    if not value:
        raise Unusable("empty prompt")
    messages = []
    for message in value:
        role, content = _turn(message, name)
        text = as_text(content, f"the content of a {role} turn", empty=f"empty {role} turn")
        messages.append({"role": role, "content": text})
    return messages


def as_list(value: Any, name: str) -> Any:
    """The list that a cell of a table holds as JSON text; anything else, also text that begins no list, as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return DECODER.decode(value)
    except json.JSONDecodeError as error:
        raise Unusable(f"{name} is broken JSON", f"{json_detail(error)}{_list_cure(name)}") from None
    except RecursionError:
        raise Unusable(f"{name} is JSON nested too deeply") from None


def no_list(value: Any, name: str, wanted: str = "a list") -> Unusable:
    """What to raise for a column that holds no list."""
    return Unusable(f"{name} is {describe(value)}, not {wanted}", _list_cure(name) if isinstance(value, str) else "")


def _list_cure(name: str) -> str:
    return f"; in a table's cell it is JSON, such as {LISTS[name]}" if name in LISTS else ""


def as_question(parts: dict[str, Any], history: Any = None) -> Messages:
    """A prompt from columns: earlier rounds as pairs of texts, then the parts by name, a line each.

    What is missing or blank is left out, but some part of the question must be there.
    """
    rounds = [] if is_empty(history) else history
    if not isinstance(rounds, list) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in rounds):
        raise Unusable("history is not a list of pairs of a question and an answer")
    messages = []
    for pair in rounds:
        for role, value in zip(("user", "assistant"), pair, strict=True):
            text = as_text(value, f"the {role} turn of a pair in history", empty=f"empty {role} turn")
            messages.append({"role": role, "content": text})
    said = [as_text(value, name, "") for name, value in parts.items() if not is_empty(value)]
    if not said:
        raise Unusable("empty prompt")
    return [*messages, {"role": "user", "content": "\n".join(said)}]


def system_column(row: dict[str, Any]) -> str | None:
    """The column of a row that holds its system message; None where there is none, or it says nothing."""
    return next((name for name in SYSTEM if not is_empty(row.get(name))), None)


def no_system_message(column: str) -> str:
    """What to do about a column of this name that means something else."""
    return f"rename the column, or call it something else with {with_map('source', column)}"


def with_system(prompt: Messages, row: dict[str, Any]) -> Messages:
    """The prompt after the system message that a column of its row holds; one of its own is taken instead."""
    column = system_column(row)
    if column is None or prompt[0]["role"] == "system":
        return prompt
    if not isinstance(row[column], str):
        cure = f"; if it is no system message, {no_system_message(column)}"
        raise Unusable(f"{column} is {describe(row[column])}, not text", cure)
    return [{"role": "system", "content": as_text(row[column], column, "empty system turn")}, *prompt]


def with_tools(prompt: Messages, tools: Any) -> Messages:
    """The prompt with the tools that its row offers, a JSON line each, at the end of the system message.

    `tools` is a list of objects, or that list as JSON text; anything else under this name means something else.
    """
    tools = as_list(tools, "tools")
    if not isinstance(tools, list) or not tools or not all(isinstance(tool, dict) for tool in tools):
        return prompt
    text = "\n".join(["Tools:", *map(_json, tools)])
    if prompt[0]["role"] != "system":
        return [{"role": "system", "content": text}, *prompt]
    system = prompt[0]["content"]
    if text in system:  # a converted row tells them already
        return prompt
    return [{"role": "system", "content": f"{system}\n\n{text}"}, *prompt[1:]]


def as_conversation(value: Any, name: str) -> tuple[Messages, str]:
    """Messages split at their last turn, which must be the assistant's: (prompt, response)."""
    value = as_list(value, name)
    if not _holds_messages(value):
        raise no_list(value, name, "a list of messages")
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
    role, content = _turn(value[-1], name)
    if role != "assistant":
        raise Unusable(f"the last turn of {name} is not the assistant's")
    return as_text(content, "the content of an assistant turn", empty="empty response")


def _turn(message: Any, name: str) -> tuple[str, Any]:
    """(our name of the role, what is said) of a message in any spelling."""
    if isinstance(message, dict) and "role" in message:
        role, content = message["role"], message.get("content")
    elif isinstance(message, dict) and "from" in message and "value" in message:
        role, content = message["from"], message["value"]
    else:
        raise Unusable(f"{name} holds something that is not a message with role and content")
    known = ROLE_OF.get(role) if isinstance(role, str) else None
    if known is None:
        raise Unusable("unknown role", f" {role!r}; known are {', '.join(ROLE_OF)}")
    if isinstance(content, list):
        content = "".join(map(_part, content))
    calls = message.get("tool_calls") or ([message["function_call"]] if message.get("function_call") else [])
    if calls and (content is None or isinstance(content, str)):
        if not isinstance(calls, list):
            raise Unusable("tool_calls is not a list of calls")
        content = "\n".join([*filter(None, [content]), *map(_call, calls)])
    return known, content


def _part(part: Any) -> str:
    """One of the parts that a message's content may be a list of, joined as chat templates join them."""
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        found = part.get("type") if isinstance(part, dict) else part
        raise Unusable("a turn has a part that is not text", f": {str(found)[:40]!r}; pictures and sound are not read")
    text: str = part["text"]
    return text


def _call(call: Any) -> str:
    """A call of a tool as the text that a model would write: JSON of its name and arguments."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Unusable("a call of a tool has no name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):  # as OpenAI's interface gives them
        with suppress(ValueError, RecursionError):  # a model's call may be broken; it stays as it was
            arguments = json.loads(arguments)
    return _json({"name": function["name"], "arguments": arguments})


_ENCODER = json.JSONEncoder(ensure_ascii=False, default=str)  # json.dumps would build one for each call


def _json(value: Any) -> str:
    try:
        return _ENCODER.encode(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise Unusable("a tool cannot be written as JSON", f": {error}") from None


def is_empty(value: Any) -> bool:
    """Nothing, blanks, or the NaN that pandas writes into an empty cell."""
    return value is None or value != value or (isinstance(value, str) and not value.strip())
