"""Files of every kind: their rows, how these are numbered, and what is refused."""

import gzip
import json
from pathlib import Path

import pytest
from sources_world import rows_of

from rlhf.data.errors import DataError
from rlhf.data.sources import Unreadable


def test_jsonl_rows_carry_their_line_numbers_past_blank_lines(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\r\n{"a": "caf\xc3\xa9\\u2028"}\n')
    assert rows_of(file) == [(1, {"a": 1}), (3, {"a": "café\u2028"})]


def test_a_line_separator_inside_a_text_does_not_end_a_jsonl_row(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"a": "x\u2028y\x85z"}\n', encoding="utf-8")
    assert rows_of(file) == [(1, {"a": "x\u2028y\x85z"})]


def test_broken_lines_take_a_place_so_that_they_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"a": 1}\n{"a": "hal\n{"a": "\xff"}\n[1]\n7')
    reasons = [row.reason for _, row in rows_of(file) if isinstance(row, Unreadable)]
    assert reasons == [
        "broken JSON",
        "not UTF-8",
        "the row is a list, not an object",
        "the row is a number, not an object",
    ]


def test_json_lists_rows_or_holds_one_per_line(tmp_path: Path) -> None:
    listed, lines = tmp_path / "a.json", tmp_path / "b.json"
    listed.write_text('\n[{"a": 1},\n {"a": 2}]')
    lines.write_text('{"a": 1}\n{"a": 2}\n')
    assert rows_of(listed) == rows_of(lines) == [(1, {"a": 1}), (2, {"a": 2})]


def test_broken_json_names_the_line(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('[{"a": 1},\n {"a" 2}]')
    with pytest.raises(DataError, match=r"a\.json line 2: broken JSON, column 7: Expecting ':' delimiter"):
        rows_of(file)


def test_csv_survives_byte_order_mark_crlf_and_line_breaks_in_cells(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes('\ufeffprompt,chosen\r\n"Say ""hi""\r\ntwice",hi 👋\r\n\r\ncafé?,Oui\r\n'.encode())
    assert rows_of(file) == [
        (1, {"prompt": 'Say "hi"\ntwice', "chosen": "hi 👋"}),
        (2, {"prompt": "café?", "chosen": "Oui"}),
    ]


def test_csv_takes_a_cell_longer_than_the_default_limit(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("text\n" + "x" * 200_000 + "\n")
    assert len(rows_of(file)[0][1]["text"]) == 200_000


def test_a_csv_row_with_another_number_of_cells_is_unreadable(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("a,b\n1,2\n1,2,3\n")
    assert rows_of(file)[1] == (
        2,
        Unreadable("wrong number of cells", ": 3 cells under 2 column names (ends on line 3)"),
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('a,b\n1,2\n1,"open\n', r"row 2 \(line \d\): broken table"),
        ("a,a\n1,2\n", "column name occurs twice"),
    ],
)
def test_a_table_that_cannot_be_trusted_is_refused(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "a.csv"
    file.write_text(content)
    with pytest.raises(DataError, match=message):
        rows_of(file)


def test_csv_rows_are_records_and_a_bad_one_says_its_line(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('a,b\n"1\n\n1",2\n\n1,2,"3\n3"\n')
    assert rows_of(file) == [
        (1, {"a": "1\n\n1", "b": "2"}),
        (2, Unreadable("wrong number of cells", ": 3 cells under 2 column names (ends on line 7)")),
    ]


TURNS = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


def test_a_bare_list_of_messages_is_a_row(tmp_path: Path) -> None:
    spoken = [{"from": "human", "value": "Hi"}]
    (tmp_path / "a.jsonl").write_text(json.dumps(TURNS) + "\n" + json.dumps(spoken) + "\n[]\n" + '[{"a": 1}]')
    assert rows_of(tmp_path / "a.jsonl") == [
        (1, {"messages": TURNS}),
        (2, {"messages": spoken}),
        (3, Unreadable("the row is a list, not an object")),
        (4, Unreadable("the row is a list, not an object")),
    ]
    (tmp_path / "a.json").write_text(json.dumps([TURNS, TURNS]))
    assert rows_of(tmp_path / "a.json") == [(1, {"messages": TURNS}), (2, {"messages": TURNS})]


def zstd(content: bytes) -> bytes:
    import pyarrow

    packed: bytes = pyarrow.compress(content, codec="zstd", asbytes=True)
    return packed


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.json.ZST", "a.csv.zst", "a.txt.zst"])
def test_zst_is_unpacked_frame_after_frame(tmp_path: Path, name: str) -> None:
    content = b"text\n" if ".csv" in name else b""
    content += {"jsonl": b'{"text": "a"}', "json": b'{"text": "a"}', "csv": b"a", "txt": b"a"}[name.split(".")[1]]
    (tmp_path / name).write_bytes(zstd(content[:3]) + zstd(content[3:]))
    assert rows_of(tmp_path / name) == rows_of(tmp_path) == [(1, {"text": "a"})]


def test_tsv_parquet_and_gz_give_the_same_rows(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "a.tsv").write_text("prompt\tchosen\np\tc\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"prompt": "p", "chosen": "c"}]), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "p", "chosen": "c"}\n'))
    for name in ("a.tsv", "a.parquet", "a.jsonl.gz"):
        assert rows_of(tmp_path / name) == [(1, {"prompt": "p", "chosen": "c"})], name


@pytest.mark.parametrize("name", ["a.txt", "a.md", "a.log"])
def test_a_text_file_is_one_document(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\xef\xbb\xbfone\r\n\r\ntwo\n")
    assert rows_of(tmp_path / name) == [(1, {"text": "one\n\ntwo\n"})]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_an_empty_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=f"{name}: it is empty"):
        rows_of(tmp_path / name)


def test_an_empty_packed_file_is_refused(tmp_path: Path) -> None:
    for name, content in (("a.jsonl.gz", gzip.compress(b"")), ("a.jsonl.zst", zstd(b""))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}: it is empty"):
            rows_of(tmp_path / name)


def test_a_file_that_ends_too_early_or_is_not_packed_is_refused(tmp_path: Path) -> None:
    whole = zstd(b'{"text": "a"}\n' * 9)
    for content in (whole[:-4], b"not packed", b'{"text": "a"}\n'):
        (tmp_path / "a.jsonl.zst").write_bytes(content)
        with pytest.raises(DataError, match=r"a\.jsonl\.zst: cannot be read"):
            rows_of(tmp_path / "a.jsonl.zst")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"ab\xff", r"byte 2 is not UTF-8"),
        ("a.parquet", b"PAR0", "not a readable Parquet file"),
        ("a.jsonl.gz", b"not packed", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b"x" * 99, mtime=0)[:-12], "cannot be read"),
    ],
)
def test_a_file_that_is_not_what_it_says_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        rows_of(tmp_path / name)
