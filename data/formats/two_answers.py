"""A table of comparisons (A/B): a prompt, two answers (`answer_a`, `answer_b`), and which is the `winner`, or a tie.

Prompt and answers are called as in a ranking spreadsheet (`response_1`, `Output B` …); of several pairs response_a and
response_b are meant, which a map can name. The verdict may be called preferred, preference, better or choice. It names
an answer by its letter or number (a, B, 1), its column, or as the Arena does (model_a); tie, both, neither and the like
are ties. Numbers are read so if all that the file has name answers. Answers with letters may be numbered 1 and 2, if
there is a 2: of 0 and 1 nobody knows which is the first, and rows with such are refused with the cure.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from rlhf.data.columns import plain, with_map
from rlhf.data.examples import UNJUDGED, Prompt, Ranking, by_votes
from rlhf.data.files import describe
from rlhf.data.formats import Format, Numbered, by_key
from rlhf.data.formats.ranked_columns import ANSWERS, PROMPTS, marked, question, side_by_side, strength
from rlhf.data.messages import Unusable, as_response, is_empty

_VERDICTS = ("winner", "preferred", "preference", "better", "choice")
_TIES = ("tie", "tie (bothbad)", "bothbad", "both_bad", "both bad", "both", "neither", "equal", "draw")


class _Columns(NamedTuple):
    """Names of columns, those of the answers with their letters or numbers, in the order of these."""

    prompt: str
    answers: tuple[tuple[str, str], tuple[str, str]]
    verdict: str


def _read_all(rows: list[Numbered]) -> Iterator[tuple[int, Ranking | Unusable]]:
    for group in by_key(rows, lambda row: _columns(tuple(row))):
        found = _found(group[0][1])
        numbers = {number: said for number, row in group if (said := strength(row[found.verdict])) is not None}
        known = _numbered([mark for mark, _ in found.answers], set(numbers.values()))
        for number, row in group:
            try:
                if number not in numbers:
                    vote = vote_of(row[found.verdict], [mark for mark, _ in found.answers])
                elif known is None:
                    raise _unclear(found, set(numbers.values()))
                else:
                    vote = known[numbers[number]]
                prompt = question(row, found.prompt)
                answers = [as_response(row[column], column, prompt) for _, column in found.answers]
                yield number, by_votes(prompt, answers, [vote], row.get("source"))
            except Unusable as unusable:
                yield number, unusable


def _read_prompt(row: dict[str, Any]) -> Prompt:
    return Prompt(question(row, _found(row).prompt), row)


def _numbered(marks: list[str], numbers: set[float]) -> dict[float, int] | None:
    """Which answer each number means; None where that cannot be told of one of them."""
    known = {float(mark): place for place, mark in enumerate(marks) if mark.isdigit()}
    if not known and 2 in numbers:
        known = {1.0: 0, 2.0: 1}
    return known if numbers <= known.keys() else None


def _unclear(found: _Columns, numbers: set[float]) -> Unusable:
    (first, one), (second, other) = found.answers
    said = " or ".join(f"{number:g}" for number in sorted(numbers)[:3])
    return Unusable(
        "numbers of winners can be read in several ways",
        f": {found.verdict} is {said} beside {one} and {other}; write {first}, {second} or tie",
    )


def vote_of(winner: Any, marks: Sequence[str]) -> int | None:
    """Which of two answers, known by letters or numbers, a word names as the better one; None for a tie."""
    if is_empty(winner):
        raise Unusable(UNJUDGED, ": the winner is empty")
    said = plain(winner) if isinstance(winner, str) else describe(winner)
    if said in _TIES:
        return None
    word, mark = marked(said) or ("", said)
    if word not in ("", "model", *ANSWERS) or mark not in marks:
        raise Unusable("unknown winner", f": {said[:40]}; known are {', '.join(marks)} and tie")
    return marks.index(mark)


def _found(row: dict[str, Any]) -> _Columns:
    found = _columns(tuple(row))
    assert found is not None
    return found


@lru_cache(maxsize=1024)  # rows of one source mostly have the same columns
def _columns(columns: tuple[str, ...]) -> _Columns | None:
    """None where they are not all there, or leave a choice."""
    prompt, verdict = _prompt_and_verdict(columns)
    answers = _answers(columns)
    if prompt is None or verdict is None or len(answers) != 2:
        return None
    first, second = sorted(answers.items())
    return _Columns(prompt, (first, second), verdict)


def _prompt_and_verdict(columns: tuple[str, ...]) -> tuple[str | None, str | None]:
    return next((n for n in PROMPTS if n in columns), None), next((n for n in _VERDICTS if n in columns), None)


def _answers(columns: tuple[str, ...]) -> dict[str, str]:
    """The columns of answers side by side, by letter or number; none where they leave a choice."""
    groups: dict[tuple[str, bool], dict[str, str]] = {}
    for word, named in (side_by_side(columns) or {}).items():
        for mark, column in named.items():
            if word in ANSWERS:
                groups.setdefault((word, mark.isdigit()), {})[mark] = column
    several = [group for group in groups.values() if len(group) > 1]
    ours = groups.get(("response", False), {})
    return ours if ours.keys() == {"a", "b"} else several[0] if len(several) == 1 else {}


def refuse_unjudged(row: dict[str, Any]) -> None:
    """Raise Unusable for a row with a prompt and answers side by side of which nothing says how good they are."""
    prompt, verdict = _prompt_and_verdict(tuple(row))
    answers = _answers(tuple(row))
    if prompt is None or not answers:
        return
    named = ", ".join(answers.values())
    if len(answers) > 2:
        ranks, scores = (", ".join(f"{name}_{mark}" for mark in answers) for name in ("rank", "score"))
        raise Unusable("answers without their ranks", f": {named} need {ranks} (1 is the best), or {scores}")
    if verdict is None:
        cure = f"name the one that does ({', '.join(answers)} or tie) with {with_map('winner')}"
        raise Unusable("answers without a winner", f": no column says which of {named} is better; {cure}")


def _recognises(row: dict[str, Any]) -> bool:
    return _columns(tuple(row)) is not None


# No column is required, so that every format that reads such rows comes first.
RANKINGS = Format("two_answers", "preferences", (), read_all=_read_all, recognises=_recognises)
FORMATS = (RANKINGS, Format("two_answers", "prompts", (), _read_prompt, recognises=_recognises))
