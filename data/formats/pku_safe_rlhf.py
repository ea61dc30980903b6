"""PKU-SafeRLHF and BeaverTails' comparisons: two answers and two verdicts, which is better and which is safer.

The verdicts differ in many rows, so that a row with both says only together with `format:` what is to be learnt.
"""

from collections.abc import Callable
from typing import Any

from rlhf.data.examples import UNJUDGED, Ranking, by_votes
from rlhf.data.formats import Format
from rlhf.data.messages import Unusable, as_prompt, as_response


def _by(verdict: str) -> Callable[[dict[str, Any]], Ranking]:
    def read(row: dict[str, Any]) -> Ranking:
        chosen = row[verdict]
        if chosen is None or chosen == "":
            raise Unusable(UNJUDGED, f": {verdict} is empty")
        if isinstance(chosen, bool) or chosen not in (0, 1, "0", "1"):
            raise Unusable(f"{verdict} is not 0 or 1", f": {chosen!r}")
        prompt = as_prompt(row["prompt"])
        responses = [as_response(row[name], name, prompt) for name in ("response_0", "response_1")]
        return by_votes(prompt, responses, [int(chosen)], row.get("prompt_source"))

    return read


_ANSWERS = ("prompt", "response_0", "response_1")

FORMATS = (
    Format("pku_better", "preferences", (*_ANSWERS, "better_response_id"), _by("better_response_id")),
    Format("pku_safer", "preferences", (*_ANSWERS, "safer_response_id"), _by("safer_response_id")),
)
