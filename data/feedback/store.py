"""The feedback store: prompts, answers, raters and what these said, in one SQLite file without a server.

Any number of processes may have it open at once (a web page, a sampler, a command line). What a method has returned
from is on disk (`rlhf.data.feedback.schema` says what that means). Nothing is deleted: what is taken back is marked so.

A prompt's answers belong to rounds. Those of one round are ranked together, and the newest round is the one to rate.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf.data.errors import DataError
from rlhf.data.feedback import assign, checks, reading, writing
from rlhf.data.feedback.file import StoreFile
from rlhf.data.feedback.records import Answer, Judged, Progress, Rater, StoredAnswer, Task
from rlhf.data.messages import Messages


class Store(StoreFile):
    """A feedback store. Open it with `Store.create(path)` or `Store.open(path)`; both are context managers.

    Its methods may be called from several threads, one at a time goes on. Raises DataError for what it is given and
    cannot use, and for a file that is none of its kind, damaged, or locked by another process for half a minute. What
    writes also raises it, and leaves nothing behind, where the file was moved, replaced or deleted since it was opened.
    """

    # -- what is to be rated ----------------------------------------------------------------------------------

    def add_prompt(
        self,
        messages: Messages | str,
        *,
        gold_ranks: Mapping[str, int] | None = None,
        overlap: bool = False,
        meta: Mapping[str, Any] | None = None,
    ) -> int:
        """The id of a prompt, which is added if it is new; the same messages (but for outer whitespace) are the same.

        `gold_ranks` are the right ranks by the answers' texts, of a question that tells careful raters from others.
        `overlap`: all raters shall rate it. `meta`: the caller's own, as JSON can hold it. What is given for a prompt
        that is there already replaces what it had; what is not given stays.
        """
        prompt = checks.prompt(messages)
        gold = None if gold_ranks is None else checks.gold(gold_ranks)
        own = None if meta is None else checks.as_json(dict(meta))
        with self._write():
            return writing.prompt(self._db, prompt, gold, overlap, own)

    def add_answers(self, prompt_id: int, answers: Sequence[Answer]) -> list[int]:
        """Their ids, in order; all or none are added.

        Refused are an answer that the prompt has in the same round already (outer whitespace left out), and answers to
        a round that somebody has ranked, skipped or flagged: they go into a new round.
        """
        with self._write():
            self._prompt(prompt_id)
            return writing.answers(self._db, prompt_id, answers)

    def answers(self, prompt_id: int, round: int | None = None) -> list[StoredAnswer]:
        """A prompt's answers with all that is known of them, of one round or of all, in the order of their ids."""
        with self._read():
            self._prompt(prompt_id)
            return reading.answers(self._db, prompt_id, round)

    # -- who rates ---------------------------------------------------------------------------------------------

    def add_rater(self, name: str, kind: str = "person", token: str | None = None) -> int:
        """The id of a rater, who is added if the name is new. A token replaces an earlier one; its hash alone is kept.

        Give tokens that cannot be guessed, such as `secrets.token_urlsafe()`.
        """
        name = checks.rater(name, kind)
        with self._write():
            return writing.rater(self._db, name, kind, token)

    def rater_of_token(self, token: str) -> Rater | None:
        """Whose token it is."""
        with self._read():
            query = "SELECT id, name, kind FROM raters WHERE token_hash = ?"
            found = self._db.execute(query, (checks.digest(token),)).fetchone()
        return Rater(*found) if found else None

    def raters(self) -> list[Rater]:
        """All raters, in the order in which they came."""
        with self._read():
            return reading.raters(self._db)

    # -- rating ------------------------------------------------------------------------------------------------

    def next_prompt(self, rater_id: int, *, target: int = 1) -> Task | None:
        """A prompt that this rater has not rated, skipped or flagged; None if there is none at the moment.

        The same again until it is dealt with. First come the prompts of the newest round, and of each round those that
        all must rate, then those with the most ratings below `target`: people's for people, judges' for judges and
        endpoints. What a rater has in hand counts as a rating for a quarter of an hour; ranking it later is fine.
        """
        with self._read():
            kind = self._rater(rater_id).kind
            key = assign.in_hand(self._db, rater_id)
        if key is None:
            with self._write():
                key = assign.choose(self._db, rater_id, kind, target)
        if key is None:
            return None
        with self._read():
            return assign.task(self._db, rater_id, key)

    def tasks(self, rater_id: int) -> Iterator[Task]:
        """All prompts that this rater has not dealt with, whoever else has: for judges. Nothing is kept from others."""
        with self._snapshot() as db:
            for key in assign.keys_left(db, rater_id):
                yield assign.task(db, rater_id, key)

    def rank(
        self,
        request_id: str,
        prompt_id: int,
        rater_id: int,
        ranks: Mapping[int, int],
        *,
        all_bad: bool = False,
        strength: int | None = None,
        scores: Mapping[int, float] | None = None,
        note: str = "",
        seconds: float | None = None,
        shown: Sequence[int] | None = None,
    ) -> int:
        """Keep a ranking of all answers of a round; the id of the act.

        `request_id` is a UUID that the client makes: sent again, it changes nothing and the same id comes back.
        `ranks` says for each answer's id its rank: 1 is best, equal ranks are ties, gaps are closed. `all_bad`: none
        of them is any good. `strength`: how much better the best is than the worst, 1 to 7. `scores`: how good each
        answer is in the rater's own measure (a judge's number). `shown`: ids in the order in which they were shown.
        A later ranking by the same rater replaces this one.
        """
        said = checks.ranking(ranks, scores, all_bad, strength, note, shown)
        return self._act(request_id, "ranking", prompt_id, rater_id, seconds, said, ranked=set(ranks))

    def skip(
        self,
        request_id: str,
        prompt_id: int,
        rater_id: int,
        seconds: float | None = None,
        *,
        round: int | None = None,
    ) -> int:
        """Take a prompt off this rater's list, without a word; the id of the act, as of `rank`.

        `round` is that of the answers which the rater saw, by default the newest.
        """
        return self._act(request_id, "skip", prompt_id, rater_id, seconds, {}, round=round)

    def flag(
        self,
        request_id: str,
        prompt_id: int,
        rater_id: int,
        reason: str,
        seconds: float | None = None,
        *,
        round: int | None = None,
    ) -> int:
        """Take a prompt off this rater's list and say what is wrong with it; id and `round` as of `skip`."""
        said = {"text": checks.text(checks.limited(reason, "reason"), "the reason of a flag")}
        return self._act(request_id, "flag", prompt_id, rater_id, seconds, said, round=round)

    def _act(
        self,
        request_id: str,
        kind: str,
        prompt_id: int,
        rater_id: int,
        seconds: float | None,
        said: dict[str, Any],
        *,
        ranked: set[int] | None = None,
        round: int | None = None,
    ) -> int:
        request, seconds = checks.request(request_id), checks.time_spent(seconds)
        with self._write():
            if (known := writing.repeated(self._db, request, kind, prompt_id, rater_id)) is not None:
                return known
            self._rater(rater_id)
            newest = self._prompt(prompt_id)
            if ranked is not None:
                round = reading.round_of(self._db, prompt_id, ranked)
            elif round is None:
                round = newest
            elif not checks.is_whole(round) or round > newest:
                raise DataError(f"prompt {prompt_id}: no round {round!r:.40}; the newest is {newest}")
            of = {"request_id": request, "kind": kind, "prompt_id": prompt_id, "round": round, "rater_id": rater_id}
            return writing.act(self._db, of | {"seconds": seconds}, said)

    def has_act(self, request_id: str) -> bool:
        """Whether a ranking, skip or flag with this id has been stored, be it taken back since or not."""
        with self._read():
            query = "SELECT 1 FROM acts WHERE request_id = ?"
            return self._db.execute(query, (checks.request(request_id),)).fetchone() is not None

    def request_ids(self) -> set[str]:
        """Of all rankings, skips and flags that have been stored."""
        with self._read():
            return {request_id for (request_id,) in self._db.execute("SELECT request_id FROM acts")}

    def rankings_of_people(self, round: int) -> set[str]:
        """The request ids of all rankings by people that count, of the answers of a round."""
        query = (
            "SELECT request_id FROM acts a JOIN raters r ON r.id = a.rater_id"
            " WHERE r.kind = 'person' AND a.kind = 'ranking' AND a.round = ? AND a.undone_at IS NULL"
        )
        with self._read():
            return {request_id for (request_id,) in self._db.execute(query, (round,))}

    def undo(self, rater_id: int, act_id: int | None = None) -> Task | None:
        """Take back this rater's last act that counts, and give its prompt again; None if there is none.

        `act_id`, the id that `rank`, `skip` or `flag` gave, makes a request that is sent twice undo once: nothing is
        taken back if the last act is another, and the prompt in hand comes back.
        """
        with self._write():
            self._rater(rater_id)
            last = reading.last_act(self._db, rater_id)
            if act_id is not None and (last is None or last[0] != act_id):
                key = assign.in_hand(self._db, rater_id)
            elif last is None:
                key = None
            else:
                writing.undone(self._db, last[0])
                key = (last[1], last[2])
                assign.lease(self._db, rater_id, key[0])
            return None if key is None else assign.task(self._db, rater_id, key)

    def last_act(self, rater_id: int) -> int | None:
        """The id of what `undo` would take back; None if there is nothing."""
        with self._read():
            last = reading.last_act(self._db, rater_id)
        return None if last is None else last[0]

    # -- what was said -----------------------------------------------------------------------------------------

    def progress(self, rater_id: int | None = None, *, target: int = 1, round: int | None = None) -> Progress:
        """How far the rating is, over all and for each rater or the one that is asked for; of all prompts, or of those
        whose newest round this is."""
        with self._read():
            of = reading.raters(self._db) if rater_id is None else [self._rater(rater_id)]
            return reading.progress(self._db, of, target, round)

    def dealt_with(self, target: int) -> dict[int, int]:
        """How many prompts, by their rounds, `target` people or more have ranked, skipped or flagged."""
        with self._read():
            return reading.dealt_with(self._db, target)

    def rankings(self) -> Iterator[Judged]:
        """Every prompt and round that anybody ranked, skipped or flagged, with all that counts about it.

        One state of the store, however long the reading takes; what an open `batch` has not ended is not in it.
        """
        with self._snapshot() as db:
            yield from reading.judged(db)

    # -- inside ------------------------------------------------------------------------------------------------

    def _prompt(self, prompt_id: int) -> int:
        """A prompt's newest round. Raises DataError if there is no such prompt."""
        query = "SELECT round FROM prompts WHERE id = ?"
        found = self._db.execute(query, (prompt_id,)).fetchone() if checks.is_whole(prompt_id) else None
        if found is None:
            raise DataError(f"{self.path}: no prompt {prompt_id!r:.40}")
        return int(found[0])

    def _rater(self, rater_id: int) -> Rater:
        query = "SELECT id, name, kind FROM raters WHERE id = ?"
        found = self._db.execute(query, (rater_id,)).fetchone() if checks.is_whole(rater_id) else None
        if found is None:
            raise DataError(f"{self.path}: no rater {rater_id!r:.40}")
        return Rater(*found)
