"""The rows of a stage are read and tokenised by one process, and are there for all, and for a stage that goes on."""

import errno
import fcntl
import os
import resource
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from processes_world import in_two_processes
from reward_world import marked, new_run, policy_folder, rankings_file, run_reward, settings
from stages_world import byte_tokenizer, run_stage

from rlhf.data.errors import DataError, RefusedError, Stopped
from rlhf.data.rows import Demonstration
from rlhf.stages.artifact import Artifact
from rlhf.stages.checkpoints import CannotWrite
from rlhf.stages.row_files import RowFile, RowReader, rows_of
from rlhf.stages.runtime import Runtime
from rlhf.stages.sft.config import SFTSettings
from rlhf.stages.sft.train import encode_rows

FOLDER = Path("checkpoints", "rows")
FILES = ["train.rows", "train.ends", "held_out.rows", "held_out.ends"]


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
        reader.noted["longest"] = 300
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


def test_numbers_without_an_end_and_halves_of_a_character_come_back_as_they_were(tmp_path: Path) -> None:
    row = {"share": float("-inf"), "half": "\ud800", "halves": "\ud83d\ude00", "whole": "😀", "long": 10**3000}
    RowFile.write(tmp_path / "some.rows", [row, {"none": float("nan")}])
    found: RowFile[Any] = RowFile(tmp_path / "some.rows", dict)
    assert found[0] == row
    assert found[1]["none"] != found[1]["none"]


def test_a_stage_that_goes_on_finds_its_rows_and_says_and_counts_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make = Made(ROWS, ROWS[:1])
    for _ in range(2):
        run = new_run(tmp_path / "run")
        train, held_out, noted = rows_of(run, make, Row.of)
        assert (list(train), list(held_out), noted) == (ROWS, ROWS[:1], {"longest": 300})
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
        (tmp_path / "run" / FOLDER / "found.json").write_text("{")
    run = new_run(tmp_path / "run", **fields)
    train, held_out, _ = rows_of(run, Made(ROWS[:1], ROWS[1:]), Row.of)
    run.close()
    assert (list(train), list(held_out)) == (ROWS[:1], ROWS[1:])


def test_rows_follow_a_file_of_the_stages_own_that_they_are_made_from(tmp_path: Path) -> None:
    run, make, answers = new_run(tmp_path / "run"), Made(ROWS, ROWS[:1]), tmp_path / "answers.jsonl"
    for text, times in (("a", 1), ("a", 1), ("b", 2)):
        answers.write_text(text)
        rows_of(run, make, Row.of, answers)
        assert make.times == times
    run.close()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut short", "deleted", "overwritten"])
def test_a_file_that_is_not_as_it_was_written_is_made_again(tmp_path: Path, name: str, damage: str) -> None:
    run, make = new_run(tmp_path / "run"), Made(ROWS, ROWS[:1])
    rows_of(run, make, Row.of)
    file = run.folder / FOLDER / name
    if damage == "deleted":
        file.unlink()
    elif damage == "cut short":
        os.truncate(file, file.stat().st_size - 1)
    else:
        file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    train, held_out, _ = rows_of(run, make, Row.of)
    run.close()
    assert (list(train), list(held_out), make.times) == (ROWS, ROWS[:1], 2)


def test_rows_that_could_not_be_made_to_their_end_are_not_taken_for_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was said of them until then is told beside the error."""

    def fails(reader: RowReader[Any]) -> Iterator[list[Any]]:
        yield ROWS
        reader.say("left out: all")
        raise DataError("data: nothing is left")

    run = new_run(tmp_path / "run")
    with pytest.raises(DataError, match="nothing is left"):
        rows_of(run, fails, Row.of)
    assert "left out: all" in capsys.readouterr().out
    train, _, _ = rows_of(run, Made(ROWS[:2], ROWS), Row.of)
    run.close()
    assert list(train) == ROWS[:2]
    assert sorted(path.name for path in (tmp_path / "run" / FOLDER).iterdir()) == sorted([*FILES, "found.json"])


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file can be written that is larger."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("rows", [["a" * 20_000], [1] * 2000], ids=["the rows", "their ends"])
def test_rows_that_cannot_be_written_are_told_with_the_cure(tmp_path: Path, rows: list[Any]) -> None:
    run = new_run(tmp_path / "run")
    with files_of_at_most(10_000), pytest.raises(CannotWrite, match=r"checkpoints/rows could not be .* run again"):
        rows_of(run, Made(rows, ROWS), Row.of)
    assert not (run.folder / FOLDER).exists()
    run.close()


@pytest.mark.parametrize("when", ["before the rows", "between them"])
def test_an_error_of_what_makes_the_rows_is_not_told_as_one_of_writing_them(tmp_path: Path, when: str) -> None:
    def sides(reader: RowReader[Any]) -> Iterator[Iterator[Row]]:
        if when == "before the rows":
            raise PermissionError(errno.EACCES, "Permission denied", "key.txt")
        yield rows()

    def rows() -> Iterator[Row]:
        yield ROWS[0]
        raise PermissionError(errno.EACCES, "Permission denied", "key.txt")

    run = new_run(tmp_path / "run")
    with pytest.raises(PermissionError, match=r"Permission denied: 'key\.txt'"):
        rows_of(run, sides, Row.of)
    run.close()


def test_a_signal_while_rows_are_made_ends_the_stage_at_once(tmp_path: Path) -> None:
    def sides(reader: RowReader[Any]) -> Iterator[list[Row]]:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it goes on")
        yield ROWS

    run = new_run(tmp_path / "run")
    with pytest.raises(Stopped):
        rows_of(run, sides, Row.of)


def test_a_file_system_without_locks_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    run = new_run(tmp_path / "run")
    monkeypatch.setattr(fcntl, "flock", flock)
    train, _, _ = rows_of(run, Made(ROWS, ROWS[:1]), Row.of)
    run.close()
    assert list(train) == ROWS


def test_the_longest_text_of_sft_is_noted_on_whichever_side_it_is() -> None:
    reader = RowReader(SFTSettings.load({"data": "unread.jsonl", "max_length": 40}, "sft"))
    sides = ["a", "bb"], ["c" * 9, "d" * 50], ["e"]
    lengths = []
    for side in sides:
        rows = [Demonstration([{"role": "user", "content": "?"}], text) for text in side]
        lengths += [len(row.input_ids) for row in encode_rows(reader, byte_tokenizer(), rows)]
    assert reader.noted == {"longest": max(lengths)}
    assert len(lengths) == 4


@pytest.mark.parametrize("stage", ["sft", "reward"])
def test_of_the_rows_to_train_on_a_process_reads_those_of_each_step_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """To decode a row takes time: that is done once, for a step, and not for what is known of all rows at the start."""
    read: Counter[str] = Counter()
    get = RowFile.__getitem__

    def counting(self: RowFile[Any], place: Any) -> Any:
        read[Path(str(self._rows.filename)).name] += 1
        return get(self, place)

    monkeypatch.setattr(RowFile, "__getitem__", counting)
    model, data = policy_folder(tmp_path), rankings_file(tmp_path / "rows.jsonl", marked(12))
    (tmp_path / "stage").mkdir()
    if stage == "sft":
        rows = [{"prompt": row["prompt"], "response": row["responses"][0]} for row in marked(12)]
        data, sizes = rankings_file(tmp_path / "rows.jsonl", rows), {"global_batch_size": 4, "max_length": 48}
        run_stage("sft", tmp_path / "stage", model=model, data=data, eval_share=0.3, num_epochs=1, **sizes)
    else:
        fields: dict[str, Any] = {"global_batch_size": 4, "normalise": "none", "margin_scale": 0.1}
        run_reward(tmp_path / "stage", model, data, **fields)
    num_steps = Artifact(tmp_path / "stage").metrics[-1]["step"]
    assert read["train.rows"] == 4 * num_steps > 4


def read(rank: int, root: Path, model: str, data: str) -> tuple[list[Row], dict[str, Any], list[str], int]:
    (root / "run").mkdir(exist_ok=True)
    run = Runtime(settings(model=model, data=data), root / "run")
    said: list[str] = []
    run.say = lambda text, _=False: said.append(text)  # type: ignore[method-assign]
    make = Made(ROWS, ROWS[:1])
    train, _, _ = rows_of(run, make, Row.of)
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
    assert [times for *_, times in found] == [1, 0]


def read_apart(rank: int, root: Path, model: str, data: str) -> str:
    """What is said where each process has a disk of its own."""
    (folder := root / f"disk-{rank}").mkdir()
    run = Runtime(settings(model=model, data=data), folder)
    with pytest.raises(RefusedError) as error:
        rows_of(run, Made(ROWS, ROWS[:1]), Row.of)
    run.close()
    return str(error.value)


def test_a_process_that_does_not_see_them_ends_all_with_its_rank_the_file_and_the_cure(tmp_path: Path) -> None:
    model, data = policy_folder(tmp_path), rankings_file(tmp_path / "rows.jsonl", marked(12))
    for said in in_two_processes(tmp_path, read_apart, tmp_path, model, data):
        assert said.startswith(f"reward: rank 1 does not see {tmp_path / 'disk-1' / FOLDER}")
        assert "put the run folder on a disk that all machines see" in said
