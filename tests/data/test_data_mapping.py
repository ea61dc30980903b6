"""A source's `map`: their columns under our names."""

from typing import Any

import pytest
from formats_world import counts, user

from rlhf.data.errors import DataError
from rlhf.data.rows import Demonstration, load, read_demonstrations, read_prompts, read_rankings, read_text
from rlhf.data.sources import Source


def mapped(source: Source, **names: str) -> Source:
    return source.model_copy(update={"map": names})


def test_map_reads_our_columns_from_theirs(write: Any) -> None:
    source = write({"question": "Q", "answer": "A", "prompt": "not this"})
    assert read_demonstrations(mapped(source, prompt="question", response="answer")).rows == [
        Demonstration([user("Q")], "A")
    ]
    assert read_text(mapped(source, text="answer")).rows == ["A"]


def test_map_can_swap_two_columns(write: Any) -> None:
    source = mapped(write({"prompt": "Q", "chosen": "A", "rejected": "B"}), chosen="rejected", rejected="chosen")
    assert read_rankings(source).rows[0].responses == ["B", "A"]


def test_a_mapped_column_that_no_row_has_is_refused_with_those_found(write: Any) -> None:
    source = mapped(write({"question": "Q"}, {"answer": "A"}), prompt="questoin", response="answer")
    with pytest.raises(DataError, match=r"map: no column 'questoin' to read as prompt; did you mean 'question'\?$"):
        load(source, "demonstrations")
    source = mapped(write({"question": "Q"}, {"answer": "A"}), prompt="title")
    with pytest.raises(DataError, match=r"no column 'title' to read as prompt \(columns found: question, answer\)$"):
        load(source, "demonstrations")


def test_a_row_without_a_mapped_column_is_a_bad_row(write: Any) -> None:
    source = mapped(write({"question": "Q", "response": "A"}, {"response": "A"}), prompt="question")
    assert counts(load(source, "demonstrations").report) == {"no column 'question' to read as prompt": (1, [2])}


def test_a_name_that_is_not_ours_cannot_be_mapped(write: Any) -> None:
    with pytest.raises(DataError, match=r"map: no column of ours is called 'promt'; did you mean 'prompt'\?$"):
        read_prompts(mapped(write({"question": "Q"}), promt="question"))
    with pytest.raises(DataError, match="map: no column of ours is called 'title'; there are text, prompt, "):
        read_prompts(mapped(write({"question": "Q"}), title="question"))
