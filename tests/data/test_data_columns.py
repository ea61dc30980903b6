"""Names of columns: alike whatever their letter case and the blanks around them, as long as that leaves no choice."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from formats_world import dropped, read, user

from rlhf.data.columns import columns_found, did_you_mean, find
from rlhf.data.errors import ConnectionLost, DataError
from rlhf.data.examples import Demonstration
from rlhf.data.recognise import recognise
from rlhf.data.rows import load, read_demonstrations, read_prompts, read_text
from rlhf.data.sources import Source
from rlhf.data.streams import copy_share


def test_the_exact_name_comes_first_and_two_that_are_alike_are_none() -> None:
    assert find("Text", ["text", "Text"]) == "Text"
    assert find("text", [" TEXT ", "body"]) == " TEXT "
    assert find("text", ["Text", "TEXT"]) is None
    assert find("text", ["texts"]) is None


@pytest.mark.parametrize("header", ["Question,Answer", " question ,ANSWER", "\ufeffQUESTION, Answer\t"])
def test_a_table_may_write_its_names_large(tmp_path: Path, header: str) -> None:
    (tmp_path / "a.csv").write_text(f"{header}\nWhy?,So.\n", encoding="utf-8")
    loaded = read_demonstrations(Source(path=str(tmp_path / "a.csv")))
    assert loaded.rows == [Demonstration([user("Why?")], "So.")]
    assert loaded.report.format == "question_answer"
    assert recognise(str(tmp_path / "a.csv")).kind == "demonstrations"


@pytest.mark.parametrize(
    ("row", "kind", "shape"),
    [
        ({"Prompt": "Q", "Response": "A"}, "demonstrations", "prompt, response"),
        ({"MESSAGES": [user("Q"), {"role": "assistant", "content": "A"}]}, "demonstrations", "messages"),
        ({"Instruction": "Q", "Input": "more", "Output": "A"}, "demonstrations", "alpaca"),
        ({"Prompt": "Q", "Chosen": "A", "Rejected": "B"}, "preferences", "prompt, chosen, rejected"),
        ({"PROMPT": "Q", "Responses": ["A", "B"], "Ranks": [1, 2]}, "preferences", "prompt, responses, ranks"),
        ({"HISTORY": "Q", "Human_Ref_A": "A", "human_ref_b": "B", "Labels": 1}, "preferences", "shp"),
        ({"Prompt": "Q"}, "prompts", "prompt"),
        ({"Question": "Q", "Answer": "A"}, "prompts", "question_answer"),
    ],
)
def test_every_format_is_known_by_names_written_otherwise(row: Any, kind: str, shape: str) -> None:
    loaded = read(row, kind=kind)
    assert (loaded.report.format, loaded.report.kept) == (shape, 1)


def test_columns_that_may_be_there_are_found_like_those_that_must() -> None:
    (row,) = read({"instruction": "Add.", "Input": "1 2", "output": "3"}, kind="demonstrations").rows
    assert row == Demonstration([user("Add.\n1 2")], "3")


def test_names_that_leave_a_choice_are_not_guessed() -> None:
    loaded = read({"Prompt": "one", "PROMPT": "two", "response": "A"}, kind="demonstrations")
    assert dropped(loaded) == {"no prompt": [1]}
    (row,) = read({"prompt": "one", "Prompt": "two", "response": "A"}, kind="demonstrations").rows
    assert row == Demonstration([user("one")], "A")


def test_the_row_of_a_prompt_has_its_columns_under_both_names(write: Any) -> None:
    (prompt,) = read_prompts(write({"Prompt": "Q", "Answer": 4})).rows
    assert prompt.row == {"Prompt": "Q", "Answer": 4, "prompt": "Q", "answer": 4}


def test_map_and_column_find_names_written_otherwise(write: Any) -> None:
    source = write({"Title": "Q", "Body ": "A"})
    named = source.model_copy(update={"map": {"prompt": "title", "response": "BODY"}})
    assert read_demonstrations(named).rows == [Demonstration([user("Q")], "A")]
    assert read_text(source.model_copy(update={"column": "body"})).rows == ["A"]
    wrong = source.model_copy(update={"map": {"prompt": "titel"}})
    with pytest.raises(DataError, match=r"no column 'titel' to read as prompt; did you mean 'Title'\?$"):
        load(wrong, "prompts")


def test_an_error_lists_the_columns_of_the_file_and_not_too_many() -> None:
    assert columns_found(["Question", "b", "question"]) == " (columns found: Question, b)"
    assert columns_found(map(str, range(14))).endswith("10, 11, …)")
    assert columns_found([]) == " (columns found: none)"
    assert did_you_mean("zzz", ["prompt"]) == ""


def test_a_hub_that_is_gone_before_the_next_share_is_no_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=ConnectionError("Couldn't reach it")))
    with pytest.raises(
        ConnectionLost, match=r"lost while share 2 was read \(Couldn't reach it\); what was copied is kept"
    ):
        copy_share(Source(path="owner/set", streaming=True), 1, tmp_path / "000001.jsonl.zst")


def test_a_streamed_set_keeps_the_column_of_another_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    rows = datasets.Dataset.from_list([{"Text": "one", "other": 1}]).to_iterable_dataset()
    monkeypatch.setattr("rlhf.data.streams.hub_set", lambda source: rows)
    copy_share(Source(path="owner/set", streaming=True), 0, tmp_path / "000000.jsonl.zst")
    source = Source(path=str(tmp_path))
    assert read_text(source).rows == ["one"]
    assert [json.dumps(row) for row in load(source, "text").rows] == ['"one"']
