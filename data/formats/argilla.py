"""Argilla's exports: fields with a prompt and several answers, and what annotators said about these.

Records may be nested (`fields`, `responses`) or flat (`to_datasets`: columns `<question>.responses` and
`<question>.responses.status`), each alone or all in one object of columns (`to_dict`). Answers are fields such as
response-1 and response-2. A ranking question counts by its mean ranks, rating questions (one for each answer) by their
means, a label question (of two answers) by majority, unless annotators are read apart; drafts and discarded answers do
not vote. Suggestions are a model's and are not read.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from rlhf.data.examples import UNJUDGED, Ranking, by_score, by_votes, mean, number, ranked
from rlhf.data.formats import Format
from rlhf.data.messages import Messages, Unusable, as_prompt, as_question, as_response

Said = dict[str, list[Any]]
"""What annotators said, by question."""

_ANSWER = re.compile(r"(response|answer|generation|completion|output|reply|text|model)s?[ _-]*(\d+|[a-d])", re.I)
_PROMPTS = ("prompt", "instruction", "question", "query", "input")
_TIES = {"tie", "tied", "equal", "both", "same", "draw", "neither"}


def answers_of(fields: dict[str, Any]) -> list[str]:
    """The fields that hold answers, in the order of their numbers or letters. Raises Unusable below two."""
    names = [name for name, value in fields.items() if value is not None and _is_answer(name)]
    if len(names) < 2:
        cure = f" (fields found: {', '.join(fields)}); name them response_1, response_2 and so on"
        raise Unusable("no two answers among the fields", cure)
    return sorted(names, key=lambda name: (len(_words(name)[-1]), _words(name)[-1]))


def prompt_of(fields: dict[str, Any]) -> Messages:
    """The field that holds the prompt, with the context that stands beside it."""
    name = next((name for name in _PROMPTS if fields.get(name) is not None), None)
    if name is None:
        raise Unusable("no prompt among the fields", f" (fields found: {', '.join(fields)}); name it prompt")
    if isinstance(fields[name], str) and isinstance(fields.get("context"), str):
        return as_question({name: fields[name], "context": fields["context"]})
    return as_prompt(fields[name])


Vote = tuple[str, str, Any]
"""Annotator ("" where nobody is named), question, value."""


def _read(row: dict[str, Any], apart: bool = False) -> list[Ranking | Unusable]:
    """Of one record, or of all: `to_dict` writes one object of columns."""
    columns = isinstance(row.get("id"), list) and all(isinstance(column, list) for column in row.values())
    records = (
        [dict(zip(row, values, strict=False)) for values in zip(*row.values(), strict=False)] if columns else [row]
    )
    found: list[Ranking | Unusable] = []
    for record in records:
        try:
            if "fields" in row and "responses" in row:
                fields, votes = record["fields"], list(_nested_votes(record["responses"]))
            else:
                fields = {name: value for name, value in record.items() if "." not in name}
                votes = list(_flat_votes(record))
        except Unusable as unusable:
            found.append(unusable)
            continue
        said: dict[str, Said] = {}
        for annotator, question, value in votes:
            said.setdefault(annotator if apart else "", {}).setdefault(question, []).append(value)
        for annotator, own in (said or {"": {}}).items():
            try:
                found.append(replace(_judge(fields, own), rater=annotator))
            except Unusable as unusable:
                found.append(unusable)
    return found


def _read_apart(row: dict[str, Any]) -> list[Ranking | Unusable]:
    return _read(row, apart=True)


def _flat_votes(row: dict[str, Any]) -> Iterator[Vote]:
    for name in row:
        if name.endswith(".responses"):
            columns = values, statuses, users = [row.get(name + part) or [] for part in ("", ".status", ".users")]
            if any(not isinstance(c, list) or len(c) not in (0, len(values)) for c in columns):
                raise Unusable("responses, their status and users are no lists of the same length", f": {name}")
            for place, value in enumerate(values):
                if value is not None and (not statuses or _votes(statuses[place])):
                    yield _name(users[place] if users else None), name.removesuffix(".responses"), value


def _nested_votes(responses: Any) -> Iterator[Vote]:
    """By question in lists of answers (the SDK), or by annotator with all questions (the server)."""
    for question, response in _responses(responses):
        if not isinstance(response, dict) or "value" not in response:
            raise Unusable("a response without its value", f": {question}")
        if _votes(response.get("status")) and response["value"] is not None:
            yield _name(response.get("user_id")), question, response["value"]


def _responses(responses: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(responses, dict):
        for question, found in responses.items():
            for response in found if isinstance(found, list) else [found]:
                if response is not None:
                    yield question, response
    elif isinstance(responses, list):
        for user in responses:
            if not isinstance(user, dict) or not isinstance(user.get("values") or {}, dict):
                raise Unusable("responses are neither by question nor by annotator")
            for question, value in (user.get("values") or {}).items():
                own = {name: user.get(name) for name in ("status", "user_id")}
                yield question, own | (value if isinstance(value, dict) else {})
    elif responses is not None:
        raise Unusable("responses are neither by question nor by annotator")


def _votes(status: Any) -> bool:
    return status in (None, "submitted")  # some versions of the SDK export no status


def _name(user: Any) -> str:
    return "" if user is None else str(user)


def _judge(fields: Any, said: Said) -> Ranking:
    if not isinstance(fields, dict):
        raise Unusable("fields is not an object of fields")
    names = answers_of(fields)
    prompt = prompt_of(fields)
    texts = [as_response(fields[name], name, prompt) for name in names]
    if not any(said.values()):
        raise Unusable(UNJUDGED, ": it has no submitted response")
    for judge in (_by_ranks, _by_ratings, _by_labels):
        if (ranking := judge(prompt, names, texts, said)) is not None:
            return ranking
    raise Unusable("no question that compares the answers", f" (questions found: {', '.join(said)})")


def _by_ranks(prompt: Messages, names: list[str], texts: list[str], said: Said) -> Ranking | None:
    lists = {q: values for q, values in said.items() if values and all(isinstance(v, list) for v in values)}
    found = {
        q: values for q, values in lists.items() if any(_named(option, names) for option in map(_option, values[0]))
    }
    if not found:
        return None
    question, values = _only(found, "ranking questions")
    ranks: dict[str, list[float]] = {name: [] for name in names}
    for value in values:
        for option in value:
            name = _named(_option(option), names)
            if name is None:
                raise Unusable("a ranked option is none of the answers", f": {_option(option)!r}")
            if not isinstance(option, dict) or option.get("rank") is None:
                cure = "; Argilla's SDK leaves the ranks out: export the responses from its server, or ask for ratings"
                raise Unusable("a ranking without ranks", f": {question}{cure}")
            ranks[name].append(number(option["rank"], "rank"))
    if any(len(given) != len(values) for given in ranks.values()):
        raise Unusable("not every answer was ranked by all", f": {question}")
    return ranked(prompt, texts, [mean(ranks[name], "rank") for name in names])


def _by_ratings(prompt: Messages, names: list[str], texts: list[str], said: Said) -> Ranking | None:
    found: dict[str, dict[str, list[Any]]] = {}
    for question, values in said.items():
        name = _about(question, names)
        if values and name is not None and all(type(v) in (int, float) for v in values):
            found.setdefault(name, {})[question] = values
    if len(found) < 2:
        return None
    scores = {
        name: mean([number(value, "rating") for value in _only(questions, f"ratings of {name}")[1]], "rating")
        for name, questions in found.items()
    }
    rated = [(text, scores[name]) for name, text in zip(names, texts, strict=True) if name in scores]
    return by_score(prompt, [text for text, _ in rated], [score for _, score in rated])


def _by_labels(prompt: Messages, names: list[str], texts: list[str], said: Said) -> Ranking | None:
    found = {}
    for question, values in said.items():
        if values and all(isinstance(v, str) and (_named(v, names) or _is_tie(v)) for v in values):
            found[question] = values
    if not found:
        return None
    question, values = _only(found, "label questions")
    if len(names) > 2:
        raise Unusable("a label for more than two answers", f": {question}; ask for a ranking or for ratings")
    return by_votes(prompt, texts, [None if _is_tie(v) else names.index(_named(v, names) or "") for v in values])


def _only(found: dict[str, Any], what: str) -> tuple[str, Any]:
    if len(found) > 1:
        raise Unusable(f"several {what}", f": {', '.join(found)}; keep the one to learn from")
    return next(iter(found.items()))


@lru_cache(maxsize=1024)  # the same names in all records
def _words(name: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[a-z]+|\d+", name.lower()))


@lru_cache(maxsize=1024)
def _is_answer(name: str) -> bool:
    return _ANSWER.fullmatch(name) is not None


def _option(option: Any) -> Any:
    return option.get("value") if isinstance(option, dict) else option


def _named(option: Any, names: list[str]) -> str | None:
    """The answer that an option names: by its field's name in some spelling, or by its number or letter alone."""
    if not isinstance(option, str):
        return None
    words = _words(option)
    return next((name for name in names if words and words in (_words(name), _words(name)[-1:])), None)


def _about(question: str, names: list[str]) -> str | None:
    """The answer that a rating question is about: it holds its field's name, or ends with its number or letter."""
    words = _words(question)
    for name in names:
        sought = _words(name)
        if any(words[i : i + len(sought)] == sought for i in range(len(words))) or words[-1:] == sought[-1:]:
            return name
    return None


def _is_tie(label: str) -> bool:
    return not _TIES.isdisjoint(_words(label))


def _is_flat(row: dict[str, Any]) -> bool:
    return any(name.endswith(".responses") for name in row)


FORMATS = (
    Format("argilla", "preferences", ("fields", "responses"), _read, apart=_read_apart),
    Format("argilla_flat", "preferences", ("id", "_server_id"), _read, recognises=_is_flat, apart=_read_apart),
)
