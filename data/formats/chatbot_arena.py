"""Votes of the Chatbot Arena (LMSYS, LMArena): two models answer, a person says which is better.

As published (`conversation_a`, `conversation_b`, `winner`), and as in the first Kaggle competition, with a column for
each outcome and turns as lists in JSON; plain texts, as in the second, are `two_answers`. People judge whole
conversations; only the last answers can be compared, so both must have the same turns before them.
"""

import json
from typing import Any

from rlhf.data.examples import Prompt, Ranking, by_votes, number
from rlhf.data.files import describe
from rlhf.data.formats import Format
from rlhf.data.formats.two_answers import vote_of
from rlhf.data.messages import Messages, Unusable, as_conversation, as_prompt, as_response, prompt_key

_FLAGS = ("winner_model_a", "winner_model_b", "winner_tie")


def _read_conversations(row: dict[str, Any]) -> Ranking:
    vote = vote_of(row["winner"], ("a", "b"))
    (prompt, first), (other, second) = (
        as_conversation(_listed(row[name], name), name) for name in ("conversation_a", "conversation_b")
    )
    if prompt != other and prompt_key(prompt) != prompt_key(other):
        raise _different()
    return by_votes(prompt, [first, second], [vote])


def _read_flags(row: dict[str, Any]) -> Ranking:
    flags = [number(row[name], "winner") for name in _FLAGS]
    if sorted(flags) != [0, 0, 1]:
        raise Unusable("not exactly one winner is 1", ": " + ", ".join(f"{name} {row[name]}" for name in _FLAGS))
    prompt, responses = _pair(row)
    return by_votes(prompt, responses, [(0, 1, None)[flags.index(1)]])


def _read_prompt(row: dict[str, Any]) -> Prompt:
    return Prompt(_pair(row)[0], row)


def _pair(row: dict[str, Any]) -> tuple[Messages, list[str]]:
    """The prompt and both last answers of a row whose turns are lists in JSON."""
    asked, first, second = (_listed(row[name], name) for name in ("prompt", "response_a", "response_b"))
    if not len(asked) == len(first) == len(second) > 0:
        raise Unusable("prompt and responses differ in turns", f": {len(asked)}, {len(first)} and {len(second)}")
    if first[:-1] != second[:-1]:
        raise _different()
    turns = []
    for question, answer in zip(asked, first, strict=True):
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    prompt = as_prompt(turns[:-1])
    return prompt, [as_response(answers[-1], name, prompt) for answers, name in ((first, "a"), (second, "b"))]


def _different() -> Unusable:
    return Unusable("the conversations differ before their last answers", "; such a vote is about more than one answer")


def _listed(value: Any, name: str) -> list[Any]:
    """A list of turns, also one written as JSON."""
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            raise Unusable(f"{name} is not a list of turns in JSON", f": {value[:40]!r}") from None
    if not isinstance(found, list):
        raise Unusable(f"{name} is {describe(found)}, not a list of turns")
    return found


FORMATS = (
    Format("chatbot_arena", "preferences", ("conversation_a", "conversation_b", "winner"), _read_conversations),
    Format("arena_flags", "preferences", ("prompt", "response_a", "response_b", *_FLAGS), _read_flags),
    Format("arena_flags", "prompts", ("prompt", "response_a", "response_b", *_FLAGS), _read_prompt),
)
