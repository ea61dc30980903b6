"""Whether a document came before: the very same, or with MinHash nearly the same."""

from collections.abc import Callable
from hashlib import blake2b
from itertools import count
from typing import Literal

from rlhf.data.errors import SettingsError

Deduplicate = Literal["exact", "minhash"]
SHINGLE = 5
"""Words in a row that are compared as one; a text with fewer is one shingle."""
THRESHOLD = 0.8
"""Share of the shingles of two documents that both hold (their Jaccard index) from which they count as the same."""
PERMUTATIONS = 128
"""Hashes kept of each document; the share is estimated from them, with a standard error of 0.035 at 0.8."""
SEED = 0


def text_digest(text: str) -> bytes:
    """16 bytes that stand for a text."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def seen_before(how: Deduplicate | None) -> Callable[[str], bool]:
    """A function that says of one text after the other whether it, or with minhash nearly it, came before.

    `exact` compares all characters, `minhash` words without regard to case; None finds nothing. What came before stays
    in memory as its hashes. Raises SettingsError where rensa, which minhash needs, is not installed.
    """
    if how is None:
        return lambda _: False
    if how == "minhash":
        return _near_duplicates()
    seen: set[bytes] = set()

    def is_repeat(text: str) -> bool:
        before = len(seen)
        seen.add(text_digest(text))
        return len(seen) == before

    return is_repeat


def _near_duplicates() -> Callable[[str], bool]:
    try:
        from rensa import RMinHash, RMinHashDeduplicator
    except ImportError:
        cure = "pip install 'rlhf-toolkit[dedup]', or use exact"
        raise SettingsError(f"deduplicate: minhash needs rensa, which is not installed; {cure}") from None
    kept = RMinHashDeduplicator(THRESHOLD, PERMUTATIONS, use_lsh=True, seed=SEED)
    names = map(str, count())

    def is_repeat(text: str) -> bool:
        words = text.casefold().split()
        sketch = RMinHash(PERMUTATIONS, SEED)
        sketch.update([" ".join(words[at : at + SHINGLE]) for at in range(max(len(words) - SHINGLE + 1, 1))])
        return not kept.add(next(names), sketch)

    return is_repeat
