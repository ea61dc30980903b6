"""Where rows come from, how they are numbered, and what is refused."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rlhf.data.errors import DataError
from rlhf.data.sources import Source, TextSource, Unreadable, digest, load_function, locate, named, read_rows


def rows_of(path: Path | str, **settings: Any) -> list[Any]:
    return list(read_rows(Source(path=str(path), **settings)))


def test_a_plain_string_is_a_source() -> None:
    assert Source.model_validate("prefs.jsonl") == Source(path="prefs.jsonl")


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


def test_a_folder_is_its_known_files_in_order_numbered_through(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "b.jsonl").write_text('{"text": "3"}\n')
    (tmp_path / "a.jsonl").write_text('{"text": "1"}\n{"text": "2"}\n')
    (tmp_path / "sub" / "c.txt").write_text("4")
    (tmp_path / ".hidden.txt").write_text("no")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert rows_of(tmp_path) == [(n, {"text": str(n)}) for n in (1, 2, 3, 4)]
    assert locate(Source(path=str(tmp_path)), 3) == f"{tmp_path / 'b.jsonl'} row 1"


@pytest.mark.parametrize("path", ["gone.jsonl", "./gone", "~/gone", "/gone/folder", "a/b/c", "owner/prefs.json", " "])
def test_a_missing_file_is_refused_without_asking_the_hub(path: str) -> None:
    with pytest.raises(DataError, match=r"no such file|no path given"):
        rows_of(path)


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


def test_a_folder_without_known_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no readable file"):
        rows_of(tmp_path)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory, as a user would have it."""
    name = f"made_rows_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(
        "def rows(count, start=0):\n    return ({'text': str(start + n)} for n in range(count))\nfew = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return name


def test_a_function_is_called_with_its_options(module: str) -> None:
    rows = rows_of(f"{module}:rows", options={"count": 2, "start": 5})
    assert rows == [(1, {"text": "5"}), (2, {"text": "6"})]


def test_a_function_that_cannot_be_called_is_refused(module: str) -> None:
    with pytest.raises(DataError, match=r"options \['cuont'\] do not fit"):
        rows_of(f"{module}:rows", options={"cuont": 2})
    with pytest.raises(DataError, match="must be importable"):
        rows_of(f"{module}:gone")
    with pytest.raises(DataError, match="must be importable"):
        rows_of("no_such_package_anywhere:rows")
    with pytest.raises(DataError, match="found int, not a function"):
        load_function(f"{module}:few")


def test_a_hub_id_goes_to_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load_dataset(*args: Any, **settings: Any) -> list[dict[str, str]]:
        asked.append((args, settings))
        return [{"prompt": "p"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert rows_of("owner/set-v1.0", name="en", split="test", revision="abc") == [(1, {"prompt": "p"})]
    assert asked == [(("owner/set-v1.0", "en"), {"split": "test", "revision": "abc", "streaming": False})]
    rows_of("owner/set", streaming=True)
    assert asked[1][1]["streaming"] is True


def test_a_stream_that_breaks_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(*args: Any, **settings: Any) -> Any:
        yield {"prompt": "p"}
        raise ConnectionError("gone")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"owner/set: .*gone"):
        rows_of("owner/set", streaming=True)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A data set with two splits, as `datasets` writes it."""
    import datasets

    splits = {name: datasets.Dataset.from_list([{"text": f"{name} {n}"} for n in (1, 2)]) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_saved_data_set_gives_the_rows_of_its_split(saved: Path) -> None:
    assert rows_of(saved) == [(1, {"text": "train 1"}), (2, {"text": "train 2"})]
    assert rows_of(saved, split="test") == rows_of(saved / "test") == [(1, {"text": "test 1"}), (2, {"text": "test 2"})]
    assert locate(Source(path=str(saved)), 2) == f"{saved} row 2"
    for ask in (rows_of, lambda path, **how: digest(Source(path=str(path), **how))):
        with pytest.raises(DataError, match=r"saved: no split 'dev'; it has test, train; set split"):
            ask(saved, split="dev")


def test_a_folder_with_a_file_of_that_name_alone_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"text": "a"}')
    assert rows_of(tmp_path) == [(1, {"text": "a"})]


def test_a_saved_data_set_gives_python_values_whatever_its_format(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_list([{"a": [1, 2], "b": "x"}]).with_format("numpy", columns=["a"]).save_to_disk(tmp_path)
    assert rows_of(tmp_path) == [(1, {"a": [1, 2], "b": "x"})]


def test_a_saved_data_set_that_is_damaged_is_named(saved: Path) -> None:
    (saved / "train" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(DataError, match="saved: cannot be read as a saved data set"):
        rows_of(saved)


def test_the_digest_of_a_saved_data_set_sees_its_rows_and_no_other_split(saved: Path) -> None:
    import datasets

    train, test = (digest(Source(path=str(saved), split=split)) for split in ("train", "test"))
    assert train != test
    (saved / "test" / "data-00000-of-00001.arrow").unlink()
    assert digest(Source(path=str(saved))) == train
    other = datasets.Dataset.from_list([{"text": "train 1"}, {"text": "train 3"}])
    other.save_to_disk(saved.parent / "other")
    assert digest(Source(path=str(saved.parent / "other"))) != train


def test_a_hub_failure_says_both_that_no_file_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(*args: Any, **settings: Any) -> None:
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"prefs: neither a local file.*'train'.*offline"):
        rows_of("prefs")


def test_a_mistyped_folder_is_told_apart_from_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(*args: Any, **settings: Any) -> None:
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "sft").mkdir(parents=True)
    with pytest.raises(DataError, match=r"the folder models/ here has no 'sftt', did you mean models/sft\?: offline"):
        rows_of("models/sftt")
    with pytest.raises(DataError, match=r"the folder models/ here has no 'rows': offline"):
        rows_of("models/rows")
    with pytest.raises(DataError, match=r"\(split 'train'\): offline"):
        rows_of("owner/rows")


def test_the_digest_sees_contents_and_not_places(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text(json.dumps({"text": "one"}))
    second.write_text(json.dumps({"text": "one"}))
    before = digest(Source(path=str(first)))
    assert before == digest(Source(path=str(second)))
    assert before != digest(Source(path=str(first), column="other"))
    assert before != digest(Source(path=str(first), map={"text": "other"}))
    first.write_text(json.dumps({"text": "two"}))  # the same size
    assert before != digest(Source(path=str(first)))


def test_the_digest_does_not_depend_on_the_order_of_the_map(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("{}")
    one, two = ({"prompt": "q", "response": "a"}, {"response": "a", "prompt": "q"})
    assert digest(Source(path=str(file), map=one)) == digest(Source(path=str(file), map=two))


def test_the_digest_of_a_folder_sees_names_and_contents(tmp_path: Path) -> None:
    source = Source(path=str(tmp_path))
    (tmp_path / "a.txt").write_text("one")
    before = digest(source)
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    renamed = digest(source)
    (tmp_path / "c.txt").write_text("two")
    assert len({before, renamed, digest(source)}) == 3


def test_the_digest_of_a_function_is_that_of_its_rows(module: str) -> None:
    def of(**options: int) -> str:
        return digest(Source(path=f"{module}:rows", options=options))

    assert of(count=2) == of(count=2, start=0) != of(count=2, start=1)


def test_the_digest_of_a_hub_set_is_its_revision_and_never_downloads() -> None:
    one = digest(Source(path="owner/set", revision="a"))
    assert one == digest(Source(path="owner/set", revision="a")) != digest(Source(path="owner/set", revision="b"))


def test_a_function_that_exits_is_an_error_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_exit.py").write_text("import sys\ndef rows(): sys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match="made_exit:rows row 1: it raised SystemExit"):
        rows_of("made_exit:rows")


def test_a_weight_is_part_of_the_digest_and_no_weight_leaves_it_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    path = str(tmp_path / "a.txt")
    digests = {digest(TextSource(path=path, weight=weight)) for weight in (None, 1, 2)}
    assert len(digests) == 3
    assert digest(Source(path=path)) == digest(TextSource(path=path)) in digests


@pytest.mark.parametrize("weight", [0, -1, float("inf"), float("nan")])
def test_a_weight_is_a_number_above_zero(weight: float) -> None:
    with pytest.raises(ValueError, match="weight"):
        TextSource(path="a.txt", weight=weight)


def test_one_source_has_the_name_of_its_setting_and_several_are_numbered() -> None:
    a, b = Source(path="a"), Source(path="b")
    assert named("data", [a]) == {"data": a}
    assert named("data", [a, b]) == {"data[0]": a, "data[1]": b}


def test_files_are_told_as_they_are_read(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl"):
        (tmp_path / name).write_text('"x"\n"y"\n')
    files: list[Path] = []
    told = [(number, files[-1].name) for number, _ in read_rows(Source(path=str(tmp_path)), files)]
    assert told == [(1, "a.jsonl"), (2, "a.jsonl"), (3, "b.txt")]
    assert files == [tmp_path / "a.jsonl", tmp_path / "b.txt"]
