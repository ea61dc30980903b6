"""A feedback store in a few words."""

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from rlhf.data.feedback.records import Answer, Judged, Rater, StoredAnswer, Vote
from rlhf.data.feedback.store import Store


def new() -> str:
    """A request id."""
    return str(uuid.uuid4())


def asked(store: Store, prompt: Any, *texts: str, round: int = 1, **more: Any) -> tuple[int, list[int]]:
    """A prompt with answers; their ids."""
    id_ = store.add_prompt(prompt, **more)
    return id_, store.add_answers(id_, [Answer(text, "model", round=round) for text in texts])


def rank(store: Store, prompt: int, rater: int, ids: Iterable[int], ranks: Iterable[int], **more: Any) -> int:
    """A ranking, with ranks in the order of the answers."""
    return store.rank(new(), prompt, rater, dict(zip(ids, ranks, strict=True)), **more)


def one(store: Store, prompt: str) -> tuple[int, int, list[int]]:
    """A prompt with two answers, and who shall rate it: prompt, rater and answers by their ids."""
    id_, ids = asked(store, prompt, "a", "b")
    return id_, store.add_rater("anna"), ids


def vote(name: str, *ranks: int, kind: str = "person", **more: Any) -> Vote:
    """What a rater said, without a store."""
    return Vote(Rater(sum(map(ord, name)), name, kind), list(ranks), **more)


def judged(*votes: Vote, gold: Sequence[int | None] | None = None) -> Judged:
    """A prompt that was rated, without a store."""
    answers = [StoredAnswer(f"answer {place}", "model", id=place) for place in range(len(votes[0].ranks))]
    messages = [{"role": "user", "content": "q"}]
    return Judged(1, 1, messages, answers, list(votes), gold=None if gold is None else list(gold))
