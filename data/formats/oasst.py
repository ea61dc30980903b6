"""OpenAssistant: trees of messages in which people ranked the replies to each prompt; rank 0 is best.

As trees (one row each, replies inside replies), and as single messages that name their parent, in any order. A prompt
is the path from the root. Replies without a rank, and deleted messages with all that follows them, are left out.
"""

from collections.abc import Iterator
from typing import Any

from rlhf.data.examples import DELETED, UNJUDGED, Prompt, Ranking, ranked
from rlhf.data.formats import Format, Numbered
from rlhf.data.messages import Messages, Unusable, as_text

_ROLES = {"prompter": "user", "assistant": "assistant"}
_MESSAGE = ("message_id", "parent_id", "text", "role", "rank")


def _read_tree(row: dict[str, Any]) -> list[Ranking | Unusable]:
    found: list[Ranking | Unusable] = []
    for node, path in _walk(row["prompt"]):
        if isinstance(path, Unusable):
            found.append(path)
        elif node["role"] == "prompter":
            found += _rank(path, [reply for reply in _replies(node) if _is_answer(reply)])
    if not found:
        raise Unusable(UNJUDGED, ": no prompt of this tree has two answers")
    return found


def _read_tree_prompts(row: dict[str, Any]) -> list[Prompt | Unusable]:
    """Every question of the tree, with what was said before it."""
    found: list[Prompt | Unusable] = []
    for node, path in _walk(row["prompt"]):
        if isinstance(path, Unusable):
            found.append(path)
        elif node["role"] == "prompter":
            found.append(Prompt(path, row))
    return found


def _walk(root: Any) -> Iterator[tuple[dict[str, Any], Messages | Unusable]]:
    """Each message with the path that ends with it, or with what is wrong with it; nothing after such a one."""
    todo: list[tuple[Any, Messages]] = [(root, [])]  # a stack of ours: trees can be deeper than Python's
    while todo:
        node, before = todo.pop()
        try:
            path = [*before, _message(node)]
        except Unusable as unusable:
            yield node, unusable
            continue
        yield node, path
        todo += [(reply, path) for reply in reversed(_replies(node))]


def _message(node: Any) -> dict[str, str]:
    if not isinstance(node, dict) or node.get("role") not in list(_ROLES):
        raise Unusable("a message without the role prompter or assistant")
    if _is_deleted(node):
        raise Unusable(DELETED, f": {node.get('message_id')}")
    role = _ROLES[node["role"]]
    return {"role": role, "content": as_text(node.get("text"), "text", empty=f"empty {role} turn")}


def _replies(node: dict[str, Any]) -> list[Any]:
    replies = node.get("replies")
    return replies if isinstance(replies, list) else []


def _is_answer(node: Any) -> bool:
    return isinstance(node, dict) and node.get("role") == "assistant" and not _is_deleted(node)


def _has_ids(row: dict[str, Any]) -> bool:
    return isinstance(row["message_id"], (str, int)) and isinstance(row["parent_id"], (str, int, type(None)))


def _is_deleted(node: dict[str, Any]) -> bool:
    return node.get("deleted") in (True, "True", "true")  # text in tables


def _has_rank(node: dict[str, Any]) -> bool:
    rank = node.get("rank")
    return rank is not None and rank != "" and rank == rank  # pandas writes NaN where there is none


def _rank(path: Messages, answers: list[dict[str, Any]]) -> list[Ranking | Unusable]:
    """The ranking of the answers to one prompt, if two have ranks, and each answer that has none."""
    if len(answers) < 2:
        return []  # nobody was asked to compare
    found: list[Ranking | Unusable] = [
        Unusable(UNJUDGED, f": the answer {answer.get('message_id')} has no rank")
        for answer in answers
        if not _has_rank(answer)
    ]
    placed = [answer for answer in answers if _has_rank(answer)]
    if len(placed) >= 2:
        try:
            responses = [as_text(answer.get("text"), "text", empty="empty response") for answer in placed]
            found.append(ranked(path, responses, [answer["rank"] for answer in placed]))
        except Unusable as unusable:
            found.append(unusable)
    return found


def _read_messages(rows: list[Numbered]) -> Iterator[tuple[int | tuple[int, ...], Any]]:
    """Rankings count under the rows of their answers; rows of the prompts before them are kept with them."""
    known: dict[Any, dict[str, Any]] = {}
    answers: dict[Any, list[Numbered]] = {}
    for number, row in rows:
        if known.setdefault(row["message_id"], row) is not row:
            yield number, Unusable("a message_id occurs twice", f": {row['message_id']}")
        elif _is_answer(row) and _has_rank(row):
            answers.setdefault(row["parent_id"], []).append((number, row))
    used: set[int] = set()
    for parent, group in answers.items():
        if len(group) < 2:
            continue
        numbers = tuple(number for number, _ in group)
        try:
            path = _path(parent, known)
            responses = [as_text(row["text"], "text", empty="empty response") for _, row in group]
            messages = [_message(row) for row in path]
            yield numbers, ranked(messages, responses, [row["rank"] for _, row in group])
        except Unusable as unusable:
            yield numbers, unusable
        else:
            used.update(id(row) for row in path)
        used.update(id(row) for _, row in group)
    for number, row in rows:
        if id(row) not in used and known[row["message_id"]] is row:
            yield number, Unusable(DELETED) if _is_deleted(row) else Unusable(UNJUDGED, ": it is in no ranking")


def _read_message_prompts(rows: list[Numbered]) -> Iterator[tuple[int, Any]]:
    """As of a tree; answers are kept for the questions that follow them."""
    known: dict[Any, dict[str, Any]] = {}
    for _, row in rows:
        known.setdefault(row["message_id"], row)
    for number, row in rows:
        if row["role"] == "assistant":
            continue
        try:
            if row["message_id"] in (None, ""):
                raise Unusable("no message_id")
            if known[row["message_id"]] is not row:
                raise Unusable("a message_id occurs twice", f": {row['message_id']}")
            yield number, Prompt([_message(before) for before in _path(row["message_id"], known)], row)
        except Unusable as unusable:
            yield number, unusable


def _path(message_id: Any, known: dict[Any, dict[str, Any]]) -> list[dict[str, Any]]:
    """The message's row and those of all before it, from the root."""
    path: list[dict[str, Any]] = []
    while message_id is not None and message_id != "":
        if message_id not in known:
            raise Unusable("a parent is not among the messages", f": {message_id}")
        if len(path) > len(known):
            raise Unusable("messages are their own parents", f": {message_id}")
        path.append(known[message_id])
        message_id = known[message_id]["parent_id"]
    return path[::-1]


FORMATS = (
    Format("oasst_trees", "preferences", ("message_tree_id", "prompt"), _read_tree),
    Format("oasst_trees", "prompts", ("message_tree_id", "prompt"), _read_tree_prompts),
    Format("oasst_messages", "preferences", _MESSAGE, read_all=_read_messages, recognises=_has_ids),
    Format("oasst_messages", "prompts", _MESSAGE, read_all=_read_message_prompts, recognises=_has_ids),
)
