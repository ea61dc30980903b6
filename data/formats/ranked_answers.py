"""A table of one answer a row: a prompt, an answer, and its `rank` or `score`; the rows of one prompt are a ranking.

They need not lie together. The columns may be called as in a ranking spreadsheet (`question`, `answer`, `rating` …).
Rank 1 is best; of scores higher is better, an answer that was scored twice has the mean, and beside ranks scores are
strengths. As demonstrations such rows are all learned from, whatever stands beside them, which is warned of.
"""

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

from rlhf.data.examples import Ranking, number, ranked
from rlhf.data.formats import Format, Numbered, Rating, rated
from rlhf.data.formats.ranked_columns import ANSWERS, PROMPTS, RANKS, SCORES, is_empty, question
from rlhf.data.formats.unpaired import is_judged
from rlhf.data.messages import Unusable, as_response

_OWN = ("response", "completion")  # come before other names of an answer, as in demonstrations


class _Columns(NamedTuple):
    """Names of columns; None where there is none."""

    prompt: str
    answer: str
    rank: str | None
    score: str | None


def _read_ranks(rows: list[Numbered]) -> Iterator[tuple[tuple[int, ...], Ranking | Unusable]]:
    return rated(rows, lambda row: _rating(row, "rank"), _by_rank)


def _read_scores(rows: list[Numbered]) -> Iterator[tuple[tuple[int, ...], Ranking | Unusable]]:
    return rated(rows, lambda row: _rating(row, "score"))


def _rating(row: dict[str, Any], name: str) -> Rating:
    found = _columns(tuple(row))
    assert found is not None
    if is_empty(row[found.prompt]):
        raise Unusable("empty prompt", "; each answer needs its prompt in its own row")
    prompt = question(row, found.prompt)
    answer = as_response(row[found.answer], found.answer, prompt)
    column = found.rank if name == "rank" else found.score
    assert column is not None
    if is_empty(row[column]):
        raise Unusable(f"an answer without its {name}", f": {column} is empty")
    strength = row[found.score] if name == "rank" and found.score else None
    return Rating(
        prompt, answer, number(row[column], name), row.get("source"),
        None if is_empty(strength) else number(strength, "score"),
    )  # fmt: skip


def _by_rank(ratings: list[tuple[int, Rating]]) -> Ranking:
    """An answer that stands there twice at one rank counts once."""
    answers: dict[str, tuple[int, Rating]] = {}
    for row, rating in ratings:
        before, same = answers.setdefault(rating.response.strip(), (row, rating))
        if same.score != rating.score:
            where = f" at different ranks: {rating.response.strip()[:40]!r} in rows {before} and {row}"
            raise Unusable("identical answers", f"{where}; give it one rank, or scores, of which the mean counts")
    kept = [rating for _, rating in answers.values()]
    strengths = [rating.strength for rating in kept]
    return ranked(
        kept[0].prompt, [rating.response for rating in kept], [rating.score for rating in kept],
        None if None in strengths else strengths, kept[0].source,
    )  # fmt: skip


@lru_cache(maxsize=1024)  # rows of one source mostly have the same columns
def _columns(columns: tuple[str, ...]) -> _Columns | None:
    """None where they are not there, or leave a choice."""
    prompt = next((name for name in PROMPTS if name in columns), None)
    answers = [name for name in ANSWERS if name in columns]
    answer = next((name for name in _OWN if name in answers), answers[0] if len(answers) == 1 else None)
    rank, score = (next((name for name in names if name in columns), None) for names in (RANKS, SCORES))
    return None if prompt is None or answer is None or not (rank or score) else _Columns(prompt, answer, rank, score)


def _recognises(ranks: bool) -> Callable[[dict[str, Any]], bool]:
    def recognises(row: dict[str, Any]) -> bool:
        found = _columns(tuple(row))
        return found is not None and (found.rank is not None) == ranks and not is_judged(row)

    return recognises


# No column is required, so that every format that reads such rows comes first.
FORMATS = (
    Format("ranked_answers", "preferences", (), read_all=_read_ranks, recognises=_recognises(ranks=True)),
    Format("scored_answers", "preferences", (), read_all=_read_scores, recognises=_recognises(ranks=False)),
)
