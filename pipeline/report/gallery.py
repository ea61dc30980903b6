"""Held-out prompts with the answers of several models side by side: the largest gains and losses first.

The texts of a page share a budget of bytes, so that a thousand prompts still make a page that opens at once.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

MAX_BYTES = 2_000_000
"""Of all texts: with the marks in them, which at most double two of them, curves and tables a page stays below 5 MB."""
MAX_CHARACTERS, MIN_CHARACTERS = 1000, 120
"""Of one text, if the budget allows, and in any case."""
MAX_PROMPTS = 1000
AT_EACH_END = 10
"""Gains, and losses, that stand at the top."""
IN_COMMON = 0.25
"""Share of words in common below which differences are not marked: nearly everything would be."""


@dataclass(frozen=True)
class Answer:
    """One model's answer; `html` has the words marked that the two models which are compared do not share."""

    model: str
    title: str
    html: Markup
    left_out: int
    """Characters that were cut off at the end."""
    score: float | None
    quality: float | None
    length: float | None
    """Tokens."""


@dataclass(frozen=True)
class Entry:
    """One prompt with its answers."""

    prompt: str
    prompt_left_out: int
    answers: list[Answer]
    gain: float | None
    """In the judge's quality or else in the score."""


@dataclass(frozen=True)
class Gallery:
    """Entries in groups, and how often the model after is better than the one before, over all prompts."""

    gains: list[Entry]
    losses: list[Entry]
    others: list[Entry]
    count: int
    judged: bool
    better: int
    worse: int
    dropped: int
    """Prompts for which there was no room: those with the smallest gains and losses."""


def gallery(
    rows: Sequence[dict[str, Any]], titles: dict[str, str], before: str = "sft", after: str = "ppo", scores: bool = True
) -> Gallery | None:
    """`rows` are those of evaluation.jsonl; models are shown in the order of `titles`. Gains are those of the model
    `after` over the one `before`, whose words are compared; by scores, if these are, where no judge gave qualities.
    None without answers."""
    rows = [row for row in rows if any(name in row.get("answers", {}) for name in titles)]
    if not rows:
        return None
    pair = (before, after)
    judged = all(set(pair) <= row.get("qualities", {}).keys() for row in rows)
    gains = [
        _gain(row.get("qualities" if judged else "scores", {}), *pair) if judged or scores else None for row in rows
    ]
    order = sorted(range(len(rows)), key=lambda i: -(gains[i] or 0.0))  # stable: without gains as they come
    best = [i for i in order if (gains[i] or 0) > 0][:AT_EACH_END]
    worst = [i for i in reversed(order) if (gains[i] or 0) < 0][:AT_EACH_END]
    chosen = {*best, *worst}
    others = [i for i in range(len(rows)) if i not in chosen]
    room = MAX_PROMPTS - len(chosen)
    if len(others) > room:
        largest = sorted(others, key=lambda i: -abs(gains[i] or 0.0))[:room]
        others = sorted(largest)
    num_texts = (len(chosen) + len(others)) * (1 + len(titles))
    limit = max(min(MAX_BYTES // num_texts, MAX_CHARACTERS), MIN_CHARACTERS)

    def entries(numbers: list[int]) -> list[Entry]:
        return [_entry(rows[i], gains[i], titles, pair, limit) for i in numbers]

    known = [gain for gain in gains if gain is not None]
    return Gallery(
        entries(best), entries(worst), entries(others), len(rows), judged, sum(gain > 0 for gain in known),
        sum(gain < 0 for gain in known), len(rows) - len(chosen) - len(others),
    )  # fmt: skip


def clip(text: str, limit: int) -> tuple[str, int]:
    """The beginning of a text that takes at most `limit` bytes in the page, and how many characters that leaves out."""
    if len(text) <= limit // 5 or len(escape(text).encode()) <= limit:  # five bytes is what the longest escape takes
        return text, 0
    low, high = 0, min(len(text), limit)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if len(escape(text[:middle]).encode()) <= limit else (low, middle - 1)
    return text[:low], len(text) - low


def mark(before: str, after: str) -> tuple[Markup, Markup] | None:
    """Both texts with the words marked that the other one lacks; None where they have little in common."""
    ours, theirs = (re.findall(r"\s+|[^\s]+", text) for text in (before, after))
    matcher = difflib.SequenceMatcher(a=ours, b=theirs, autojunk=False)
    if _words_in_common(matcher, ours, theirs) < IN_COMMON:
        return None
    one: list[Markup] = []
    other: list[Markup] = []
    for kind, a, b, c, d in matcher.get_opcodes():
        for parts, words, tag, changed in (
            (one, ours[a:b], "del", kind in ("delete", "replace")),
            (other, theirs[c:d], "ins", kind in ("insert", "replace")),
        ):
            text = escape("".join(words))
            parts.append(Markup(f"<{tag}>{text}</{tag}>") if changed and text.strip() else text)
    return Markup("").join(one), Markup("").join(other)


def _words_in_common(matcher: "difflib.SequenceMatcher[str]", ours: list[str], theirs: list[str]) -> float:
    """Share of the words of both texts that match; white space does not count."""
    same = sum(not word.isspace() for a, _, size in matcher.get_matching_blocks() for word in ours[a : a + size])
    words = sum(not word.isspace() for text in (ours, theirs) for word in text)
    return 2 * same / words if words else 1.0


def _gain(found: dict[str, float], before: str, after: str) -> float | None:
    one, other = found.get(before), found.get(after)
    return None if one is None or other is None else float(other - one)


def _entry(row: dict[str, Any], gain: float | None, titles: dict[str, str], pair: tuple[str, str], limit: int) -> Entry:
    texts, left_out = {}, {}
    for name in titles:
        if name in row["answers"]:
            texts[name], left_out[name] = clip(row["answers"][name].strip(), limit)
    html = {name: escape(text) for name, text in texts.items()}
    before, after = pair
    marked = mark(texts[before], texts[after]) if texts.get(before) and texts.get(after) else None
    if marked is not None and all(len(text.encode()) <= 2 * limit for text in marked):
        html[before], html[after] = marked
    prompt, prompt_left_out = clip(row["prompt"], limit)
    scores, qualities, lengths = (row.get(kind, {}) for kind in ("scores", "qualities", "lengths"))
    answers = [
        Answer(
            name, titles[name], html[name], left_out[name], *(found.get(name) for found in (scores, qualities, lengths))
        )
        for name in texts
    ]
    return Entry(prompt, prompt_left_out, answers, gain)
