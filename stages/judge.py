"""Judges: a `module:function` (prompts, responses) -> one quality per pair, checked before it is believed."""

import math
from collections.abc import Sequence
from typing import Any

from rlhf.data.sources import load_function


def judge_answers(judge: str, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Qualities of the responses. Raises ValueError, naming judge and row, where it fails."""
    try:
        returned = list(load_function(judge)(list(prompts), list(responses)))
    except Exception as error:
        raise ValueError(f"judge {judge}: {type(error).__name__}: {' '.join(str(error).split())}") from error
    if len(returned) != len(responses):
        raise ValueError(f"judge {judge}: {len(returned)} qualities for {len(responses)} responses")
    qualities = [_number(quality) for quality in returned]
    if bad := [row for row, quality in enumerate(qualities) if not math.isfinite(quality)]:
        first, others = bad[0], f"; so are {len(bad) - 1} more of {len(returned)}" if len(bad) > 1 else ""
        raise ValueError(
            f"judge {judge}: {returned[first]!r} for row {first + 1}, not a finite number: {prompts[first]!r} / "
            f"{responses[first]!r}{others}"
        )
    return qualities


def _number(quality: Any) -> float:
    try:
        return float(quality)
    except (TypeError, ValueError):
        return math.nan
