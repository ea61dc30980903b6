"""What the page's forms send, read and checked before the store sees it."""

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from starlette.exceptions import HTTPException

from rlhf.data.feedback.checks import MAX_NOTE

MAX_FIELDS = 1000


class Form:
    """The fields of a form; what is missing or no number of its kind is refused with 400."""

    def __init__(self, body: bytes) -> None:
        try:
            pairs = parse_qsl(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MAX_FIELDS)
        except ValueError:
            raise HTTPException(400, "This is no form.") from None
        self._fields = dict(pairs)

    def text(self, name: str) -> str:
        """A text, with line ends as everywhere but in forms."""
        value = self._fields.get(name, "").replace("\r\n", "\n")
        if len(value) > MAX_NOTE:
            raise HTTPException(413, f"{name}: at most {MAX_NOTE:,} characters are kept.")
        return value

    def number(self, name: str) -> int | None:
        """A whole number from 0; None where the field is empty or missing."""
        value = self._fields.get(name, "")
        return _whole(name, value) if value else None

    def wanted(self, name: str) -> int:
        """A whole number that must be there."""
        return _whole(name, self._fields.get(name, ""))

    def numbers(self, name: str) -> list[int]:
        """Whole numbers with commas between."""
        return [_whole(name, value) for value in self._fields.get(name, "").split(",")]

    def seconds(self) -> float | None:
        """Time spent; None where the page could not measure it."""
        value = self._fields.get("seconds", "")
        if not value:
            return None
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", value):
            raise HTTPException(400, "seconds: a number is wanted.")
        return float(value)

    def has(self, name: str) -> bool:
        return name in self._fields


@dataclass(frozen=True)
class Ranking:
    """Of a form, what `Store.rank` takes beside the ids of request, prompt and rater."""

    ranks: dict[int, int]
    more: dict[str, Any]


def ranking(form: Form) -> Ranking:
    """A ranking. Answers without a rank are last, all of them together, but only where all answers are bad."""
    shown = form.numbers("shown")
    all_bad = form.has("all_bad")
    ranks: dict[int, int] = {}
    for answer in shown:
        rank = form.number(f"rank.{answer}")
        if rank is None:
            if not all_bad:
                raise HTTPException(400, "Give every answer a rank, or say that all are bad.")
            rank = len(shown)
        if not 1 <= rank <= len(shown):
            raise HTTPException(400, f"Ranks go from 1 to {len(shown)}.")
        ranks[answer] = rank
    more = {
        "all_bad": all_bad,
        "strength": form.number("strength"),
        "note": form.text("note"),
        "seconds": form.seconds(),
        "shown": shown,
    }
    return Ranking(ranks, more)


def _whole(name: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", value):
        raise HTTPException(400, f"{name}: a number is wanted.")
    return int(value)
