"""Which prompt a rater gets next: of the newest round those first that all must rate, and then those that others have
begun, so that what is rated is rated as often as wanted, and people who stop halfway can be compared."""

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator

from rlhf.data.feedback.records import Shown, Task

LEASE_SECONDS = 15 * 60.0  # how long a prompt stays in one rater's hands

_NOT_DONE = """NOT EXISTS (SELECT 1 FROM acts WHERE prompt_id = p.id AND round = p.round AND rater_id = :rater
    AND undone_at IS NULL)"""
_IN_HAND = f"""SELECT p.id, p.round FROM leases l JOIN prompts p ON p.id = l.prompt_id
    WHERE l.rater_id = :rater AND l.until > :now AND p.ready = 1 AND {_NOT_DONE}"""
_SORTS = """SELECT round, overlap, count FROM
    (SELECT round, overlap, {count} AS count, sum(num) AS num FROM counts
     WHERE overlap = 1 OR {count} < :target GROUP BY round, overlap, {count}) sorts
    WHERE num > (SELECT coalesce(sum(num), 0) FROM dealt WHERE rater_id = :rater AND round = sorts.round
                 AND overlap = sorts.overlap AND {count} = sorts.count)
    ORDER BY round DESC, overlap DESC, count DESC"""
_OF_SORT = f"""SELECT id, round FROM prompts p
    WHERE ready = 1 AND round = :round AND overlap = :overlap AND {{count}} = :count AND {_NOT_DONE}
    AND (overlap = 1 OR :count + (
        SELECT count(*) FROM leases l JOIN raters r ON r.id = l.rater_id WHERE l.prompt_id = p.id AND l.until > :now
        AND l.rater_id <> :rater AND (r.kind = 'person') = (:kind = 'person')) < :target)
    ORDER BY id LIMIT 1"""

Key = tuple[int, int]
"""A prompt's id and a round of it."""


def count_of(kind: str) -> str:
    """The column that counts the rankings of a rater's like: a judge's do not make people's superfluous."""
    return "num_people" if kind == "person" else "num_judges"


def in_hand(db: sqlite3.Connection, rater_id: int) -> Key | None:
    """The prompt that the rater got last and has not rated yet."""
    found: Key | None = db.execute(_IN_HAND, {"rater": rater_id, "now": time.time()}).fetchone()
    return found


def choose(db: sqlite3.Connection, rater_id: int, kind: str, target: int) -> Key | None:
    """A prompt for this rater, which is now in their hand. Needs a transaction.

    What others of their like have in hand is kept back only where that makes up all the ratings it still needs.
    """
    values = {"rater": rater_id, "kind": kind, "target": target, "now": time.time()}
    # Sorts of prompts that this rater is through with are left out first: looking for one there would go over them all.
    for round_, overlap, count in db.execute(_SORTS.format(count=count_of(kind)), values).fetchall():
        sort = {"round": round_, "overlap": overlap, "count": count}
        found: Key | None = db.execute(_OF_SORT.format(count=count_of(kind)), values | sort).fetchone()
        if found is not None:
            lease(db, rater_id, found[0])
            return found
    return None


def lease(db: sqlite3.Connection, rater_id: int, prompt_id: int) -> None:
    """Put a prompt into a rater's hand, in place of what was there."""
    values = (rater_id, prompt_id, time.time() + LEASE_SECONDS)
    db.execute("INSERT OR REPLACE INTO leases (rater_id, prompt_id, until) VALUES (?, ?, ?)", values)


def keys_left(db: sqlite3.Connection, rater_id: int) -> Iterator[Key]:
    """All prompts that this rater has not dealt with, in the order in which they were added."""
    yield from db.execute(
        f"SELECT id, round FROM prompts p WHERE ready = 1 AND {_NOT_DONE} ORDER BY id", {"rater": rater_id}
    )


def task(db: sqlite3.Connection, rater_id: int, key: Key) -> Task:
    """What the rater is shown of a prompt, with what they had said before taking it back."""
    prompt_id, round_ = key
    (messages,) = db.execute("SELECT messages FROM prompts WHERE id = ?", (prompt_id,)).fetchone()
    found = db.execute("SELECT id, text FROM answers WHERE prompt_id = ? AND round = ?", key)
    answers = sorted((Shown(*row) for row in found), key=lambda answer: _place(rater_id, answer.id))
    before = db.execute(
        "SELECT round, ranks FROM acts WHERE rater_id = ? AND prompt_id = ? AND undone_at IS NOT NULL"
        " ORDER BY id DESC LIMIT 1",
        (rater_id, prompt_id),
    ).fetchone()
    ranks = json.loads(before[1]) if before and before[0] == round_ and before[1] else {}
    return Task(prompt_id, round_, json.loads(messages), answers, {int(id_): rank for id_, rank in ranks.items()})


def _place(rater_id: int, answer_id: int) -> bytes:
    """Where an answer comes for a rater: by chance, but always the same."""
    return hashlib.sha256(f"{rater_id}:{answer_id}".encode()).digest()
