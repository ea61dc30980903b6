"""Judges: a `module:function` (prompts, responses) -> one quality per pair, checked before it is believed."""

import math
from collections.abc import Sequence

from rlhf.data.sources import load_function


def judge_answers(judge: str, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Qualities of the responses. Raises ValueError, naming judge and row, where it fails."""
    try:
        qualities = [float(quality) for quality in load_function(judge)(list(prompts), list(responses))]
    except Exception as error:
        raise ValueError(f"judge {judge}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    if len(qualities) != len(responses):
        raise ValueError(f"judge {judge}: {len(qualities)} qualities for {len(responses)} responses")
    for number, quality in enumerate(qualities, 1):
        if not math.isfinite(quality):
            prompt, response = prompts[number - 1], responses[number - 1]
            raise ValueError(f"judge {judge}: {quality!r} for row {number}: {prompt!r} / {response!r}")
    return qualities
