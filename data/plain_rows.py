"""Rows as JSON has them: what a reward function is given beside a response, which lies in files until then."""

from dataclasses import replace
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

import numpy as np

from rlhf.data.errors import DataError
from rlhf.data.rows import Loaded, Prompt, Report, numbered, refuse_losses
from rlhf.data.sources import Source, locate


def read_prompts_as_json(source: Source, max_dropped: float = 0.0) -> Loaded[Prompt]:
    """Prompts as `read_prompts` gives them, with rows of JSON values.

    Raises DataError for a value that has no such form, with its row and column.
    """
    report = Report("prompts")
    prompts = [
        replace(prompt, row=_row_as_json(prompt.row, source, number))
        for number, prompt in numbered(source, "prompts", report)
    ]
    refuse_losses(report, source, max_dropped)
    return Loaded(prompts, report)


def _row_as_json(row: dict[str, Any], source: Source, number: int) -> dict[str, Any]:
    """A row of JSON values: in files until a reward function is given it, it must not change on the way."""
    found = {}
    for column, value in row.items():
        try:
            found[column] = _as_json(value)
        except (TypeError, RecursionError) as error:
            what = str(error) if isinstance(error, TypeError) else "it is nested too deeply"
            raise DataError(
                f"{locate(source, number)}: column {column!r}: {what}; reward functions are given rows of JSON values: "
                "make it text, a number, a list, or an object whose keys are text, or leave the column out (where the "
                "file cannot be changed, by a function that gives its rows)"
            ) from error
    return found


def _as_json(value: Any) -> Any:
    """A value as JSON has it: numbers and arrays of numpy and torch plain, dates, times and decimals as text, durations
    in seconds.

    Raises TypeError that says what it is where there is no such form.
    """
    if value is None or isinstance(value, str | float):
        return value
    if _is_missing(value):
        return None
    if isinstance(value, int):
        if value.bit_length() > 10_000:
            raise TypeError("a number of thousands of digits")  # Python reads 4300 of them
        return value
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"an object with the key {odd[0]!r}, which is not text")
        return {key: _as_json(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(inner) for inner in value]
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        return str(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    kind = value.dtype.kind if isinstance(value, np.generic | np.ndarray) else ""
    if kind in ("M", "m") and isinstance(value, np.ndarray):
        return [_as_json(inner) for inner in value]
    if kind == "M":  # of those that are finer than a datetime `tolist` makes numbers
        return str(np.datetime_as_string(value))
    if kind == "m" and np.datetime_data(value.dtype)[0] not in ("generic", "Y", "M"):
        return float(value / np.timedelta64(1, "s"))
    if kind not in ("m", "V") and hasattr(value, "tolist"):  # no times of unknown length, no records without names
        try:
            plain = value.tolist()
        except (RuntimeError, NotImplementedError) as error:  # a sparse tensor, or one without contents
            raise TypeError(f"a value of type {type(value).__name__} that makes no list") from error
        if type(plain) is not type(value):
            return _as_json(plain)
    raise TypeError(f"a value of type {type(value).__name__}")


def _is_missing(value: Any) -> bool:
    """Whether it stands for what is not there: pandas' NA and NaT, or numpy's NaT."""
    if isinstance(value, np.datetime64 | np.timedelta64):
        return bool(np.isnat(value))
    return type(value).__name__ in ("NAType", "NaTType")
