"""Whether people have rated enough to go on, and whether they have done so elsewhere."""

import shlex
from dataclasses import dataclass
from pathlib import Path

from rlhf.data.errors import DataError
from rlhf.data.feedback.store import Store


@dataclass(frozen=True)
class Rated:
    """How far the rating of a round is."""

    round: int
    num: int
    """Prompts that have been dealt with."""
    num_prompts: int
    """Of so many that have something to rank."""
    num_before: int = 0
    """Prompts that were dealt with in earlier rounds."""

    @property
    def is_done(self) -> bool:
        return self.num >= self.num_prompts


def rated(store: Store, target: int, round: int) -> Rated:
    """How many prompts of a round have been dealt with by `target` people.

    Who skips or flags a prompt has dealt with it, too: else one that nobody can rank would keep all others waiting.
    """
    found = store.dealt_with(target)
    before = sum(num for earlier, num in found.items() if earlier < round)
    return Rated(round, found.get(round, 0), store.progress(round=round).num_prompts, before)


def goes_beyond(store: Path, other: Path) -> bool:
    """Whether a store has all that raters did in another one, and more; one that cannot be read has not."""
    try:
        with Store.open(store) as one, Store.open(other) as two:
            return one.request_ids() > two.request_ids()
    except DataError:
        return False


def missing(found: Rated, target: int, store: Path) -> str:
    """What is still to be rated, and what to do about it."""
    which, before = "", ""
    if found.round > 1:
        which = f"round {found.round}: "
        before = f" ({found.num_before} of round 1{f' to {found.round - 1}' if found.round > 2 else ''})"
    if found.is_done:
        return f"{which}all {found.num_prompts} prompts are rated{before}; run again to go on"
    people, option = ("a person", "") if target == 1 else (f"{target} people", f" --target {target}")
    return (
        f"{which}{found.num} of {found.num_prompts} prompts are rated by {people}{before}: "
        f"`rlhf rank {shlex.quote(str(store))}{option}`, then run again"
    )
