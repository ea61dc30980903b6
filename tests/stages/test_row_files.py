"""The rows of a stage are read and tokenised by one process, and are there for all, and for a stage that goes on."""

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from processes_world import in_two_processes
from reward_world import marked, new_run, policy_folder, rankings_file, settings

from rlhf.data.errors import DataError
from rlhf.stages.checkpoints import CannotWrite
from rlhf.stages.row_files import RowFile, RowReader, rows_of
from rlhf.stages.runtime import Runtime

FOUND = Path("checkpoints", "rows", "found.json")


@dataclass
class Row:
    text: str
    numbers: list[float] | None

    @classmethod
    def of(cls, row: dict[str, Any]) -> "Row":
        return cls(**row)


ROWS = [Row("ä\n", [1.5, -2.0]), Row("", None), Row("c" * 300, list(map(float, range(300))))]


class Made:
    """Rows that count how often they were made."""

    def __init__(self, rows: list[Any], held_out: list[Any]) -> None:
        self.sides, self.times = (rows, held_out), 0

    def __call__(self, reader: RowReader[Any]) -> Iterator[list[Any]]:
        self.times += 1
        reader.say("two of three are left out")
        reader.count("data", 1, 3, {"too long": 2, "blank": 0})
        yield from self.sides


def test_rows_come_back_from_a_file_one_by_one_and_as_they_were(tmp_path: Path) -> None:
    RowFile.write(tmp_path / "some.rows", iter(ROWS))
    found: RowFile[Row] = RowFile(tmp_path / "some.rows", Row.of)
    assert len(found) == 3
    assert list(found) == ROWS
    assert (found[0], found[-1], found[1:], found[::-1]) == (ROWS[0], ROWS[2], ROWS[1:], ROWS[::-1])
    for beyond in (3, -4):
        with pytest.raises(IndexError):
            found[beyond]


def test_what_json_has_no_word_for_becomes_text(tmp_path: Path) -> None:
    RowFile.write(tmp_path / "some.rows", [{"day": date(2024, 2, 1), "share": float("inf"), "half": "\ud800"}])
    found: RowFile[Any] = RowFile(tmp_path / "some.rows", dict)
    assert found[0] == {"day": "2024-02-01", "share": float("inf"), "half": "\ud800"}


def test_a_stage_that_goes_on_finds_its_rows_and_says_and_counts_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make = Made(ROWS, ROWS[:1])
    for _ in range(2):
        run = new_run(tmp_path / "run")
        train, held_out = rows_of(run, make, Row.of)
        assert (list(train), list(held_out)) == (ROWS, ROWS[:1])
        assert run.rows == {"data": {"kept": 1, "of": 3, "left_out": {"too long": 2}}}
        assert capsys.readouterr().out.count("two of three are left out") == 1
        run.close()
    assert make.times == 1


@pytest.mark.parametrize("change", ["data", "settings", "max_dropped", "damaged"])
def test_rows_are_made_anew_where_they_may_be_others(tmp_path: Path, change: str) -> None:
    run = new_run(tmp_path / "run")
    rows_of(run, Made(ROWS, ROWS[:1]), Row.of)
    run.close()
    fields: dict[str, Any] = {"settings": {"max_length": 40}, "max_dropped": {"max_dropped": 0.5}}.get(change, {})
    if change == "data":
        fields = {"data": rankings_file(tmp_path / "others.jsonl", marked(3))}
    if change == "damaged":
        (tmp_path / "run" / FOUND).write_text("{")
    run = new_run(tmp_path / "run", **fields)
    train, held_out = rows_of(run, Made(ROWS[:1], ROWS[1:]), Row.of)
    run.close()
    assert (list(train), list(held_out)) == (ROWS[:1], ROWS[1:])


def test_rows_that_could_not_be_made_to_their_end_are_not_taken_for_whole(tmp_path: Path) -> None:
    def fails(reader: RowReader[Any]) -> Iterator[list[Any]]:
        yield ROWS
        raise DataError("data: nothing is left")

    run = new_run(tmp_path / "run")
    with pytest.raises(DataError, match="nothing is left"):
        rows_of(run, fails, Row.of)
    train, _ = rows_of(run, Made(ROWS[:2], ROWS), Row.of)
    run.close()
    assert list(train) == ROWS[:2]


def test_rows_that_cannot_be_written_are_told_with_the_cure(tmp_path: Path) -> None:
    def full(reader: RowReader[Any]) -> Iterator[list[Any]]:
        raise OSError(errno.ENOSPC, "No space left on device")
        yield []

    run = new_run(tmp_path / "run")
    with pytest.raises(CannotWrite, match=r"checkpoints/rows.*free some space"):
        rows_of(run, full, Row.of)
    run.close()


def read(rank: int, root: Path, model: str, data: str) -> tuple[list[Row], dict[str, Any], list[str], int]:
    (root / "run").mkdir(exist_ok=True)
    run = Runtime(settings(model=model, data=data), root / "run")
    said: list[str] = []
    run.say = lambda text, _=False: said.append(text)  # type: ignore[method-assign]
    make = Made(ROWS, ROWS[:1])
    train, _ = rows_of(run, make, Row.of)
    found = list(train), run.rows, said, make.times
    run.close()
    return found


def test_one_of_two_processes_makes_them_and_both_have_them(tmp_path: Path) -> None:
    model, data = policy_folder(tmp_path), rankings_file(tmp_path / "rows.jsonl", marked(12))
    found = in_two_processes(tmp_path, read, tmp_path, model, data)
    counted = {"data": {"kept": 1, "of": 3, "left_out": {"too long": 2}}}
    for rows, rows_counted, said, _ in found:
        assert (rows, rows_counted) == (ROWS, counted)
        assert said[-1] == "two of three are left out"
    assert sum(times for *_, times in found) == 1
