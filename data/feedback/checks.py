"""What a feedback store refuses to keep, and the forms in which it keeps the rest."""

import hashlib
import json
import math
import uuid
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from rlhf.data.errors import DataError
from rlhf.data.feedback.records import KINDS
from rlhf.data.messages import Messages, Unusable, as_prompt, as_text

MAX_NOTE = 10_000  # characters of a note or a reason
MAX_NAME = 100  # characters of a rater's name


def ranking(
    ranks: Mapping[int, int],
    scores: Mapping[int, float] | None,
    all_bad: bool,
    strength: int | None,
    note: str,
    shown: Sequence[int] | None,
) -> dict[str, Any]:
    """The columns of a ranking."""
    if not ranks or not all(map(is_whole, ranks.values())):
        raise DataError(f"ranks are whole numbers from 1, the best; found {dict(ranks)!r:.200}")
    if strength is not None and (not is_whole(strength) or strength > 7):
        raise DataError(f"strength is {strength!r:.40}; it goes from 1 to 7")
    if scores is not None and (scores.keys() != ranks.keys() or not all(map(_is_finite, scores.values()))):
        raise DataError("scores are finite numbers, one for each ranked answer")
    if shown is not None and (len(shown) != len(ranks) or set(shown) != set(ranks)):
        raise DataError(f"shown holds each ranked answer once; found {list(shown)!r:.200}")
    dense = {rank: place for place, rank in enumerate(sorted(set(ranks.values())), 1)}
    return {
        "ranks": as_json({answer: dense[rank] for answer, rank in ranks.items()}),
        "scores": None if scores is None else as_json({answer: float(score) for answer, score in scores.items()}),
        "all_bad": int(all_bad),
        "strength": strength,
        "text": limited(note, "note"),
        "shown": None if shown is None else as_json(list(shown)),
    }


def request(value: str) -> str:
    """The one way of writing a UUID."""
    try:
        return str(uuid.UUID(value))
    except (ValueError, AttributeError, TypeError):
        raise DataError(f"request_id is {value!r:.80}; a UUID is wanted") from None


def time_spent(seconds: float | None) -> float | None:
    """Seconds, or None where nobody measured them."""
    if seconds is not None and (not _is_finite(seconds) or seconds < 0):
        raise DataError(f"seconds is {seconds!r:.40}; a time spent is a number from 0")
    return None if seconds is None else float(seconds)


def prompt(messages: Messages | str) -> Messages:
    """Messages that leave the word to the assistant."""
    try:
        return as_prompt(messages)
    except Unusable as unusable:
        raise DataError(f"a prompt cannot be used: {unusable.reason}{unusable.detail}") from None


def gold(ranks: Mapping[str, int]) -> str:
    """Right ranks by the answers' texts."""
    if len(ranks) < 2 or not all(map(is_whole, ranks.values())):
        found = f"found {dict(ranks)!r:.200}"
        raise DataError(f"gold_ranks: two answers or more, with whole numbers from 1, the best; {found}")
    return as_json({text(answer, "an answer").strip(): rank for answer, rank in ranks.items()})


def text(value: Any, name: str) -> str:
    """A text that says something."""
    try:
        return as_text(value, name, empty=f"{name} is empty")
    except Unusable as unusable:
        raise DataError(f"{unusable.reason}{unusable.detail}") from None


def limited(value: str, name: str) -> str:
    """A note or a reason, which may be empty but has no more than so many characters."""
    if len(value) > MAX_NOTE:
        raise DataError(f"the {name} has {len(value)} characters; at most {MAX_NOTE} are kept")
    return text(value, f"the {name}") if value.strip() else ""


def rater(name: str, kind: str) -> str:
    """A rater's name."""
    # Names in Persian and others, and some emoji, hold marks that cannot be seen but join letters or part them.
    seen = name.translate({0x200C: None, 0x200D: None}).strip() if isinstance(name, str) else ""
    if isinstance(name, str) and len(name.strip()) > MAX_NAME:
        long = f"{name.strip()[:20]!r}… has {len(name.strip())}"
        raise DataError(f"a rater's name has at most {MAX_NAME} characters, and {long}; shorten it")
    if not seen or not seen.isprintable():
        found = f"found {name!r:.120}"
        raise DataError(f"a rater's name has 1 to {MAX_NAME} characters, all of which can be seen; {found}")
    if kind not in KINDS:
        raise DataError(f"rater {name!r}: no kind {kind!r}; there are {', '.join(KINDS)}")
    return name.strip()


def digest(value: str) -> bytes:
    """What equal texts, and equal tokens, have in common."""
    return hashlib.sha256(value.encode(errors="surrogatepass")).digest()


def as_json(value: Any) -> str:
    """JSON that any reader takes."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DataError(f"cannot be kept as JSON: {error}") from None


def is_whole(value: object) -> bool:
    """Whether a value is a whole number from 1 that SQLite can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value < 2**63


def _is_finite(value: object) -> bool:
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return False
