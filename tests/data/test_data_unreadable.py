"""Files and functions that are not what they should be: always a DataError or a counted row, never a traceback."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf.data.errors import DataError
from rlhf.data.sources import Source, Unreadable, digest, read_rows

DEEP = "[" * 100_000


def rows_of(path: Path | str) -> list[Any]:
    return list(read_rows(Source(path=str(path))))


def test_json_nested_without_end_is_a_bad_row_of_jsonl_and_refused_in_a_list(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(f'{{"a": 1}}\n{DEEP}\n')
    assert rows_of(tmp_path / "a.jsonl")[1] == (2, Unreadable("JSON nested too deeply"))
    (tmp_path / "a.json").write_text(DEEP)
    with pytest.raises(DataError, match=r"a\.json: JSON nested too deeply"):
        rows_of(tmp_path / "a.json")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_number_of_thousands_of_digits_is_read_as_infinity(tmp_path: Path, name: str) -> None:
    row = '{"a": [1, -2, %s]}' % ("9" * 5000)
    (tmp_path / name).write_text(row if name == "a.jsonl" else f"[{row}]")
    assert rows_of(tmp_path / name) == [(1, {"a": [1, -2, float("inf")]})]


@pytest.mark.parametrize("name", ["a.jsonl", "a.txt"])
def test_what_begins_as_utf_16_and_is_none_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\xff\xfea\0\0\xdc")  # half of a pair, at bytes 4 and 5
    with pytest.raises(DataError, match=rf"{name}: byte 4 is not UTF-16, as its first two are; save it as UTF-8"):
        rows_of(tmp_path / name)


def test_utf_32_is_no_text_that_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffab".encode("utf-32-le"))
    with pytest.raises(DataError, match=r"a\.txt: it is not text \(byte 0 is zero\)"):
        rows_of(tmp_path / "a.txt")


@pytest.mark.parametrize("name", ["a.zip", "a.bin.gz", "a.txt", "a.csv", "a.json"])
def test_bytes_that_are_no_text_are_refused(tmp_path: Path, name: str) -> None:
    content = b"PK\x03\x04\x14\x00\xff"
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    with pytest.raises(DataError, match=rf"{name}: it is not text \(byte 5 is zero\); .*\.jsonl.* \.gz or"):
        rows_of(tmp_path / name)


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("extra", [{}, {"version": "1"}])
def test_an_object_around_the_rows_is_refused_with_the_cure(
    tmp_path: Path, indent: int | None, extra: dict[str, str]
) -> None:
    file = tmp_path / "a.json"
    file.write_text(json.dumps(extra | {"train": [{"prompt": "p", "response": "r"}]}, indent=indent))
    with pytest.raises(DataError, match=r"a\.json: one object that holds its rows under 'train'; write that list"):
        rows_of(file)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "p", "response": "r"},
        {"messages": [{"role": "user", "content": "p"}]},
        {"prompt": "p", "response": "r", "sources": [{"page": 1}]},
    ],
)
@pytest.mark.parametrize("indent", [None, 2])
def test_one_object_may_be_one_row_over_several_lines(tmp_path: Path, row: Any, indent: int | None) -> None:
    (tmp_path / "a.json").write_text(json.dumps(row, indent=indent))
    assert rows_of(tmp_path / "a.json") == [(1, row)]


def test_lines_of_rows_that_hold_a_list_are_rows(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"turns": [{"text": "x"}]}\n' * 2)
    assert [number for number, _ in rows_of(tmp_path / "a.json")] == [1, 2]


def test_a_broken_object_over_several_lines_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{\n  "prompt": "p",\n  "response" "r"\n}\n')
    with pytest.raises(DataError, match=r"a\.json line 3: broken JSON, column 14: Expecting ':' delimiter"):
        rows_of(tmp_path / "a.json")


def test_the_first_byte_that_is_no_utf_8_is_named(tmp_path: Path) -> None:
    latin = "prompt,response\ncafé,x\n".encode("latin-1")  # é is byte 19, counted from 0
    for name in ("a.csv", "a.txt", "a.json"):
        (tmp_path / name).write_bytes(latin)
        with pytest.raises(DataError, match=rf"{name}: byte 19 is not UTF-8; save the file as UTF-8"):
            rows_of(tmp_path / name)
    (tmp_path / "a.jsonl").write_bytes('{"a": "x"}\n{"a": "é"}\n'.encode("latin-1"))
    assert rows_of(tmp_path / "a.jsonl") == [
        (1, {"a": "x"}),
        (2, Unreadable("not UTF-8", ", byte 8 of the line")),
    ]


def test_a_text_of_a_parquet_file_that_is_no_utf_8_costs_its_row_alone(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    texts = pyarrow.array([b"one", b"tw\xff", b"three"]).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    assert rows_of(tmp_path / "a.parquet") == [
        (1, {"text": "one"}),
        (2, Unreadable("not UTF-8", ", byte 3 of a text")),
        (3, {"text": "three"}),
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("    raise KeyError('x')", r":rows row 1: it raised KeyError: 'x'"),
        ("    yield 'one'\n    raise OSError('gone')", r":rows row 2: it raised OSError: gone"),
        ("    return None", r":rows: it returned None; return a list of rows, or yield them"),
        ("    return 7", r":rows: it returned int;"),
        ("    return 'text'", r":rows: it returned str;"),
        ("    return b'text'", r":rows: it returned bytes;"),
        ("    return {'train': []}", r":rows: it returned dict;"),
    ],
)
def test_a_function_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    name = use_module(tmp_path, monkeypatch, f"def rows():\n{body}\n")
    with pytest.raises(DataError, match=name + message):
        rows_of(f"{name}:rows")
    with pytest.raises(DataError, match=name + message):
        digest(Source(path=f"{name}:rows"))


def test_a_module_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = use_module(tmp_path, monkeypatch, "1 / 0\n")
    with pytest.raises(DataError, match=f"{name}:rows: importing it raised ZeroDivisionError"):
        rows_of(f"{name}:rows")


def test_a_row_of_a_function_that_json_cannot_hold_has_no_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = use_module(tmp_path, monkeypatch, "def rows():\n    return [{'a': 10**5000}]\n")
    with pytest.raises(DataError, match=f"{name}:rows row 1: it cannot be written as JSON"):
        digest(Source(path=f"{name}:rows"))


def use_module(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> str:
    name = "failing_" + "".join(letter if letter.isalnum() else "_" for letter in folder.name)
    (folder / f"{name}.py").write_text(code)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return name


def test_a_file_that_is_there_and_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n')

    def broken(self: Path, mode: str = "r", *_: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", broken)
    for ask in (rows_of, lambda path: digest(Source(path=str(path)))):
        with pytest.raises(DataError, match=r"a\.jsonl: cannot be read: .*Permission denied"):
            ask(tmp_path / "a.jsonl")
