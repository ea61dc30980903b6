"""Label Studio's exports (JSON): tasks whose annotations hold a Pairwise choice or the order that a Ranker was left in.

The answers of a Pairwise are the fields that it names, or those such as answer1 and answer2; left is the first. A
Ranker orders the items of a list in the task by their ids, best first. Cancelled annotations do not vote; of several,
Pairwise counts by majority and Ranker by mean places, unless annotators are read apart. Predictions are a model's and
are not read.
"""

from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean
from typing import Any

from rlhf.data.examples import UNJUDGED, Ranking, by_votes, ranked
from rlhf.data.formats import Format
from rlhf.data.formats.argilla import answers_of, prompt_of
from rlhf.data.messages import Unusable, as_response

_SIDES = {"left": 0, "right": 1}


def _read(row: dict[str, Any]) -> Ranking:
    return _judge(row["data"], [result for _, result in _results(row["annotations"])])


def _read_apart(row: dict[str, Any]) -> list[Ranking | Unusable]:
    said: dict[str, list[dict[str, Any]]] = {}
    for annotator, result in _results(row["annotations"]):
        said.setdefault(annotator, []).append(result)
    found: list[Ranking | Unusable] = []
    for annotator, results in (said or {"": []}).items():
        try:
            found.append(replace(_judge(row["data"], results), rater=annotator))
        except Unusable as unusable:
            found.append(unusable)
    return found


def _judge(data: Any, results: list[dict[str, Any]]) -> Ranking:
    if not isinstance(data, dict):
        raise Unusable("data is not an object")
    choices = [result for result in results if "selected" in result["value"]]
    orders = [result for result in results if "ranker" in result["value"]]
    if choices and orders:
        raise Unusable("both a Pairwise and a Ranker", "; export one of them")
    if not choices and not orders:
        kinds = ", ".join(sorted({str(result.get("type")) for result in results}))
        if kinds:
            raise Unusable("no Pairwise and no Ranker among the results", f": {kinds}")
        raise Unusable(UNJUDGED, ": it has no annotation that was not cancelled")
    return _by_choices(data, choices) if choices else _by_orders(data, orders)


def _results(annotations: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """(annotator, result) of all annotations that count."""
    if not isinstance(annotations, list):
        raise Unusable("annotations is not a list", "; export as JSON, not as JSON-MIN")
    for annotation in annotations:
        if isinstance(annotation, dict) and not annotation.get("was_cancelled"):
            results = annotation.get("result")
            for result in results if isinstance(results, list) else []:
                if isinstance(result, dict) and isinstance(result.get("value"), dict):
                    yield _annotator(annotation.get("completed_by")), result


def _annotator(completed_by: Any) -> str:
    """An id, or an object with an e-mail too; "" where nobody is named."""
    if isinstance(completed_by, dict):
        completed_by = completed_by.get("email") or completed_by.get("id")
    return "" if completed_by is None else str(completed_by)


def _by_choices(data: dict[str, Any], choices: list[dict[str, Any]]) -> Ranking:
    named = str(choices[0].get("to_name")).split(",")
    names = named if len(named) == 2 and all(isinstance(data.get(name), str) for name in named) else answers_of(data)
    if len(names) != 2:
        raise Unusable("more than two answers for a Pairwise", f": {', '.join(names)}")
    votes = []
    for choice in choices:
        if (side := choice["value"]["selected"]) not in list(_SIDES):
            raise Unusable("a choice is neither left nor right", f": {side!r}")
        votes.append(_SIDES[side])
    prompt = prompt_of(data)
    return by_votes(prompt, [as_response(data[name], name, prompt) for name in names], votes)


def _by_orders(data: dict[str, Any], orders: list[dict[str, Any]]) -> Ranking:
    places: dict[str, list[int]] = {}
    for order in orders:
        for place, item in enumerate(_ordered(order["value"]["ranker"])):
            places.setdefault(item, []).append(place)
    if any(len(found) != len(orders) for found in places.values()):
        raise Unusable("not every item was ranked once by all")
    texts = _items(data, list(places))
    prompt = prompt_of(data)
    responses = [as_response(texts[item], "an item", prompt) for item in places]
    return ranked(prompt, responses, [1 + fmean(found) for found in places.values()])


def _ordered(ranker: Any) -> list[str]:
    lists = [ranker] if isinstance(ranker, list) else list(ranker.values()) if isinstance(ranker, dict) else []
    if len(lists) > 1:
        raise Unusable("items sorted into several buckets", f": {', '.join(ranker)}; which is better is not said")
    if not lists or not isinstance(lists[0], list):
        raise Unusable("a Ranker's result is not a list of ids")
    return [str(item) for item in lists[0]]


def _items(data: dict[str, Any], wanted: list[str]) -> dict[str, Any]:
    """The texts of the task's items by their ids."""
    for value in data.values():
        if isinstance(value, list) and value and all(isinstance(item, dict) and "id" in item for item in value):
            found = {
                str(item["id"]): next((item[k] for k in ("body", "text", "html") if item.get(k)), None)
                for item in value
            }
            if found.keys() >= set(wanted):
                return found
    raise Unusable("ranked ids that are in no list of the task", f": {', '.join(wanted)}")


FORMATS = (Format("label_studio", "preferences", ("data", "annotations"), _read, apart=_read_apart),)
