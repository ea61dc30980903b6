"""What goes into a feedback store and comes out of it."""

from dataclasses import dataclass, field
from typing import Any

from rlhf.data.messages import Messages

KINDS = ("person", "judge", "endpoint")
"""Of raters: people, functions (`module:function`) and models behind a URL."""


@dataclass(frozen=True)
class Answer:
    """An answer to add. Raters see its text alone."""

    text: str
    model: str
    """The checkpoint or data set it came from."""
    temperature: float | None = None
    round: int = 1
    """Answers of one prompt and round are ranked together; a higher round opens the prompt for rating again."""


@dataclass(frozen=True)
class StoredAnswer(Answer):
    """An answer of the store."""

    id: int = 0


@dataclass(frozen=True)
class Rater:
    """Who ranks."""

    id: int
    name: str
    kind: str
    """person, judge or endpoint."""


@dataclass(frozen=True)
class Shown:
    """An answer as a rater sees it."""

    id: int
    text: str


@dataclass(frozen=True)
class Task:
    """A prompt to rate, its answers in an order that is this rater's own and stays the same when asked again."""

    prompt_id: int
    round: int
    messages: Messages
    answers: list[Shown]
    ranks: dict[int, int] = field(default_factory=dict)
    """How this rater had ranked the answers, by their ids, before taking that back; else empty."""


@dataclass(frozen=True)
class RaterProgress:
    """What one rater did, in the newest round of each prompt. Only what counts: neither taken back nor replaced."""

    rater: Rater
    num_rated: int
    num_skipped: int
    num_flagged: int
    seconds: float | None
    """Median of the last thousand rankings whose time is known; None without any."""
    num_left: int
    """Prompts that `next_prompt` would still give to this rater, those in other raters' hands counted."""


@dataclass(frozen=True)
class Progress:
    """How far the rating is, in the newest round of each prompt."""

    num_prompts: int
    """With at least two answers, so that there is something to rank."""
    num_rated: int
    """Ranked by anybody."""
    num_target: int
    """Ranked by `target` people or more."""
    num_judged: int
    """Ranked by a judge or an endpoint."""
    seconds: float | None
    """The same over all raters that were asked for."""
    raters: list[RaterProgress]
    """All, or the one that was asked for."""


@dataclass(frozen=True)
class Vote:
    """One rater's ranking of all answers of a prompt and round."""

    rater: Rater
    ranks: list[int]
    """In the order of the answers; 1 is best, equal ranks are ties, without gaps."""
    all_bad: bool = False
    strength: int | None = None
    """How much better the best answer is than the worst, 1 (hardly) to 7 (very much)."""
    scores: list[float] | None = None
    """How good each answer is in the rater's own measure, higher is better."""
    note: str = ""
    seconds: float | None = None
    shown: list[int] | None = None
    """Places of `answers` in the order in which they were shown."""


@dataclass(frozen=True)
class Judged:
    """The answers of one prompt and round, and all that counts about them."""

    prompt_id: int
    round: int
    messages: Messages
    answers: list[StoredAnswer]
    votes: list[Vote]
    num_skips: int = 0
    flags: list[str] = field(default_factory=list)
    """Reasons."""
    gold: list[int | None] | None = None
    """The right ranks, where this is a gold question; None for an answer that it says nothing of."""
    overlap: bool = False
    meta: dict[str, Any] = field(default_factory=dict)
