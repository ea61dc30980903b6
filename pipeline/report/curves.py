"""Metrics over steps as lines: steps that were logged twice count once, and long lines keep their spikes."""

import math
from collections.abc import Iterable
from typing import Any

MAX_POINTS = 400
"""Of a line that is drawn: more than a chart has pixels side by side."""

Line = list[tuple[float, float]]
"""Step and value, in order of steps."""


def curves(rows: Iterable[dict[str, Any]]) -> dict[str, Line]:
    """The lines of all finite numbers in the rows of metrics.jsonl, by name.

    A resumed stage logs some steps again: the later row is the one that counts. An evaluation of PPO (`eval_…`) begins
    at step 0 as the SFT model, where the rows tell its figure.
    """
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        step = row["step"]
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float) and math.isfinite(value):
                found.setdefault(name, {})[step] = value
    for name in [name for name in found if name.startswith("eval_")]:
        if sft := found.get(name.replace("eval_", "eval_sft_", 1)):
            found[name].setdefault(0, next(iter(sft.values())))
    return {name: sorted(curve.items()) for name, curve in found.items()}


def thin(line: Line, max_points: int = MAX_POINTS) -> Line:
    """At most `max_points`: the first, the last, and of each stretch between them the lowest and the highest, which
    are points of the line, so that no spike is lost and none is made up."""
    if len(line) <= max_points:
        return line
    inner, num = line[1:-1], (max_points - 2) // 2
    kept = [line[0]]
    for place in range(num):
        stretch = inner[place * len(inner) // num : (place + 1) * len(inner) // num]
        ends = {min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])}
        kept += sorted(ends)
    return [*kept, line[-1]]


def start_and_end(line: Line, share: float = 0.1) -> tuple[float, float]:
    """Means over the first and over the last `share` of a line (of at least one point)."""
    num = max(math.ceil(share * len(line)), 1)
    values = [value for _, value in line]
    return sum(values[:num]) / num, sum(values[-num:]) / num
