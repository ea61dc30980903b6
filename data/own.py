"""The toolkit's own shapes of rows, by the names of their columns, and how a row of each is read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf.data.columns import COLUMNS_FOUND, columns_found, find, with_map
from rlhf.data.examples import Demonstration, Prompt, Ranking, ranked
from rlhf.data.files import TABLES, suffixes
from rlhf.data.messages import (
    Messages,
    Unusable,
    as_conversation,
    as_list,
    as_messages,
    as_prompt,
    as_response,
    as_text,
    as_transcript,
    awaiting_answer,
    no_list,
    prompt_key,
)
from rlhf.data.report import BLANK, PLAIN
from rlhf.data.sources import Row, Source

# Kinds whose rows have columns of their own names.
NEEDS = {
    "demonstrations": "prompt and response, or messages",
    "preferences": (
        "prompt, chosen and rejected, or prompt, responses and ranks, or prompt, response_a, response_b and winner, "
        "or of one answer a row prompt, response and rank (or score)"
    ),
    "prompts": "prompt, or messages",
}
NO_PROMPT = "no prompt"  # why a row cannot be used that has no column of ours
NO_RANKS = "answers without their ranks"
# What a source's `map` can name.
COLUMNS = (
    "text",
    "prompt",
    "system",
    "messages",
    "response",
    "completion",
    "chosen",
    "rejected",
    "response_a",
    "response_b",
    "winner",
    "responses",
    "completions",
    "ranks",
    "strengths",
    "rank",
    "score",
    "source",
)
# Columns under which rows of each kind are read without further ado; a format must need more to come before them.
OWN: dict[str, tuple[tuple[str, ...], ...]] = {
    "text": (),
    "demonstrations": (("messages",), ("prompt", "response"), ("prompt", "completion")),
    "preferences": (
        ("prompt", "responses", "ranks"),
        ("prompt", "completions", "ranks"),
        ("prompt", "chosen", "rejected"),
        ("chosen", "rejected"),
    ),
    "prompts": (("messages",), ("prompt",)),
}

# One row: each returns (the shape it has, what it means) or raises Unusable.


def _parse_text(row: Row, source: Source) -> tuple[str, str]:
    if isinstance(row, str):
        return "text", as_text(row, "the row", empty=BLANK)
    columns = _columns(row)
    column = find(source.column, columns)
    if column is None:
        raise Unusable(f"no column {source.column!r}", columns_found(columns))
    return column, as_text(columns[column], column, empty=BLANK)


def _parse_prompt(row: Row, source: Source) -> tuple[str, Prompt]:
    if isinstance(row, str):
        return "text", Prompt(as_prompt(row), {"prompt": row})
    columns = _columns(row)
    if _prefers_messages(columns):
        messages = as_messages(columns["messages"], "messages")
        if len(messages) > 1 and messages[-1]["role"] == "assistant":  # a demonstration: its prompt
            messages = messages[:-1]
        return "messages", Prompt(awaiting_answer(messages), columns)
    if "prompt" in columns:
        return "prompt", Prompt(as_prompt(columns["prompt"]), columns)
    if "chosen" in columns:
        return "chosen, rejected", Prompt(_answered(columns["chosen"], "chosen")[0], columns)
    raise Unusable(NO_PROMPT, columns_found(columns))


def parse_demonstration(row: Row) -> tuple[str, Demonstration]:
    """The shape that a row has under our own names, and the demonstration in it."""
    columns = _columns(row)
    if _prefers_messages(columns):
        return "messages", Demonstration(*as_conversation(columns["messages"], "messages"))
    if "prompt" in columns:
        name = _first_of(columns, "response", "completion")
        prompt = as_prompt(columns["prompt"])
        return f"prompt, {name}", Demonstration(prompt, _response(columns, name, prompt))
    raise Unusable(NO_PROMPT, columns_found(columns))


def _parse_ranking(row: Row, source: Source) -> tuple[str, Ranking]:
    columns = _columns(row)
    ranks, strengths = [1.0, 2.0], None
    if "ranks" in columns and "prompt" in columns:
        name = _first_of(columns, "responses", "completions")
        shape = f"prompt, {name}, ranks"
        prompt = as_prompt(columns["prompt"])
        responses, ranks = _ranked(columns.get(name), columns["ranks"], name, prompt)
        strengths = _strengths(columns.get("strengths"), len(responses))
    elif "prompt" in columns:
        answers = _first_of(columns, "responses", "completions")
        if answers in columns and not {"chosen", "rejected"} & columns.keys():
            raise Unusable(NO_RANKS, f": no column 'ranks' (1 is the best) beside {answers!r}{columns_found(columns)}")
        shape = "prompt, chosen, rejected"
        prompt = as_prompt(columns["prompt"])
        responses = [_response(columns, name, prompt) for name in ("chosen", "rejected")]
        strengths = _strengths(columns.get("strengths"), 2)
    elif "chosen" in columns and "rejected" in columns:
        shape = "chosen, rejected"
        prompt, chosen = _answered(columns["chosen"], "chosen")
        other, rejected = _answered(columns["rejected"], "rejected")
        if prompt != other and prompt_key(prompt) != prompt_key(other):
            raise Unusable("chosen and rejected answer different prompts")
        responses = [chosen, rejected]
        strengths = _strengths(columns.get("strengths"), 2)
    else:
        raise Unusable(NO_PROMPT, columns_found(columns))
    return shape, ranked(prompt, responses, ranks, strengths, columns.get("source", ""))


PARSERS: dict[str, Callable[[Row, Source], tuple[str, Any]]] = {
    "text": _parse_text,
    "demonstrations": lambda row, source: parse_demonstration(row),
    "preferences": _parse_ranking,
    "prompts": _parse_prompt,
}


def cure(source: Source, kind: str, why: str) -> str:
    """What to add to an error: which columns would work, if one is missing and the source does not say what it has."""
    if COLUMNS_FOUND not in why or source.map or source.format is not None:
        return ""
    if kind == "text":
        return (
            f"; name the one that holds the text: column: YOURS (`rlhf data`: --map text=YOURS){no_header(source.path)}"
        )
    name = "ranks" if why.startswith(NO_RANKS) else "prompt"
    missing = no_header(source.path) if why.startswith(NO_PROMPT) else ""
    return f"; {kind} need {NEEDS[kind]}; name yours with {with_map(name)}{missing}"


def no_header(path: str) -> str:
    """A question that an error about unknown columns of a table ends with."""
    is_table = suffixes(Path(path))[0] in TABLES
    return "; or is the line with the names of the columns missing?" if is_table else ""


def _prefers_messages(columns: dict[str, Any]) -> bool:
    """Whether the messages tell more than the prompt beside them (ultrachat_200k: its first user turn)."""
    if "prompt" not in columns:
        return "messages" in columns
    answers = (columns.get("response"), columns.get("completion"))
    return columns.get("messages") is not None and answers == (None, None)


def _answered(value: Any, name: str) -> tuple[Messages, str]:
    """(prompt, response) of an answer that brings its prompt along, as messages or as a transcript."""
    return as_transcript(value, name) if isinstance(value, str) else as_conversation(value, name)


def _ranked(values: Any, ranks: Any, name: str, prompt: Messages) -> tuple[list[str], list[float]]:
    values, ranks = _list(values, name), _list(ranks, "ranks")
    if len(values) != len(ranks):
        raise Unusable(f"{name} and ranks differ in length", f": {len(values)} and {len(ranks)}")
    return [as_response(value, name, prompt) for value in values], ranks


def _strengths(values: Any, num: int) -> list[Any] | None:
    if values is None or (isinstance(values, str) and not values.strip()):
        return None
    values = _list(values, "strengths")
    if len(values) != num:
        raise Unusable("strengths and responses differ in length", f": {len(values)} and {num}")
    return None if any(value is None or value != value for value in values) else values  # NaN: what pandas writes


def _list(value: Any, name: str) -> list[Any]:
    value = as_list(value, name)
    if not isinstance(value, list):
        raise no_list(value, name)
    return value


def _columns(row: Row) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise Unusable(PLAIN)
    return row


def _first_of(columns: dict[str, Any], name: str, other: str) -> str:
    """The name that is there; ours if neither is, so that an error asks for it."""
    return other if other in columns and name not in columns else name


def _response(columns: dict[str, Any], name: str, prompt: Messages) -> str:
    if name not in columns:
        raise Unusable("empty response", f": no column {name!r}{columns_found(columns)}")
    return as_response(columns[name], name, prompt)
