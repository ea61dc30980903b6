"""Judges: a `module:function` (prompts, responses) -> one quality per pair, checked before it is believed."""

import math
from collections.abc import Mapping, Sequence, Set
from typing import Any

from rlhf.data.errors import RefusedError, named_error, told_as
from rlhf.data.sources import load_function
from rlhf.stages.endpoint import EndpointError


def judge_answers(judge: str, prompts: Sequence[str], responses: Sequence[str]) -> list[float]:
    """Qualities of the responses. Raises ValueError, naming judge and row, where it fails."""

    def told(error: BaseException) -> ValueError:
        says_where = isinstance(error, EndpointError | RefusedError)
        return ValueError(f"judge {judge}: {error if says_where else named_error(error)}")

    with told_as(told):
        said = load_function(judge)(list(prompts), list(responses))
        if isinstance(said, (str, bytes, Mapping, Set)):  # which would be a list of something else, or in no order
            raise TypeError(f"a list of numbers is wanted, not a {type(said).__name__}")
        returned = list(said)
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
    except Exception:  # arrays and tensors of several numbers have errors of their own
        return math.nan
