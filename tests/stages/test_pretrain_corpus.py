"""From text to blocks: made once, made anew when anything changed that decides them, and recorded."""

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from errno import ENOSPC
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock

import datasets
import numpy as np
import pytest
from processes_world import held_until
from stages_world import block_rows, byte_tokenizer, tiny_policy

from rlhf.data import documents
from rlhf.data.collate import Blocks
from rlhf.data.documents import Documents
from rlhf.data.errors import ConnectionLost, DataError, RefusedError, SettingsError
from rlhf.data.mixture import Mixture
from rlhf.data.sources import TextSource
from rlhf.data.split import split_by_prompt
from rlhf.data.tokens import encode_documents
from rlhf.stages import together, token_cache, token_files
from rlhf.stages.disk import file_digest
from rlhf.stages.pretrain import corpus as module
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.pretrain.corpus import Corpus, prepare
from rlhf.stages.runtime import Runtime
from rlhf.stages.settings_file import write_settings
from rlhf.stages.together import claimed

Prepare = Callable[..., Corpus]
TEXTS = [f"document {number} of the text\n" for number in range(40)]


def write_rows(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_rows(tmp_path / "rows.jsonl", TEXTS)
    return tmp_path


@pytest.fixture
def make(folder: Path) -> Iterator[Prepare]:
    """Prepare the corpus of some settings as the stage does, in folder/run/pretrain."""
    runs: list[Any] = []

    def prepared(**fields: Any) -> Corpus:
        settings = {"data": str(folder / "rows.jsonl"), "vocab_size": 280, "context_length": 16, "report_to": []}
        stage = folder / "run" / "pretrain"
        write_settings(stage, PretrainSettings.load(settings | fields, "pretrain"))
        runs.append(Runtime(PretrainSettings.load(settings | fields, "pretrain"), stage))
        return prepare(runs[-1])

    yield prepared
    for run in runs:
        run.close()


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was made anew, as it happens."""
    done: list[str] = []

    def note(place: Any, name: str) -> None:
        real = getattr(place, name)

        def noted(*args: Any) -> Any:
            done.append(name)
            return real(*args)

        monkeypatch.setattr(place, name, noted)

    note(module, "train_tokenizer")
    note(token_cache, "join_parts")
    return done


def record(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "run" / "pretrain" / "corpus.json").read_text(encoding="utf-8"))["sources"]


def test_rows_are_the_training_documents_joined_and_cut(folder: Path, make: Prepare) -> None:
    corpus = make(block_size=8, eval_share=0.2)
    train, held_out = split_by_prompt(TEXTS, str, 0.2)
    expected = block_rows(encode_documents(corpus.tokenizer, train), 8)
    assert corpus.rows[range(len(corpus.rows))].equal(expected)
    eval_rows = corpus.eval_rows
    assert eval_rows[range(len(eval_rows))].equal(block_rows(encode_documents(corpus.tokenizer, held_out), 8))
    assert corpus.block_size == 8
    assert corpus.rows.num_tokens == sum(map(len, encode_documents(corpus.tokenizer, train)))


def test_a_text_of_one_file_is_cut_near_its_end(folder: Path, make: Prepare) -> None:
    (folder / "text.txt").write_text("ab" * 50)
    corpus = make(data=str(folder / "text.txt"), tokenizer="characters", block_size=8)
    eos, a, b = 0, 2, 3
    assert corpus.rows.num_tokens == 91  # 90 characters and the end
    assert corpus.rows[[0]].tolist() == [[a, b] * 4 + [a]]
    assert corpus.eval_rows[[0]].tolist() == [[a, b] * 4 + [a]]
    assert corpus.eval_rows.tokens[-2:].tolist() == [b, eos]


def test_a_small_held_out_text_makes_one_block_of_its_own_length(folder: Path, make: Prepare) -> None:
    (folder / "text.txt").write_text("ab" * 20)
    corpus = make(data=str(folder / "text.txt"), tokenizer="characters")
    assert corpus.eval_rows[range(len(corpus.eval_rows))].tolist() == [[2, 3, 2, 3, 0]]


def test_a_text_smaller_than_a_block_is_refused_with_the_sizes(folder: Path, make: Prepare) -> None:
    (folder / "text.txt").write_text("abcdefghij")
    with pytest.raises(DataError, match=r"pretrain\.data: the text gives 10 tokens, but a block needs 17; use more"):
        make(data=str(folder / "text.txt"), tokenizer="characters")


def test_what_did_not_change_is_not_made_again(folder: Path, make: Prepare, work: list[str]) -> None:
    first = make()
    assert work == ["train_tokenizer", "join_parts"]
    shutil.rmtree(folder / "run" / "pretrain")
    again = make(num_steps=7, learning_rate=1.0, block_size=8, hidden_size=16)
    assert work == ["train_tokenizer", "join_parts"]
    assert isinstance(again.rows.tokens, np.memmap)
    assert again.rows.tokens.dtype == np.uint16
    assert (again.rows.tokens == first.rows.tokens).all()
    assert again.tokenizer.backend_tokenizer.to_str() == first.tokenizer.backend_tokenizer.to_str()
    assert [part["name"] for part in record(folder)] == ["data"]


@pytest.mark.parametrize(
    "change",
    [
        {"min_document_length": 24}, {"max_document_length": 23}, {"deduplicate": "exact"}, {"eval_share": 0.4},
        {"vocab_size": 279}, {"tokenizer": "characters"}, {"special_tokens": ["<|x|>"]},
    ],
)  # fmt: skip
def test_a_setting_that_decides_the_tokens_makes_them_anew(
    make: Prepare, work: list[str], change: dict[str, Any]
) -> None:
    make()
    make(**change)
    assert work == ["train_tokenizer", "join_parts"] * 2
    make()
    assert len(work) == 4


def test_one_other_letter_in_the_text_makes_them_anew(folder: Path, make: Prepare, work: list[str]) -> None:
    before = make().rows.tokens.copy()
    write_rows(folder / "rows.jsonl", ["dokument 0 of the text\n", *TEXTS[1:]])  # of the same size
    after = make().rows.tokens
    assert work == ["train_tokenizer", "join_parts"] * 2
    assert len(before) != len(after) or (before != after).any()


def test_another_existing_tokenizer_makes_the_tokens_anew(folder: Path, make: Prepare, work: list[str]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder / "bytes")
    make(tokenizer=str(folder / "bytes"))
    changed = json.loads((folder / "bytes" / "tokenizer.json").read_text())
    vocabulary = changed["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "bytes" / "tokenizer.json").write_text(json.dumps(changed))
    make(tokenizer=str(folder / "bytes"))
    assert work == ["join_parts", "join_parts"]


@pytest.mark.parametrize("damage", ["cut short", "no meta", "broken meta", "no file"])
def test_damaged_tokens_are_made_anew(folder: Path, make: Prepare, work: list[str], damage: str) -> None:
    before = make().rows.tokens.copy()
    [place] = (path.parent for path in (folder / "run" / "tokens").glob("*/meta.json"))
    if damage == "cut short":
        with (place / "tokens.bin").open("r+b") as file:
            file.truncate(10)
    elif damage == "broken meta":
        (place / "meta.json").write_text('{"dtype": "uint16"')
    else:
        (place / ("meta.json" if damage == "no meta" else "held_out.bin")).unlink()
    assert (make().rows.tokens == before).all()
    assert work == ["train_tokenizer", "join_parts", "join_parts"]


@pytest.fixture
def parts_of_five(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the forty texts, each of some twenty characters."""
    monkeypatch.setattr(documents, "PART", 100)


def ids(folder: Path) -> dict[str, bytes]:
    """What is kept of a text's tokens, by file."""
    [place] = (path.parent for path in (folder / "run" / "tokens").glob("*/meta.json"))
    return {path.name: path.read_bytes() for path in place.iterdir()}


def test_a_kill_loses_the_part_that_is_being_written_and_no_other(
    folder: Path, make: Prepare, monkeypatch: pytest.MonkeyPatch, work: list[str], parts_of_five: None
) -> None:
    make()
    whole, parts = ids(folder), []
    shutil.rmtree(folder / "run" / "tokens")
    real = token_files.encode_documents

    def killed_in_the_third(*args: Any) -> Iterator[list[int]]:
        parts.append(found := list(real(*args)))
        yield from found[:2]
        if len(parts) == 3:
            raise KeyboardInterrupt
        yield from found[2:]

    monkeypatch.setattr(token_files, "encode_documents", killed_in_the_third)
    with pytest.raises(KeyboardInterrupt):
        make()
    make()
    assert len(parts) == 9  # of eight, one was begun twice
    assert sum(map(len, parts)) == 40 + 5
    assert ids(folder) == whole
    assert work == ["train_tokenizer", "join_parts"] * 2


def test_parts_that_another_process_is_at_are_left_to_it_and_change_nothing(
    folder: Path, make: Prepare, work: list[str], parts_of_five: None
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(folder / "bytes")
    make(tokenizer=str(folder / "bytes"))
    wanted = PretrainSettings.load({"data": str(folder / "rows.jsonl"), "vocab_size": 280}, "pretrain")
    (shared := folder / "shared").mkdir()
    ours, theirs = Documents(wanted, "pretrain"), Documents(wanted, "pretrain")
    for documents_of in (ours, theirs):
        token_cache.survey(folder / "text", documents_of, print)
    at_work = [shared / "parts" / f"00000-{start:012}-{start + 5:012}.json" for start in (5, 30)]
    at_work[0].parent.mkdir()
    with claimed(at_work[0]), claimed(at_work[1]):
        token_files.write_parts(shared, ours, tokenizer, lambda *_, **__: None)
    assert len(list((shared / "parts").glob("*.train"))) == 6
    with pytest.raises(FileNotFoundError):
        token_files.join_parts(shared, ours, tokenizer)
    token_files.write_parts(shared, theirs, tokenizer, lambda *_, **__: None)
    (shared / ".meta.json.123.writing").touch()  # of one that was killed
    token_files.join_parts(shared, theirs, tokenizer)
    assert {path.name: path.read_bytes() for path in shared.iterdir()} == ids(folder)


def test_a_process_reads_nothing_of_a_text_whose_parts_are_all_taken(
    folder: Path, make: Prepare, parts_of_five: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = PretrainSettings.load({"data": str(folder / "rows.jsonl")}, "pretrain")
    first, late = Documents(wanted, "pretrain"), Documents(wanted, "pretrain")
    token_cache.survey(folder / "text", first, print)
    token_files.write_parts(folder, first, byte_tokenizer(), lambda *_, **__: None)
    monkeypatch.setattr(Documents, "_read", None)
    token_cache.survey(folder / "text", late, print)
    token_files.write_parts(folder, late, byte_tokenizer(), lambda *_, **__: None)


def test_each_wait_for_another_process_is_told_with_what_it_makes(
    folder: Path, make: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    kept = folder / "run" / "tokens"
    names = sorted((path.name for path in kept.iterdir() if path.is_dir()), key=lambda name: -len(name))
    monkeypatch.setattr(together, "PATIENCE", 0.0)
    made = ["a tokenizer from pretrain.data", "a survey of pretrain.data", "the tokens of pretrain.data"]
    for name, what in zip(names, made, strict=True):
        shutil.rmtree(kept)
        kept.mkdir()
        said: list[str] = []
        told = Event()

        def say(_: Any, text: str, now_and_then: bool = False, said: list[str] = said, told: Event = told) -> None:
            if text.startswith("waiting"):
                said.append(text)
                told.set()

        monkeypatch.setattr(Runtime, "say", say)
        with held_until(told, kept / f".{name}.lock", fcntl.LOCK_EX):
            make()
        assert said == [f"waiting for another process, which makes {what} ({kept / name})"]


def test_machines_that_share_no_folder_make_the_same_files_each_for_itself(
    folder: Path, make: Prepare, work: list[str], parts_of_five: None
) -> None:
    make()
    here, names = ids(folder), {path.name for path in (folder / "run" / "tokens").iterdir()}
    (folder / "run").rename(folder / "elsewhere")
    make()
    assert ids(folder) == here
    assert {path.name for path in (folder / "run" / "tokens").iterdir()} == names
    assert work == ["train_tokenizer", "join_parts"] * 2


def test_a_stream_is_downloaded_once_a_file_at_a_time_and_goes_on_after_a_kill(
    folder: Path, make: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = datasets.Dataset.from_dict({"body": TEXTS, "number": range(40)}).to_iterable_dataset(num_shards=4)
    downloaded: list[int] = []
    copy = token_cache.copy_share

    def copied(source: Any, number: int, file: Path) -> None:
        downloaded.append(number)
        if len(downloaded) == 3:
            raise KeyboardInterrupt
        copy(source, number, file)

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    monkeypatch.setattr(token_cache, "copy_share", copied)
    source = {"path": "owner/name", "streaming": True, "column": "body"}
    with pytest.raises(KeyboardInterrupt):
        make(data=source)
    corpus = make(data=source)
    assert downloaded == [0, 1, 2, 2, 3]
    make(data=source, vocab_size=270)  # from the same copies
    assert len(downloaded) == 5
    local = make()
    assert corpus.rows.num_tokens == local.rows.num_tokens
    assert (corpus.rows.tokens == local.rows.tokens).all()
    make(data=source)
    assert record(folder)[0]["path"] == "owner/name"


def test_a_stream_that_breaks_off_keeps_the_shares_that_it_had(
    folder: Path, make: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = [2]

    def rows(numbers: list[int]) -> Iterator[dict[str, str]]:
        for number in numbers:
            if number in broken:
                raise ConnectionError("gone")
            yield from ({"text": text} for text in TEXTS[number * 10 :][:10])

    loaded = datasets.IterableDataset.from_generator(rows, gen_kwargs={"numbers": [0, 1, 2, 3]})
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: loaded)
    source = {"path": "owner/name", "streaming": True}
    with pytest.raises(ConnectionLost) as lost:
        make(data=source)
    (kept,) = {path.parent for path in (folder / "run").rglob("*.jsonl.zst")}
    assert sorted(path.name for path in kept.glob("0*.zst")) == ["000000.jsonl.zst", "000001.jsonl.zst"]
    assert str(lost.value) == (
        "owner/name: the connection to the hub was lost while share 3 was read (gone); "
        f"what was copied is kept in {kept}; run again"
    )
    broken.clear()
    assert make(data=source).rows.num_tokens == make().rows.num_tokens


def test_a_copy_that_cannot_be_written_is_no_fault_of_the_hub(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.Dataset.from_dict({"text": ["a", "b"]}).to_iterable_dataset()
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    full = Mock(side_effect=OSError(ENOSPC, "No space left on device"))
    monkeypatch.setattr("rlhf.data.streams.json", Mock(dumps=full))
    with pytest.raises(OSError, match="No space left"):
        token_cache.copy_share(TextSource(path="owner/name", streaming=True), 0, folder / "000000.jsonl.zst")


def test_a_file_that_lies_here_is_read_as_it_is_though_it_is_to_be_streamed(folder: Path, make: Prepare) -> None:
    path = str(folder / "rows.jsonl")
    corpora = [make(data={"path": path, "streaming": True}), make(data=path)]
    assert corpora[0].rows.num_tokens == corpora[1].rows.num_tokens


def test_a_kill_while_a_tokenizer_is_made_leaves_nothing_that_counts(
    folder: Path, make: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "swap_folder", raises(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            make()
    assert len(list((folder / "run" / "tokens").glob(".*.writing"))) == 1
    assert make().rows.num_tokens > 100
    assert not list((folder / "run" / "tokens").glob(".*.writing"))


def raises(error: type[BaseException]) -> Callable[..., None]:
    def raising(*_: Any) -> None:
        raise error

    return raising


def test_weights_make_a_mixture_in_their_proportion_and_no_new_tokens(
    folder: Path, make: Prepare, work: list[str]
) -> None:
    (folder / "a.txt").write_text("a" * 400)
    (folder / "b.txt").write_text("b" * 200)

    def sources(first: float | None, second: float | None) -> list[dict[str, Any]]:
        return [
            {"path": str(folder / "a.txt"), "weight": first},
            {"path": str(folder / "b.txt"), "weight": second},
        ]

    joined = make(data=sources(None, None), tokenizer="characters", block_size=10)
    assert isinstance(joined.rows, Blocks)
    assert joined.rows.num_tokens == 361 + 181
    assert len(joined.rows) == 54
    mixed = make(data=sources(1, 3), tokenizer="characters", block_size=10)
    assert isinstance(mixed.rows, Mixture)
    assert (len(mixed.rows), mixed.rows.num_tokens) == (36 + 18, 542)
    letters = [int(row[1]) for step in range(10) for row in mixed.rows.batch(step, 4, 0)]
    b = mixed.tokenizer.convert_tokens_to_ids("b")
    assert abs(letters.count(b) - 30) <= 3  # an end of text may stand there once an epoch
    assert work == ["train_tokenizer", "join_parts"]
    assert [(part["name"], part["weight"]) for part in record(folder)] == [("data[0]", 1), ("data[1]", 3)]
    assert mixed.eval_rows.num_tokens == 41 + 21


def test_a_weighted_source_smaller_than_a_block_is_named(folder: Path, make: Prepare) -> None:
    (folder / "b.txt").write_text("short")
    data = [{"path": str(folder / "rows.jsonl"), "weight": 1}, {"path": str(folder / "b.txt"), "weight": 1}]
    with pytest.raises(DataError, match=r"pretrain\.data\[1\]: the text gives 5 tokens, but a block needs 17"):
        make(data=data, tokenizer="characters")


def test_text_given_for_evaluation_is_all_held_out_and_recorded(
    folder: Path, make: Prepare, capsys: pytest.CaptureFixture[str]
) -> None:
    given = write_rows(folder / "eval.jsonl", [TEXTS[3], "dé✓ new\n"])
    corpus = make(eval_data=str(given), tokenizer="characters")
    assert corpus.eval_rows.num_tokens == len(TEXTS[3]) + len("dé✓ new\n") + 2
    data, evaluation = record(folder)
    assert (data["documents"], data["left_out"]) == (39, {"in eval_data": 1})
    assert (evaluation["documents"], evaluation["held_out_tokens"]) == (2, corpus.eval_rows.num_tokens)
    for _ in range(2):  # once more from the cache
        said = capsys.readouterr().out
        assert "pretrain.data: kept 39 of 40 documents; 1 × in eval_data" in said
        # é, ✓ and w are in no training text
        assert f"pretrain.eval_data: 3 of {corpus.eval_rows.num_tokens} held-out tokens are unknown" in said
        make(eval_data=str(given), tokenizer="characters")


def test_the_record_says_which_files_were_read_in_which_order(folder: Path, make: Prepare) -> None:
    (folder / "texts" / "b").mkdir(parents=True)
    for name in ("c.txt", "a.txt", "b/z.md"):
        (folder / "texts" / name).write_text(f"The text of {name}, which is long enough. " * 3)
    corpus = make(data=str(folder / "texts"), deduplicate="minhash", eval_share=0.3)
    [source] = record(folder)
    names = [Path(file["path"]).relative_to(folder / "texts").as_posix() for file in source["files"]]
    assert names == ["a.txt", "b/z.md", "c.txt"]
    for file in source["files"]:
        assert file["sha256"] == file_digest(Path(file["path"]))
        assert (file["documents"], file["characters"]) == (1, len(Path(file["path"]).read_text()))
    assert source["tokens"] == corpus.rows.num_tokens


def test_a_model_to_train_further_keeps_its_tokenizer_and_its_positions(folder: Path, make: Prepare) -> None:
    base = folder / "base"
    tiny_policy().save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    corpus = PretrainSettings.load({"data": "x", "model": str(base)}, "pretrain")
    assert module.block_size(corpus) == 64  # it has so many positions
    assert module.block_size(corpus.model_copy(update={"block_size": 32})) == 32
    with pytest.raises(SettingsError, match=r"pretrain\.block_size is 65, but the model has 64 positions; lower it"):
        module.block_size(corpus.model_copy(update={"block_size": 65}))
    with pytest.raises(RefusedError, match=r"no causal language model in '.*texts'"):
        module.block_size(corpus.model_copy(update={"model": str(folder / "texts")}))


def test_continued_pretraining_reads_with_the_models_own_tokenizer(folder: Path, make: Prepare) -> None:
    base = folder / "base"
    tiny_policy().save_pretrained(base)
    byte_tokenizer().save_pretrained(base)
    stage = folder / "run" / "further"
    settings = PretrainSettings.load(
        {"data": str(folder / "rows.jsonl"), "model": str(base), "block_size": 16, "report_to": []}, "pretrain"
    )
    write_settings(stage, settings)
    run = Runtime(settings, stage)
    corpus = prepare(run)
    run.close()
    assert corpus.tokenizer.backend_tokenizer.to_str() == byte_tokenizer().backend_tokenizer.to_str()
    assert corpus.rows.num_tokens + corpus.eval_rows.num_tokens == sum(len(text) + 1 for text in TEXTS)


def test_shakespeare_is_read_whole(make: Prepare) -> None:
    path = Path(__file__).parents[2].parent / "shared/data/text/tinyshakespeare.txt"
    if not path.is_file():
        pytest.skip("tinyshakespeare.txt is not here")
    corpus = make(data=str(path), tokenizer="characters", context_length=64)
    assert len(corpus.tokenizer) == 65 + 2
    assert corpus.rows.num_tokens + corpus.eval_rows.num_tokens == 1_115_394 + 2


def test_an_end_of_text_that_is_the_unknown_token_too_is_not_counted_as_unknown(
    folder: Path, make: Prepare, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.unk_token = tokenizer.eos_token  # as GPT-2 has it
    tokenizer.save_pretrained(folder / "tokenizer")
    make(tokenizer=str(folder / "tokenizer"))
    assert "unknown" not in capsys.readouterr().out
