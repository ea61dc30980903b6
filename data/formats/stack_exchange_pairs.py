"""Pairs of Stack Exchange answers (lvwerra/stack-exchange-paired): `response_j` has the more votes of the two."""

from typing import Any

from rlhf.data.examples import Ranking, ranked
from rlhf.data.formats import Format
from rlhf.data.messages import as_prompt, as_response


def _read(row: dict[str, Any]) -> Ranking:
    prompt = as_prompt(row["question"])
    responses = [as_response(row[name], name, prompt) for name in ("response_j", "response_k")]
    return ranked(prompt, responses, [1, 2])


FORMATS = (Format("stack_exchange_pairs", "preferences", ("question", "response_j", "response_k"), _read),)
