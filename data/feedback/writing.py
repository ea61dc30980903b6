"""What a feedback store is told: prompts, answers, raters, and their acts. All of it needs a transaction."""

import json
import sqlite3
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rlhf.data.errors import DataError
from rlhf.data.feedback import checks
from rlhf.data.feedback.records import Answer
from rlhf.data.messages import Messages, prompt_key


def prompt(db: sqlite3.Connection, messages: Messages, gold: str | None, overlap: bool, meta: str | None) -> int:
    """The id of a prompt, which is added if it is new; what is None of the others stays as it was."""
    digest = checks.digest(prompt_key(messages))
    db.execute(
        "INSERT OR IGNORE INTO prompts (digest, messages) VALUES (?, ?)",
        (digest, json.dumps(messages, ensure_ascii=False)),
    )
    [prompt_id] = db.execute("SELECT id FROM prompts WHERE digest = ?", (digest,)).fetchone()
    if gold is not None or meta is not None or overlap:
        db.execute(
            "UPDATE prompts SET gold = coalesce(?, gold), meta = coalesce(?, meta), overlap = max(?, overlap)"
            " WHERE id = ?",
            (gold, meta, int(overlap), prompt_id),
        )
    return int(prompt_id)


def answers(db: sqlite3.Connection, prompt_id: int, given: Sequence[Answer]) -> list[int]:
    """The ids of answers to a prompt that is there, none of whose rounds anybody has rated."""
    for round_ in sorted({answer.round for answer in given}):
        if not checks.is_whole(round_):
            raise DataError(f"round is {round_!r}; rounds are whole numbers from 1")
        acted = "SELECT 1 FROM acts WHERE prompt_id = ? AND round = ? AND undone_at IS NULL LIMIT 1"
        if db.execute(acted, (prompt_id, round_)).fetchone():
            raise DataError(f"prompt {prompt_id} was rated in round {round_}; give new answers a new round")
    return [_answer(db, prompt_id, answer) for answer in given]


def _answer(db: sqlite3.Connection, prompt_id: int, answer: Answer) -> int:
    text = checks.text(answer.text, "an answer")
    values = (prompt_id, answer.round, checks.digest(text.strip()), text, answer.model, answer.temperature)
    try:
        added = db.execute(
            "INSERT INTO answers (prompt_id, round, digest, text, model, temperature) VALUES (?, ?, ?, ?, ?, ?)",
            values,
        )
    except sqlite3.IntegrityError:
        found = f"{text.strip()[:40]!r} is there already"
        raise DataError(f"prompt {prompt_id}, round {answer.round}: the answer {found}; give different ones") from None
    return int(added.lastrowid or 0)


def rater(db: sqlite3.Connection, name: str, kind: str, token: str | None) -> int:
    """The id of a rater, who is added if the name is new."""
    db.execute("INSERT OR IGNORE INTO raters (name, kind) VALUES (?, ?)", (name, kind))
    rater_id, known = db.execute("SELECT id, kind FROM raters WHERE name = ?", (name,)).fetchone()
    if known != kind:
        raise DataError(f"rater {name!r} is there as {known}, not as {kind}; give another name")
    if token is not None:
        try:
            db.execute("UPDATE raters SET token_hash = ? WHERE id = ?", (checks.digest(token), rater_id))
        except sqlite3.IntegrityError:
            raise DataError(f"rater {name!r}: another rater has this token; give each their own") from None
    return int(rater_id)


def repeated(db: sqlite3.Connection, request: str, kind: str, prompt_id: int, rater_id: int) -> int | None:
    """The id of the act that a request made when it came first; None if it is new."""
    found = db.execute("SELECT id, kind, prompt_id, rater_id FROM acts WHERE request_id = ?", (request,)).fetchone()
    if found is None:
        return None
    if found[1:] != (kind, prompt_id, rater_id):
        raise DataError(f"request_id {request}: another act has it; make a new one for each")
    return int(found[0])


def act(db: sqlite3.Connection, of: Mapping[str, Any], said: Mapping[str, Any]) -> int:
    """The id of a new act, which takes the place of what the rater said of that prompt and round before.

    `of` has its request_id, kind, prompt_id, round, rater_id and seconds, `said` the columns of its kind.
    """
    now = _now()
    before = "prompt_id = :prompt_id AND round = :round AND rater_id = :rater_id AND undone_at IS NULL"
    db.execute(f"UPDATE acts SET undone_at = :now WHERE {before}", {**of, "now": now})
    values = {**of, "created_at": now, **said}
    added = db.execute(
        f"INSERT INTO acts ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})", tuple(values.values())
    )
    db.execute("DELETE FROM leases WHERE rater_id = :rater_id AND prompt_id = :prompt_id", dict(of))
    return int(added.lastrowid or 0)


def undone(db: sqlite3.Connection, act_id: int) -> None:
    """Mark an act as taken back."""
    db.execute("UPDATE acts SET undone_at = ? WHERE id = ?", (_now(), act_id))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
