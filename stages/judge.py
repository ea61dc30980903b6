"""Judges: a `module:function` (prompts, responses) -> one quality per pair, checked before it is believed."""

import math
from collections.abc import Sequence

from rlhf.data.sources import load_function


def judge_answers(judge: str, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Qualities of the responses. Raises ValueError, naming the row, for a wrong count or a value that is no number."""
    qualities = list(load_function(judge)(list(prompts), list(responses)))
    if len(qualities) != len(responses):
        raise ValueError(f"{judge} returned {len(qualities)} qualities for {len(responses)} responses")
    for number, quality in enumerate(qualities, 1):
        if not isinstance(quality, (int, float)) or not math.isfinite(quality):
            raise ValueError(
                f"{judge} gave {quality!r} for row {number}: {prompts[number - 1]!r} / {responses[number - 1]!r}"
            )
    return [float(quality) for quality in qualities]
