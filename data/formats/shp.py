"""Stanford Human Preferences (SHP, SHP-2): a post and two comments, of which one has more votes.

`labels` is 1 where A is better and 0 where B is: it is no index. The strength is the logarithm of `score_ratio`, the
votes of the better one over those of the other, since votes grow with the number of readers.
"""

import math
from typing import Any

from rlhf.data.examples import Ranking, number, ranked
from rlhf.data.formats import Format
from rlhf.data.messages import Unusable, as_prompt, as_response


def _read(row: dict[str, Any]) -> Ranking:
    label = number(row["labels"], "label")
    if label not in (0, 1):
        raise Unusable("labels is neither 1 (A is better) nor 0 (B is better)", f": {label:g}")
    prompt = as_prompt(row["history"])
    responses = [as_response(row[name], name, prompt) for name in ("human_ref_A", "human_ref_B")]
    ratio = row.get("score_ratio")
    lead = None if ratio is None else _log(ratio)
    strengths = None if lead is None else [lead * label, lead * (1 - label)]
    return ranked(prompt, responses, [2 - label, 1 + label], strengths, row.get("domain"))


def _log(ratio: Any) -> float:
    value = number(ratio, "score_ratio")
    if value < 1:
        raise Unusable("score_ratio is below 1, so labels and votes disagree", f": {value:g}")
    return math.log(value)


FORMATS = (Format("shp", "preferences", ("history", "human_ref_A", "human_ref_B", "labels"), _read),)
