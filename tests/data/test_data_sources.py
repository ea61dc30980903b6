"""Where rows come from: files, folders, functions, saved data sets and the hub."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sources_world import rows_of

from rlhf.data.errors import ConnectionLost, DataError
from rlhf.data.sources import Source, TextSource, digest, load_function, locate, named, read_rows


def test_a_plain_string_is_a_source() -> None:
    assert Source.model_validate("prefs.jsonl") == Source(path="prefs.jsonl")


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


def test_a_folder_without_known_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no readable file"):
        rows_of(tmp_path)


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


def test_a_stream_that_breaks_off_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(*args: Any, **settings: Any) -> Any:
        yield {"prompt": "p"}
        raise ConnectionError("gone")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ConnectionLost) as lost:
        rows_of("owner/set", streaming=True)
    assert str(lost.value) == "owner/set: the connection to the hub was lost while it was read (gone); run again"


def test_a_download_that_breaks_off_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    def answering(status: int) -> HfHubHTTPError:
        response: Any = SimpleNamespace(headers={}, request=None, status_code=status)
        return HfHubHTTPError(str(status), response=response)

    def download_and_prepare(error: Exception) -> None:  # which load_dataset calls once it has found the set
        try:
            raise error
        except Exception as cause:
            raise LocalEntryNotFoundError("not in the cache") from cause

    assert hasattr(datasets.DatasetBuilder, download_and_prepare.__name__)  # by which it is known
    failing: list[Exception] = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: download_and_prepare(failing.pop()))
    for error in (TimeoutError("too slow"), answering(503), answering(429)):
        failing.append(error)
        with pytest.raises(ConnectionLost, match="while it was read"):
            rows_of("owner/set")
    for error in (answering(403), OfflineModeIsEnabled("HF_HUB_OFFLINE"), ValueError("a file is damaged")):
        failing.append(error)
        with pytest.raises(DataError, match="nor loadable from the hub"):
            rows_of("owner/set")


def test_a_damaged_file_of_a_stream_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load_dataset(*args: Any, **settings: Any) -> Any:
        yield {"prompt": "p"}
        raise ValueError("no JSON")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match="no JSON"):
        rows_of("owner/set", streaming=True)


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


def test_a_function_that_exits_is_an_error_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "made_exit.py").write_text("import sys\ndef rows(): sys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match="made_exit:rows row 1: it raised SystemExit"):
        rows_of("made_exit:rows")


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
