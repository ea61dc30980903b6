"""Real files of other people's demonstrations, prompts and texts, read where they lie beside the checkout."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from formats_world import assistant, system, user

from rlhf.data.check import check
from rlhf.data.rows import prompt_text, read_demonstrations
from rlhf.data.sources import Source

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
shared = pytest.mark.skipif(not DATA.is_dir(), reason="no shared data here")


@shared
@pytest.mark.parametrize(
    ("name", "kind", "rows", "name_of_format"),
    [
        ("pairs/dolly_fixture.json", "demonstrations", 12, "dolly"),
        ("pairs/fastchat_dummy_conversation.json", "demonstrations", 500, "sharegpt"),
        ("pairs/glaive_toolcall_en_demo.json", "demonstrations", 300, "sharegpt"),
        ("pairs/longform_fixture.json", "demonstrations", 17, "input_output"),
        ("pairs/swift_alpaca_history.jsonl", "demonstrations", 3, "alpaca"),
        ("pairs/swift_conversations.jsonl", "demonstrations", 3, "sharegpt"),
        ("pairs/torchtitan_question_answer.json", "demonstrations", 10, "question_answer"),
        ("pairs/xtuner_openai_bare_list.jsonl", "demonstrations", 128, "messages"),
        ("prompts/arena_hard_v01_questions.jsonl", "prompts", 500, "prompt"),
        ("prompts/mt_bench_questions_turns.jsonl", "prompts", 80, "mt_bench"),
        ("text/c4_demo.jsonl", "text", 300, "text"),
        ("text/names.txt", "text", 1, "text"),
        ("text/tinyshakespeare.txt", "text", 1, "text"),
    ],
)
def test_files_of_the_field_are_read_whole(name: str, kind: str, rows: int, name_of_format: str) -> None:
    found = check(Source(path=str(DATA / name)), kind)
    assert (found["rows"], found["kept"], found["warnings"]) == (rows, rows, [])
    assert found["format"] == name_of_format


def given(name: str) -> Any:
    return json.loads((DATA / "pairs" / name).read_text(encoding="utf-8"))


def demonstrations(name: str) -> Any:
    return read_demonstrations(Source(path=str(DATA / "pairs" / name))).rows


@shared
def test_real_tool_calls_keep_every_turn_on_its_side() -> None:
    rows = demonstrations("glaive_toolcall_en_demo.json")
    roles = Counter(message["role"] for row in rows for message in row.prompt)
    # Of 746 + 211 turns of the assistant's side one a row is the response; 109 rows offer no tools.
    assert roles == {"user": 746, "assistant": 746 + 211 - 300, "tool": 211, "system": 300 - 109}
    for row, whole in zip(rows, given("glaive_toolcall_en_demo.json"), strict=True):
        turns = [message["content"] for message in row.prompt if message["role"] != "system"]
        assert [*turns, row.response] == [turn["value"] for turn in whole["conversations"]]


@shared
def test_real_conversations_learn_from_their_last_answer() -> None:
    for row, whole in zip(
        demonstrations("fastchat_dummy_conversation.json"), given("fastchat_dummy_conversation.json"), strict=True
    ):
        turns = whole["conversations"]
        assert [message["content"] for message in row.prompt] == [turn["value"] for turn in turns[:-1]]
        assert row.response == turns[-1]["value"]


@shared
def test_a_real_instruction_comes_with_its_context() -> None:
    for row, whole in zip(demonstrations("dolly_fixture.json"), given("dolly_fixture.json"), strict=True):
        assert prompt_text(row.prompt) == "\n".join(filter(None, (whole["instruction"], whole["context"])))


@shared
def test_a_real_history_comes_before_the_question() -> None:
    first, second, third = demonstrations("swift_alpaca_history.jsonl")
    assert first.prompt == [system("system123"), user("aaaaa"), assistant("bbbbb"), user("11111\n22222")]
    assert (second.prompt, second.response) == ([user("aaaaa")], "ccccc")
    assert (third.prompt, third.response) == ([user("AAAAA\nBBBBB")], "CCCCC")
