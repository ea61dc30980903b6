"""A table of one answer a row: a prompt, an answer, and its `rank` or `score`; the rows of one prompt are a ranking.

They need not lie together; answers that stand beside another system message or other tools are to another prompt (a
`system` column that names the model of each answer leaves it alone: refused with the cure), and so many to one prompt
that something else must tell them apart (MOST_ANSWERS) are refused. The columns may be called as in a ranking
spreadsheet (`question`, `answer`, `rating` …). Rank 1 is best; of scores higher is better (true is 1, false 0), an
answer that was scored twice has the mean, and beside ranks scores are strengths, if all are numbers. As demonstrations
such rows are all learned from, whatever stands beside them, which is warned of.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

from rlhf.data.examples import Prompt, Ranking, judged, mean, number, ranked
from rlhf.data.formats import Format, Numbered, Rating, by_mean, common, ranked_together
from rlhf.data.formats.ranked_columns import ANSWERS, PROMPTS, RANKS, SCORES, question, strength
from rlhf.data.messages import Messages, Unusable, as_response, is_empty

_OWN = ("response", "completion")  # come before other names of an answer, as in demonstrations


class _Columns(NamedTuple):
    """Names of columns; None where there is none."""

    prompt: str
    answer: str
    rank: str | None
    score: str | None


class _Ranked(NamedTuple):
    """One answer with its rank, and how good it was said to be besides, higher is better."""

    prompt: Messages
    response: str
    rank: float
    strength: float | None
    source: Any


def _read_ranks(rows: list[Numbered]) -> Iterator[tuple[tuple[int, ...], Ranking | Unusable]]:
    return ranked_together(rows, _ranked, _by_rank)


def _read_scores(rows: list[Numbered]) -> Iterator[tuple[tuple[int, ...], Ranking | Unusable]]:
    return ranked_together(rows, _rating, by_mean)


def _ranked(row: dict[str, Any]) -> _Ranked:
    found, prompt, response = _answer(row)
    rank = _number(row, found.rank, "rank")
    score = None if found.score is None else strength(row[found.score])
    return _Ranked(prompt, response, rank, score, row.get("source"))


def _rating(row: dict[str, Any]) -> Rating:
    found, prompt, response = _answer(row)
    good = None if found.score is None else judged(row[found.score])
    score = _number(row, found.score, "score") if good is None else float(good)
    return Rating(prompt, response, score, row.get("source"))


def _answer(row: dict[str, Any]) -> tuple[_Columns, Messages, str]:
    """The columns of a row, its prompt and its answer."""
    found, prompt = _asked(row)
    return found, prompt, as_response(row[found.answer], found.answer, prompt)


def _asked(row: dict[str, Any]) -> tuple[_Columns, Messages]:
    """The columns of a row and its prompt."""
    found = _columns(tuple(row))
    assert found is not None
    if is_empty(row[found.prompt]):
        raise Unusable("empty prompt", "; each answer needs its prompt in its own row")
    return found, question(row, found.prompt)


def _read_prompt(row: dict[str, Any]) -> Prompt:
    return Prompt(_asked(row)[1], row)


def _number(row: dict[str, Any], column: str | None, name: str) -> float:
    assert column is not None
    if is_empty(row[column]):
        raise Unusable(f"an answer without its {name}", f": {column} is empty")
    return number(row[column], name)


def _by_rank(answers: list[tuple[int, _Ranked]]) -> Ranking:
    """An answer that stands there several times at one rank counts once, with the mean of its strengths."""
    by_text: dict[str, list[tuple[int, _Ranked]]] = {}
    for row, answer in answers:
        same = by_text.setdefault(answer.response.strip(), [])
        same.append((row, answer))
        before, first = same[0]
        if first.rank != answer.rank:
            where = f" at different ranks: {answer.response.strip()[:40]!r} in rows {before} and {row}"
            raise Unusable("identical answers", f"{where}; give it one rank, or scores, of which the mean counts")
    kept = [same[0][1] for same in by_text.values()]
    strengths = [_mean([answer.strength for _, answer in same]) for same in by_text.values()]
    return ranked(
        kept[0].prompt, [answer.response for answer in kept], [answer.rank for answer in kept],
        None if None in strengths else strengths, common([answer.source for _, answer in answers]),
    )  # fmt: skip


def _mean(strengths: list[float | None]) -> float | None:
    """None where one is missing, or their sum is no number."""
    there = [strength for strength in strengths if strength is not None]
    with suppress(Unusable):
        return mean(there, "score") if len(there) == len(strengths) else None
    return None


@lru_cache(maxsize=1024)  # rows of one source mostly have the same columns
def _columns(columns: tuple[str, ...]) -> _Columns | None:
    """None where those of prompt and answer are not there, or leave a choice."""
    prompt = next((name for name in PROMPTS if name in columns), None)
    answers = [name for name in ANSWERS if name in columns]
    answer = next((name for name in _OWN if name in answers), answers[0] if len(answers) == 1 else None)
    rank, score = (next((name for name in names if name in columns), None) for names in (RANKS, SCORES))
    return None if prompt is None or answer is None else _Columns(prompt, answer, rank, score)


def is_unranked(row: dict[str, Any]) -> bool:
    """Whether a row has a prompt and an answer, and neither rank nor score."""
    found = _columns(tuple(row))
    return found is not None and found.rank is None and found.score is None


def _is_ranked(row: dict[str, Any]) -> bool:
    found = _columns(tuple(row))
    return found is not None and found.rank is not None


def _is_scored(row: dict[str, Any]) -> bool:
    found = _columns(tuple(row))
    return found is not None and found.rank is None and found.score is not None


# No column is required, so that every format that reads such rows comes first.
ONE_A_ROW = (
    Format("ranked_answers", "preferences", (), read_all=_read_ranks, recognises=_is_ranked),
    Format("scored_answers", "preferences", (), read_all=_read_scores, recognises=_is_scored),
)
FORMATS = (
    *ONE_A_ROW,
    Format("ranked_answers", "prompts", (), _read_prompt, recognises=_is_ranked),
    Format("scored_answers", "prompts", (), _read_prompt, recognises=_is_scored),
)
