"""What `rlhf data check` tells about a source: what would be kept, what would be dropped and why."""

import json
from collections.abc import Hashable, Iterable
from typing import Any

from rlhf.data.rows import DUPLICATE, Dropped, Ranking, load, prompt_key
from rlhf.data.sources import Source


def check(source: Source, kind: str) -> dict[str, Any]:
    """Counts for one source, as JSON. Unusable rows are counted and never raise.

    `kind` is text, demonstrations, preferences or prompts. `pairs` counts better/worse pairs over all
    rankings, `ties` the unordered equal ones, those of dropped rankings too. Raises DataError for a source
    that cannot be read at all.
    """
    loaded = load(source, kind)
    report = loaded.report
    better, equal = _count_pairs(loaded.rows) if kind == "preferences" else (0, 0)
    repeated = report.dropped.get(DUPLICATE, Dropped()).count  # prompts are read once each
    warnings = list(report.warnings)
    if report.kept == 0:
        warnings.append("nothing usable is left; row {}: {}".format(*report.first_bad()))
    elif report.bad:
        warnings.append(f"{report.bad} of {report.rows} rows are unusable; a run refuses unless max_dropped allows it")
    return {
        "kind": kind,
        "format": report.format,
        "rows": report.rows,
        "kept": report.kept,
        "dropped": {reason: {"count": drop.count, "rows": drop.rows} for reason, drop in report.dropped.items()},
        "prompts": _count_prompts(loaded.rows, kind),
        "pairs": better,
        "ties": equal + report.dropped_ties,
        "duplicates": repeated if kind == "prompts" else _count_repeats(loaded.rows),
        "warnings": warnings,
    }


def _count_pairs(rankings: Iterable[Ranking]) -> tuple[int, int]:
    """(ordered better/worse pairs, unordered equal pairs)."""
    better = equal = 0
    for ranking in rankings:
        for place, rank in enumerate(ranking.ranks):
            for other in ranking.ranks[:place]:
                better += rank != other
                equal += rank == other
    return better, equal


def _count_prompts(rows: list[Any], kind: str) -> int:
    if kind == "text":
        return 0
    return len({prompt_key(row.messages if kind == "prompts" else row.prompt) for row in rows})


def _count_repeats(rows: list[Any]) -> int:
    """Rows equal to an earlier one."""
    seen: set[Hashable] = set()
    for row in rows:
        seen.add(row if isinstance(row, str) else json.dumps(row, default=vars, sort_keys=True))
    return len(rows) - len(seen)
