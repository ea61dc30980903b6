"""UltraFeedback (openbmb): an instruction with scored answers, and its best known digest with pairs (HuggingFaceH4).

Raw rows rank their completions by `overall_score`, or where none of them has one by the mean of their ratings. An
answer that is empty or has no such number is left out and counted, the others are kept. The `custom_system_prompt`
differs from answer to answer and was not shown to the judge, so it is not part of the prompt.

In the binarized rows equal scores are a tie, whatever stands under chosen and rejected.
"""

from typing import Any

from rlhf.data.examples import Ranking, by_score, mean, number
from rlhf.data.formats import Format
from rlhf.data.messages import Unusable, as_list, as_prompt, as_response


def _read_raw(row: dict[str, Any]) -> list[Ranking | Unusable]:
    completions = as_list(row["completions"], "completions")
    if not isinstance(completions, list) or not all(isinstance(answer, dict) for answer in completions):
        raise Unusable("completions is not a list of answers with their scores")
    prompt = as_prompt(row["instruction"])
    # Never both in one ranking: overall scores go to 10, ratings to 5.
    score = _overall if any(answer.get("overall_score") is not None for answer in completions) else _mean_rating
    responses, scores, left_out = [], [], []
    for answer in completions:
        try:
            scored = as_response(answer.get("response"), "response", prompt), score(answer)
        except Unusable as unusable:
            left_out.append(unusable)
        else:
            responses.append(scored[0])
            scores.append(scored[1])
    return [by_score(prompt, responses, scores, row.get("source")), *left_out]


def _overall(answer: dict[str, Any]) -> float:
    return number(answer.get("overall_score"), "score")


def _mean_rating(answer: dict[str, Any]) -> float:
    annotations = answer.get("annotations")
    if not isinstance(annotations, dict) or not annotations:
        raise Unusable("an answer has neither overall_score nor ratings")
    ratings = [note.get("Rating") if isinstance(note, dict) else None for note in annotations.values()]
    return mean([number(rating, "rating") for rating in ratings], "rating")


def _read_binarized(row: dict[str, Any]) -> Ranking:
    prompt = as_prompt(row["prompt"])
    responses = [as_response(row[name], name, prompt) for name in ("chosen", "rejected")]
    ranking = by_score(prompt, responses, [row["score_chosen"], row["score_rejected"]], row.get("source"))
    if ranking.ranks[0] > ranking.ranks[1]:
        raise Unusable("rejected has a higher score than chosen")
    return ranking


FORMATS = (
    Format("ultrafeedback_raw", "preferences", ("instruction", "completions"), _read_raw),
    Format(
        "ultrafeedback_binarized",
        "preferences",
        ("prompt", "chosen", "rejected", "score_chosen", "score_rejected"),
        _read_binarized,
    ),
)
