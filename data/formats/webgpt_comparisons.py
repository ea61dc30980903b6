"""WebGPT comparisons (OpenAI): a question and two answers with opposite scores; the higher one is better, 0 is a tie.

The quotes that the answers refer to are left out; their marks ([1]) stay in the answers.
"""

from typing import Any

from rlhf.data.examples import Ranking, by_score
from rlhf.data.formats import Format
from rlhf.data.messages import Unusable, as_prompt, as_response


def _read(row: dict[str, Any]) -> Ranking:
    question = row["question"]
    if not isinstance(question, dict):
        raise Unusable("question is not an object with full_text")
    prompt = as_prompt(question.get("full_text"))
    responses = [as_response(row[name], name, prompt) for name in ("answer_0", "answer_1")]
    return by_score(prompt, responses, [row["score_0"], row["score_1"]], question.get("dataset"))


FORMATS = (
    Format(
        "webgpt_comparisons",
        "preferences",
        ("question", "answer_0", "answer_1", "score_0", "score_1"),
        _read,
        recognises=lambda row: not isinstance(row["question"], str),  # text is anybody's spreadsheet
    ),
)
