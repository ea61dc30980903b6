"""Formats that spread an example over several rows, where rows are odd."""

from typing import Any

import pytest
from formats_world import dropped, read


def message(name: str, parent: str | None, role: str = "prompter", text: str = "x") -> dict[str, Any]:
    return {"message_id": name, "parent_id": parent, "text": text, "role": role, "rank": None}


def test_messages_that_give_no_prompt_are_all_dropped() -> None:
    loaded = read(message("a", "gone", "assistant"), kind="prompts")
    assert (loaded.rows, loaded.report.kept) == ([], 0)
    assert dropped(loaded) == {"nothing to use in it": [1]}


def test_messages_without_an_id_or_with_anothers_give_no_prompt() -> None:
    rows = message("", None), message("a", None, text="one"), message("a", None, text="two")
    loaded = read(*rows, kind="prompts")
    assert [prompt.messages[0]["content"] for prompt in loaded.rows] == ["one"]
    assert dropped(loaded) == {"no message_id": [1], "a message_id occurs twice": [3]}


def test_the_tools_of_a_row_are_told_in_rankings_of_several_rows() -> None:
    tools = [{"name": "clock"}]
    rows = ({"prompt": "p", "response": r, "helpfulness": h, "tools": tools} for r, h in (("x", 3), ("y", 1)))
    (ranking,) = read(*rows).rows
    assert ranking.prompt[0]["role"] == "system"
    assert "clock" in ranking.prompt[0]["content"]


def test_a_flat_export_may_have_a_column_called_fields() -> None:
    row = {"fields": {"a": 1}, "id": "1", "_server_id": "s", "r.responses": ["a"]}
    assert read(row).rows == []


@pytest.mark.parametrize(("given", "kept"), [([3, 1], [3.0, 1.0]), ([float("nan"), 1], None), ([None, 1], None)])
def test_a_pair_keeps_its_strengths_unless_one_is_missing(given: Any, kept: Any) -> None:
    (ranking,) = read({"prompt": "p", "chosen": "a", "rejected": "b", "strengths": given}).rows
    assert ranking.strengths == kept
