"""A ranking spreadsheet: a prompt, its answers (`answer_1`, `answer_2` …) and their ranks (`rank_1` …) or scores.

Answers may be called answer, response, completion, output or candidate, the prompt question, instruction or query; the
number may follow a `_`, `-`, `.` or blank, or nothing, and may be a letter (`answer_a`, `rank_a`). Rank 1 is best; of
scores and ratings higher is better, and beside ranks they are strengths if all are numbers. Answers with an empty cell
are not there, so rows may have fewer than others; of an answer and its rank one alone is left out and counted, the
others are kept.
"""

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from rlhf.data.columns import plain
from rlhf.data.examples import Ranking, by_score, number, ranked
from rlhf.data.formats import Format
from rlhf.data.messages import Messages, Unusable, as_prompt, as_question, as_response, is_empty

PROMPTS = ("prompt", "question", "instruction", "query")
ANSWERS = ("answer", "response", "completion", "output", "candidate")
RANKS, SCORES = ("rank", "ranking"), ("score", "rating")
_NUMBERED = re.compile(r"([a-z]+?)(?:s?[ _.-]?(\d+)|s?[ _.-]([a-z]))")


class _Columns(NamedTuple):
    """Names of columns, those of the answers by number or letter."""

    prompt: str
    answers: dict[str, str]
    ranks: dict[str, str]
    scores: dict[str, str]


def _read(row: dict[str, Any]) -> list[Ranking | Unusable]:
    found = _columns(tuple(row))
    assert found is not None
    prompt = question(row, found.prompt)
    name, said = ("rank", found.ranks) if found.ranks else ("score", found.scores)
    answers: list[str] = []
    values: list[Any] = []
    strengths: list[float | None] = []
    left_out: list[Ranking | Unusable] = []
    for mark in found.answers | said:
        answer, value = row.get(found.answers.get(mark, "")), row.get(said.get(mark, ""))
        if is_empty(answer) and is_empty(value):
            continue
        if is_empty(answer):
            left_out.append(Unusable(f"a {name} without its answer", f": {said[mark]}"))
            continue
        if is_empty(value):
            left_out.append(Unusable(f"an answer without its {name}", f": {found.answers[mark]}"))
            continue
        answers.append(as_response(answer, found.answers[mark], prompt))
        values.append(value)
        strengths.append(strength(row.get(found.scores.get(mark, ""))))
    if not values and left_out:
        raise Unusable(f"no answer has a {name}")
    if name == "score":
        return [by_score(prompt, answers, values, row.get("source")), *left_out]
    return [ranked(prompt, answers, values, None if None in strengths else strengths, row.get("source")), *left_out]


def question(row: dict[str, Any], name: str) -> Messages:
    """The prompt of a row whose column of this name holds it, after the earlier rounds.

    These are read as formats of demonstrations read them, of which such a table has the columns.
    """
    if name == "prompt":
        return as_prompt(row[name])
    history = row.get("history")
    return as_question({name: row[name], "input": row.get("input")}, history if isinstance(history, list) else None)


def strength(value: Any) -> float | None:
    """A score beside a rank, None where it is no number."""
    try:
        return number(value, "score")
    except Unusable:
        return None


@lru_cache(maxsize=1024)  # rows of one source mostly have the same columns
def _columns(columns: tuple[str, ...]) -> _Columns | None:
    """The columns of the answers and of what is said of them; None where these are not there, or leave a choice."""
    numbered = side_by_side(columns)
    if numbered is None:
        return None
    prompts = [name for name in PROMPTS if name in columns]
    answers = [numbered[word] for word in ANSWERS if len(numbered.get(word, ())) > 1]
    ranks, scores = _first(numbered, RANKS), _first(numbered, SCORES)
    if not prompts or len(answers) != 1 or len(answers[0].keys() & (ranks or scores).keys()) < 2:
        return None
    return _Columns(prompts[0], answers[0], ranks, scores)


def side_by_side(columns: Iterable[str]) -> dict[str, dict[str, str]] | None:
    """Columns of one word with numbers or letters, by word and these; None where two are alike (answer_1, answer1)."""
    numbered: dict[str, dict[str, str]] = {}
    for column in columns:
        if found := marked(column):
            word, mark = found
            before = numbered.setdefault(word, {}).setdefault(mark, column)
            if plain(before) != plain(column):
                return None
            if column == plain(column):  # before one that is alike
                numbered[word][mark] = column
    return numbered


def marked(name: object) -> tuple[str, str] | None:
    """The word of a name such as answer_1, Response A or outputs.2, and its number or letter; None for other names."""
    match = _NUMBERED.fullmatch(plain(name))
    if match is None:
        return None
    word, digits, letter = match.groups()
    return word, str(int(digits)) if digits else letter


def like_answers(columns: Iterable[str]) -> list[str]:
    """Those whose names say that they hold answers, one or several."""
    words = {column: marked(column) or (plain(column).removesuffix("s"), "") for column in columns}
    return [column for column, (word, _) in words.items() if word in ANSWERS]


def _first(numbered: dict[str, dict[str, str]], words: Iterable[str]) -> dict[str, str]:
    return next((numbered[word] for word in words if word in numbered), {})


def _recognises(row: dict[str, Any]) -> bool:
    return _columns(tuple(row)) is not None


# No column is required, so that every format that reads such rows comes first.
FORMATS = (Format("ranked_columns", "preferences", (), _read, recognises=_recognises),)
