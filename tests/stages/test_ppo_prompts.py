"""Reward functions are given rows as they were read, or a run is refused that cannot give them so."""

from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from ppo_world import settings
from stages_world import byte_tokenizer

from rlhf.data.errors import DataError
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.prompts import Asked, encode_rows, read_rows
from rlhf.stages.row_files import RowFile, RowReader

CELLS: list[Any] = []
"""Of the column `cell`, a row each."""


def rows() -> Iterator[dict[str, Any]]:
    for number, cell in enumerate(CELLS):
        yield {"prompt": f"question {number}", "cell": cell}


def with_rows(prompts: list[str], responses: list[str], rows: list[dict[str, Any]]) -> list[float]:
    raise AssertionError("it is not called here")


def without_rows(prompts: list[str], responses: list[str]) -> list[float]:
    raise AssertionError("it is not called here")


def given(*cells: Any, function: Any = with_rows) -> PPOSettings:
    """Settings whose data have these cells."""
    CELLS[:] = [*cells, None]
    rewards = [] if function is None else [{"function": f"{__name__}:{function.__name__}"}]
    return settings(data=f"{__name__}:rows", eval_share=0.5, rewards=rewards)


def kept(tmp_path: Path, *cells: Any) -> list[Any]:
    """What a reward function is given of these cells."""
    reader = RowReader(given(*cells))
    found: dict[str, Any] = {}
    for number, side in enumerate(read_rows(reader)):
        RowFile.write(tmp_path / f"{number}.rows", encode_rows(reader, byte_tokenizer(), side))
        asked = RowFile(tmp_path / f"{number}.rows", Asked.of)
        found |= {one.prompt.row["prompt"]: one.prompt.row["cell"] for one in asked}
    return [found[f"question {number}"] for number in range(len(cells))]


@pytest.mark.parametrize(
    ("cell", "plain"),
    [
        (np.bool_(False), False),
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (torch.tensor([True]), [True]),
        ({"a": (np.int8(1), None)}, {"a": [1, None]}),
        (datetime(2024, 2, 1, 12, 30), "2024-02-01T12:30:00"),
        (date(2024, 2, 1), "2024-02-01"),
        (time(12, 30), "12:30:00"),
        (np.datetime64("2024-02-01T12:30:00.000000001"), "2024-02-01T12:30:00.000000001"),
        (Decimal("1.10"), "1.10"),
        (timedelta(minutes=2, milliseconds=500), 120.5),
        (float("inf"), float("inf")),
        (np.timedelta64(3, "ms"), 0.003),
        (np.array(["2024-02-01", "NaT"], "datetime64[D]"), ["2024-02-01", None]),
        (np.datetime64("NaT"), None),
        (np.timedelta64("NaT"), None),
        (pd.NaT, None),
        (pd.NA, None),
        ("\ud800", "\ud800"),
        (2**100, 2**100),
    ],
)
def test_what_json_has_a_form_for_comes_in_it(tmp_path: Path, cell: Any, plain: Any) -> None:
    [found] = kept(tmp_path, cell)
    assert found == plain
    assert type(found) is type(plain)


def endless() -> list[Any]:
    cell: list[Any] = []
    cell.append(cell)
    return cell


@pytest.mark.parametrize(
    ("cell", "what"),
    [
        (b"abc", "a value of type bytes"),
        ([{"a": {1, 2}}], "a value of type set"),
        (object(), "a value of type object"),
        (np.timedelta64(3), "a value of type timedelta64"),
        (np.timedelta64(3, "M"), "a value of type timedelta64"),
        (np.longdouble(1), "a value of type longdouble"),
        ({"a": {3: "b"}}, "an object with the key 3, which is not text"),
        (10**5000, "a number of thousands of digits"),
        (torch.ones(2).to_sparse(), "a value of type Tensor that makes no list"),
        (torch.ones(2, device="meta"), "a value of type Tensor that makes no list"),
        (endless(), "it is nested too deeply"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_json_has_no_form_for_is_refused_with_row_column_and_cure(cell: Any, what: str) -> None:
    with pytest.raises(DataError) as error:
        read_rows(RowReader(given("a", cell)))
    assert str(error.value).startswith(f"{__name__}:rows row 2: column 'cell': {what}; ")
    assert "make it text, a number, a list, or an object whose keys are text" in str(error.value)


@pytest.mark.parametrize("function", [None, without_rows])
def test_rows_that_nothing_is_given_may_hold_anything(function: Any) -> None:
    train, held_out = read_rows(RowReader(given(b"abc", {1, 2}, function=function)))
    assert len(train) + len(held_out) == 3
