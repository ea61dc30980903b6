"""Nectar (berkeley-nest): a prompt as a Human/Assistant transcript, and answers that each carry their rank.

The answers lie in any order: the ranks say which is best (1), and equal ranks are ties.
"""

from typing import Any

from rlhf.data.examples import Ranking, ranked
from rlhf.data.formats import Format
from rlhf.data.messages import Unusable, as_prompt, as_response


def _read(row: dict[str, Any]) -> Ranking:
    answers = row["answers"]
    if not isinstance(answers, list) or not all(
        isinstance(a, dict) and {"answer", "rank"} <= a.keys() for a in answers
    ):
        raise Unusable("answers is not a list of answers with their ranks")
    prompt = as_prompt(row["prompt"])
    responses = [as_response(a["answer"], "answer", prompt) for a in answers]
    return ranked(prompt, responses, [a.get("rank") for a in answers])


FORMATS = (Format("nectar", "preferences", ("prompt", "answers"), _read),)
