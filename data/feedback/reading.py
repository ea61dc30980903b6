"""What a feedback store says: how far the rating is, and all that counts, prompt by prompt."""

import json
import sqlite3
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from statistics import median
from typing import Any

from rlhf.data.errors import DataError
from rlhf.data.feedback.assign import count_of
from rlhf.data.feedback.records import Judged, Progress, Rater, RaterProgress, StoredAnswer, Vote

RECENT = 1000  # of a rater's rankings, those whose time is looked at: a page shows it with each prompt

_ACTS = """SELECT prompt_id, round, rater_id, kind, ranks, scores, all_bad, strength, text, seconds, shown
    FROM acts WHERE undone_at IS NULL ORDER BY prompt_id, round, rater_id"""


def raters(db: sqlite3.Connection) -> list[Rater]:
    """All raters, in the order in which they came."""
    return [Rater(*row) for row in db.execute("SELECT id, name, kind FROM raters ORDER BY id")]


def answers(db: sqlite3.Connection, prompt_id: int, round_: int | None = None) -> list[StoredAnswer]:
    """A prompt's answers in the order in which they were added."""
    found = db.execute(
        "SELECT text, model, temperature, round, id FROM answers WHERE prompt_id = ? AND (? IS NULL OR round = ?)"
        " ORDER BY id",
        (prompt_id, round_, round_),
    )
    return [StoredAnswer(*row) for row in found]


def round_of(db: sqlite3.Connection, prompt_id: int, ranked: set[int]) -> int:
    """The round of a prompt that has exactly these answers, which must be two or more."""
    rounds: dict[int, set[int]] = {}
    for answer in answers(db, prompt_id):
        rounds.setdefault(answer.round, set()).add(answer.id)
    for round_, ids in rounds.items():
        if ids == ranked and len(ids) > 1:
            return round_
    wanted = sorted(max(rounds.items())[1]) if rounds else "none"
    raise DataError(f"prompt {prompt_id}: a ranking covers its two or more answers {wanted}; found {sorted(ranked)}")


def last_act(db: sqlite3.Connection, rater_id: int) -> tuple[int, int, int] | None:
    """Act, prompt and round of a rater's last act that counts. What was said of an earlier round is left out, since it
    could not be said again."""
    found: tuple[int, int, int] | None = db.execute(
        "SELECT a.id, a.prompt_id, a.round FROM acts a JOIN prompts p ON p.id = a.prompt_id AND p.round = a.round"
        " WHERE a.rater_id = ? AND a.undone_at IS NULL ORDER BY a.id DESC LIMIT 1",
        (rater_id,),
    ).fetchone()
    return found


def progress(db: sqlite3.Connection, of: Sequence[Rater], target: int, round_: int | None) -> Progress:
    """How far these raters, and all together, are."""
    values = {"target": target, "round": round_}
    within = "(:round IS NULL OR round = :round)"
    num, rated, at_target, judged = db.execute(
        "SELECT sum(num), sum(num * (num_people + num_judges > 0)), sum(num * (num_people >= :target)),"
        f" sum(num * (num_judges > 0)) FROM counts WHERE {within}",
        values,
    ).fetchone()
    times: list[float] = []
    rows = []
    for rater in of:
        of_rater = values | {"rater": rater.id}
        own = f"FROM dealt WHERE rater_id = :rater AND {within}"
        done = dict(db.execute(f"SELECT kind, sum(num) {own} GROUP BY kind", of_rater))
        # All prompts that wait for ratings, less those among them that this rater has dealt with.
        below = f"(overlap = 1 OR {count_of(rater.kind)} < :target)"
        waiting = f"(SELECT coalesce(sum(num), 0) FROM counts WHERE {below} AND {within})"
        [left] = db.execute(f"SELECT {waiting} - coalesce(sum(num), 0) {own} AND {below}", of_rater).fetchone()
        times_of = (
            "SELECT seconds FROM acts WHERE rater_id = ? AND undone_at IS NULL AND kind = 'ranking' AND seconds >= 0"
            f" ORDER BY id DESC LIMIT {RECENT}"
        )
        taken = [row[0] for row in db.execute(times_of, (rater.id,))]
        times += taken
        rows.append(
            RaterProgress(
                rater,
                num_rated=done.get("ranking", 0),
                num_skipped=done.get("skip", 0),
                num_flagged=done.get("flag", 0),
                seconds=median(taken) if taken else None,
                num_left=left,
            )
        )
    return Progress(num or 0, rated or 0, at_target or 0, judged or 0, median(times) if times else None, rows)


def dealt_with(db: sqlite3.Connection, target: int) -> dict[int, int]:
    """How many prompts, by their rounds, so many people have ranked, skipped or flagged."""
    found = db.execute(
        "SELECT round, count(*) FROM (SELECT a.round FROM acts a JOIN raters r ON r.id = a.rater_id"
        " WHERE r.kind = 'person' AND a.undone_at IS NULL GROUP BY a.prompt_id, a.round HAVING count(*) >= ?)"
        " GROUP BY round",
        (target,),
    )
    return dict(found.fetchall())


def judged(db: sqlite3.Connection) -> Iterator[Judged]:
    """Every prompt and round that anybody ranked, skipped or flagged, in the order in which they were added."""
    known = {rater.id: rater for rater in raters(db)}
    for (prompt_id, round_), acts in groupby(db.execute(_ACTS), key=itemgetter(0, 1)):
        messages, gold, overlap, meta = db.execute(
            "SELECT messages, gold, overlap, meta FROM prompts WHERE id = ?", (prompt_id,)
        ).fetchone()
        found = answers(db, prompt_id, round_)
        places = {str(answer.id): place for place, answer in enumerate(found)}
        votes: list[Vote] = []
        flags: list[str] = []
        num_skips = 0
        for _, _, rater_id, kind, *said in acts:
            if kind == "ranking":
                votes.append(_vote(known[rater_id], places, *said))
            elif kind == "flag":
                flags.append(said[4])
            else:
                num_skips += 1
        right = None if gold is None else json.loads(gold)
        yield Judged(
            prompt_id,
            round_,
            json.loads(messages),
            found,
            votes,
            num_skips,
            flags,
            None if right is None else [right.get(answer.text.strip()) for answer in found],
            bool(overlap),
            json.loads(meta),
        )


def _vote(
    rater: Rater,
    places: dict[str, int],
    ranks: str,
    scores: str | None,
    all_bad: int,
    strength: int | None,
    note: str,
    seconds: float | None,
    shown: str | None,
) -> Vote:
    def listed(text: str) -> list[Any]:
        by_id = json.loads(text)
        return [by_id[id_] for id_ in places]

    order = None if shown is None else [places[str(id_)] for id_ in json.loads(shown)]
    given = None if scores is None else listed(scores)
    return Vote(rater, listed(ranks), bool(all_bad), strength, given, note, seconds, order)
