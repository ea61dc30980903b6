"""What spreadsheets save as CSV: other separators, UTF-16, and rows and columns that were used once."""

import gzip
from pathlib import Path
from typing import Any

import pytest

from rlhf.data.errors import DataError
from rlhf.data.sources import Source, Unreadable, read_rows

ROWS = [(1, {"prompt": "Why, then?", "response": "So; and so"}), (2, {"prompt": "é", "response": "B"})]


def rows_of(path: Path, content: bytes | str) -> list[Any]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(read_rows(Source(path=str(path))))


@pytest.mark.parametrize(
    "text",
    [
        'prompt;response\r\nWhy, then?;"So; and so"\r\né;B\r\n',
        '"prompt";"response"\r\n"Why, then?";"So; and so"\r\n"é";"B"\r\n',
        "prompt\tresponse\nWhy, then?\tSo; and so\né\tB\n",
        'prompt,response\n"Why, then?",So; and so\né,B\n',
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_the_header_says_what_separates_the_cells(tmp_path: Path, text: str, encoding: str) -> None:
    assert rows_of(tmp_path / "a.csv", text.encode(encoding)) == ROWS


def test_a_comma_comes_first_and_one_column_is_a_table_too(tmp_path: Path) -> None:
    assert rows_of(tmp_path / "a.csv", "a,b;c\n1,2\n") == [(1, {"a": "1", "b;c": "2"})]
    assert rows_of(tmp_path / "b.csv", "text\nWell; then\n") == [(1, {"text": "Well; then"})]
    assert rows_of(tmp_path / "c.tsv", "a;b,c\td\n1\t2\n") == [(1, {"a;b,c": "1", "d": "2"})]


def test_a_row_of_other_length_says_which_separator_was_found(tmp_path: Path) -> None:
    assert rows_of(tmp_path / "a.csv", "a;b\n1;2;3\n") == [
        (1, Unreadable("wrong number of cells", ": 3 cells under 2 column names, separated by ';' (ends on line 2)"))
    ]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt", "a.jsonl.gz"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf_16_with_its_mark_is_read_in_every_kind_of_file(tmp_path: Path, name: str, encoding: str) -> None:
    text = "\ufefftext\né\n" if name == "a.csv" else "\ufeffé\n" if name == "a.txt" else '\ufeff{"text": "é"}\n'
    content = text.encode(encoding)
    [(number, row)] = rows_of(tmp_path / name, gzip.compress(content) if name.endswith(".gz") else content)
    assert (number, row["text"].strip()) == (1, "é")


def test_rows_and_columns_that_are_empty_throughout_are_none(tmp_path: Path) -> None:
    assert rows_of(tmp_path / "a.csv", "a;b;;\n1;2;;\n;;;\n3;;; \n;;;\n") == [
        (1, {"a": "1", "b": "2"}),
        (3, {"a": "3", "b": ""}),  # the number that it has in the spreadsheet, less the header
    ]
    assert rows_of(tmp_path / "b.csv", "a;b;\n1;2;3\n")[0][1] == Unreadable(
        "wrong number of cells", ": 3 cells under 2 column names, separated by ';' (ends on line 2)"
    )
    assert rows_of(tmp_path / "c.csv", "text\nHello,\n")[0][1] == Unreadable(
        "wrong number of cells", ": 2 cells under 1 column names (ends on line 2)"
    )
    with pytest.raises(DataError, match="column name occurs twice in the header: a, , b, "):
        rows_of(tmp_path / "d.csv", "a,,b,,c\n1,2,3,4,5\n")


@pytest.mark.parametrize("name", ["a.xlsx", "a.XLS", "a.ods"])
def test_a_workbook_is_told_how_it_can_be_read(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=rf"{name}: a spreadsheet's own file; save the sheet as CSV \(UTF-8\)"):
        rows_of(tmp_path / name, b"PK\x03\x04")
