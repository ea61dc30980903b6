"""Other people's demonstrations and prompts, in small rows and in real files beside the checkout."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rlhf.data.check import check
from rlhf.data.errors import DataError
from rlhf.data.rows import load, prompt_text, read_demonstrations, read_prompts, read_text
from rlhf.data.sources import Source

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
shared = pytest.mark.skipif(not DATA.is_dir(), reason="no shared data here")


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def tool(content: str) -> dict[str, str]:
    return {"role": "tool", "content": content}


def said(*turns: str) -> list[dict[str, str]]:
    """ShareGPT turns from `human: Hi`."""
    return [dict(zip(("from", "value"), turn.split(": ", 1), strict=True)) for turn in turns]


def dropped(report: Any) -> dict[str, list[int]]:
    return {reason: drop.rows for reason, drop in report.dropped.items()}


# -- one row, one demonstration ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "name", "prompt", "response"),
    [
        ({"instruction": "Add.", "input": "1 2", "output": "3"}, "alpaca", [user("Add.\n1 2")], "3"),
        ({"instruction": "Greet.", "input": "", "output": "Hi"}, "alpaca", [user("Greet.")], "Hi"),
        ({"instruction": "Greet.", "output": "Hi"}, "alpaca", [user("Greet.")], "Hi"),
        ({"instruction": "", "input": "1 2", "output": "3"}, "alpaca", [user("1 2")], "3"),
        (
            {"instruction": "More.", "input": None, "output": "b", "system": "Be brief.", "history": [["One.", "a"]]},
            "alpaca",
            [system("Be brief."), user("One."), assistant("a"), user("More.")],
            "b",
        ),
        (
            {"instruction": "Greet.", "input": None, "output": "Hi", "system": None, "history": None},
            "alpaca",
            [user("Greet.")],
            "Hi",
        ),
        ({"instruction": "Greet.", "output": "Hi", "history": [], "system": ""}, "alpaca", [user("Greet.")], "Hi"),
        (
            {"instruction": "Who won?", "context": "The fox won.", "response": "The fox", "category": "closed_qa"},
            "dolly",
            [user("Who won?\nThe fox won.")],
            "The fox",
        ),
        ({"instruction": "Greet.", "context": "", "response": "Hi"}, "dolly", [user("Greet.")], "Hi"),
        ({"instruction": "Greet.", "response": "Hi"}, "dolly", [user("Greet.")], "Hi"),
        ({"question": "2+2?", "answer": "4"}, "question_answer", [user("2+2?")], "4"),
        (
            {"id": "x", "system_prompt": "Count.", "question": "2+2?", "response": "4"},
            "question_response",
            [system("Count."), user("2+2?")],
            "4",
        ),
        ({"system_prompt": "", "question": "2+2?", "response": "4"}, "question_response", [user("2+2?")], "4"),
        ({"query": "2+2?", "response": "4", "type": "sum"}, "query_response", [user("2+2?")], "4"),
        ({"input": " Write. ", "output": " Done.", "source": "x"}, "input_output", [user(" Write. ")], " Done."),
        ({"conversations": said("human: Hi", "gpt: Ho")}, "sharegpt", [user("Hi")], "Ho"),
        ({"conversation": said("user: Hi", "assistant: Ho")}, "sharegpt_conversation", [user("Hi")], "Ho"),
        ({"conversations": [user("Hi"), assistant("Ho")]}, "sharegpt", [user("Hi")], "Ho"),
        (
            {"conversations": said("human: Hi", "gpt: Ho"), "system": "Sing."},
            "sharegpt",
            [system("Sing."), user("Hi")],
            "Ho",
        ),
        (
            {"conversations": said("system: Own.", "human: Hi", "gpt: Ho"), "system": "Sing."},
            "sharegpt",
            [system("Own."), user("Hi")],
            "Ho",
        ),
        (
            {"conversations": said("human: A", "gpt: B", "human: C", "gpt: D")},
            "sharegpt",
            [user("A"), assistant("B"), user("C")],
            "D",
        ),
        ([user("Hi"), assistant("Ho")], "messages", [user("Hi")], "Ho"),
    ],
)
def test_a_row_is_a_prompt_and_a_response(write: Any, row: Any, name: str, prompt: Any, response: str) -> None:
    loaded = read_demonstrations(write(row))
    assert (loaded.report.format, loaded.report.kept, loaded.report.warnings) == (name, 1, [])
    assert (loaded.rows[0].prompt, loaded.rows[0].response) == (prompt, response)
    assert [row.messages for row in read_prompts(write(row)).rows] == [prompt]


def test_ragged_keys_are_one_format(write: Any) -> None:
    rows = [
        {"instruction": "A", "input": "a", "output": "1", "system": "S", "history": [["Q", "R"]]},
        {"instruction": "B", "output": "2"},
        {"instruction": "C", "input": "c", "output": "3"},
    ]
    report = read_demonstrations(write(*rows)).report
    assert (report.kept, report.format, report.warnings) == (3, "alpaca", [])


def test_a_map_reads_any_such_columns_too(write: Any) -> None:
    row = {"question": "2+2?", "answer": "4"}
    [found] = read_demonstrations(write(row, map={"prompt": "question", "response": "answer"})).rows
    assert found == read_demonstrations(write(row)).rows[0]


def test_columns_that_fit_two_formats_ask_for_its_name(write: Any) -> None:
    row = {"conversations": said("human: Hi", "gpt: Ho"), "instruction": "Hi", "response": "Hey"}
    with pytest.raises(DataError, match=r"say which in the source: format: dolly or sharegpt"):
        read_demonstrations(write(row))
    assert read_demonstrations(write(row, format="dolly")).rows[0].response == "Hey"
    assert read_demonstrations(write(row, format="sharegpt")).rows[0].response == "Ho"


NO_HISTORY = "history is not a list of pairs of a question and an answer"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"instruction": "", "input": " ", "output": "x"}, "empty prompt"),
        ({"instruction": "a", "input": 3, "output": "x"}, "input is a number, not text"),
        ({"instruction": "a", "output": ""}, "empty response"),
        ({"instruction": "a", "output": None}, "empty response"),
        ({"instruction": "a", "output": "x", "system": ["b"]}, "system is a list, not text"),
        (
            {"instruction": "a", "output": "x", "history": "b"},
            "history is not a list of pairs of a question and an answer",
        ),
        (
            {"instruction": "a", "output": "x", "history": [["b"]]},
            "history is not a list of pairs of a question and an answer",
        ),
        ({"instruction": "a", "output": "x", "history": [["b", ""]]}, "empty assistant turn"),
        ({"instruction": "a", "context": "b", "response": ["x"]}, "response is a list, not text"),
        ({"question": {"text": "a"}, "answer": "x"}, "question is an object, not text"),
        ({"question": "a", "answer": 2}, "answer is a number, not text"),
        ({"input": "a", "output": "\ud83d"}, "output holds half a character (a lone surrogate)"),
        ({"conversations": said("human: a")}, "the last turn of conversations is not the assistant's"),
        (
            {"conversations": said("human: a", "gpt: b", "human: c")},
            "the last turn of conversations is not the assistant's",
        ),
        ({"conversations": said("gpt: b")}, "empty prompt"),
        ({"conversations": said("gpt: a", "gpt: b")}, "the last turn of the prompt is not the user's"),
        ({"conversations": said("narrator: a", "gpt: b")}, "unknown role"),
        ({"conversations": [{"from": ["x"], "value": "a"}, *said("gpt: b")]}, "unknown role"),
        ({"conversations": said("human:  ", "gpt: b")}, "empty user turn"),
        ({"conversations": None}, "conversations is missing, not a list of messages"),
        ({"conversations": "human: a"}, "conversations is text, not a list of messages"),
        ({"instruction": "a", "instances": "b"}, "instances is not a list of objects with input and output"),
        ({"instruction": "a", "instances": []}, "nothing to use in it"),
    ],
)
def test_an_unusable_row_is_counted_under_its_reason(write: Any, row: Any, reason: str) -> None:
    loaded = load(write(row), "demonstrations")
    assert loaded.rows == []
    assert dropped(loaded.report) == {reason: [1]}


def test_each_instance_of_an_instruction_is_a_demonstration(write: Any) -> None:
    instances = [{"input": "1 2", "output": "3"}, {"input": "", "output": "0"}, {"input": "4", "output": ""}]
    loaded = read_demonstrations(write({"instruction": "Add.", "instances": instances}))
    assert [(prompt_text(row.prompt), row.response) for row in loaded.rows] == [("Add.\n1 2", "3"), ("Add.", "0")]
    assert (loaded.report.rows, loaded.report.kept, loaded.report.dropped) == (1, 1, {})
    assert {reason: part.count for reason, part in loaded.report.parts.items()} == {"empty response": 1}


# -- tools -------------------------------------------------------------------------------------------------

CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'


def test_a_call_is_the_assistants_and_what_it_returns_is_a_tools(write: Any) -> None:
    turns = said("human: 1+2?", f"function_call: {CALL}", "observation: 3", "gpt: It is 3.")
    [row] = read_demonstrations(write({"conversations": turns})).rows
    assert (row.prompt, row.response) == ([user("1+2?"), assistant(CALL), tool("3")], "It is 3.")


def test_a_conversation_may_end_with_a_call(write: Any) -> None:
    called = assistant(None, tool_calls=[{"type": "function", "function": json.loads(CALL)}])
    for row in ({"conversations": said("human: 1+2?", f"function_call: {CALL}")}, [user("1+2?"), called]):
        [found] = read_demonstrations(write(row)).rows
        assert (found.prompt, found.response) == ([user("1+2?")], CALL)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": None, "tool_calls": [{"id": "1", "type": "function", "function": json.loads(CALL)}]}, CALL),
        ({"tool_calls": [{"function": {"name": "add", "arguments": '{"a":1,"b":2}'}}]}, CALL),
        ({"content": "", "tool_calls": [json.loads(CALL)] * 2}, f"{CALL}\n{CALL}"),
        ({"content": "Let me see.", "tool_calls": [json.loads(CALL)]}, f"Let me see.\n{CALL}"),
        ({"content": None, "function_call": json.loads(CALL)}, CALL),
        ({"tool_calls": [{"name": "add", "arguments": "{half"}]}, '{"name": "add", "arguments": "{half"}'),
        ({"content": "No call.", "tool_calls": []}, "No call."),
        ({"content": "No call.", "tool_calls": None}, "No call."),
    ],
)
def test_calls_beside_a_message_become_its_text(write: Any, message: dict[str, Any], text: str) -> None:
    [row] = read_demonstrations(
        write({"messages": [user("1+2?"), {"role": "assistant"} | message, tool("3"), assistant("3")]})
    ).rows
    assert row.prompt == [user("1+2?"), assistant(text), tool("3")]


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ([{"id": "1"}], "a call of a tool has no name"),
        (["add"], "a call of a tool has no name"),
        (True, "tool_calls is not a list of calls"),
    ],
)
def test_a_call_that_says_nothing_is_refused(write: Any, calls: Any, reason: str) -> None:
    messages = [user("1+2?"), assistant(None, tool_calls=calls), tool("3"), assistant("3")]
    assert dropped(load(write({"messages": messages}), "demonstrations").report) == {reason: [1]}


TOOLS = [{"name": "add", "description": "Zähle"}, {"name": "find"}]
TOLD = 'Tools:\n{"name": "add", "description": "Zähle"}\n{"name": "find"}'


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)])
def test_offered_tools_are_told_in_the_system_message(write: Any, tools: Any) -> None:
    rows = [
        {"conversations": said("human: Hi", "gpt: Ho"), "tools": tools},
        {"messages": [system("Be kind."), user("Hi"), assistant("Ho")], "tools": tools},
    ]
    found = read_demonstrations(write(*rows)).rows
    assert [row.prompt for row in found] == [
        [system(TOLD), user("Hi")],
        [system(f"Be kind.\n\n{TOLD}"), user("Hi")],
    ]
    assert [row.messages for row in read_prompts(write(*rows)).rows] == [row.prompt for row in found]
    told = {"messages": [*found[1].prompt, assistant("Ho")], "tools": tools}
    assert read_demonstrations(write(told)).rows == [found[1]]  # not twice


@pytest.mark.parametrize("tools", [None, "", "[]", [], "a hammer", ["hammer"], 3])
def test_a_column_of_that_name_without_tools_tells_nothing(write: Any, tools: Any) -> None:
    row = {"conversations": said("human: Hi", "gpt: Ho"), "tools": tools}
    assert read_demonstrations(write(row)).rows[0].prompt == [user("Hi")]


def test_broken_tools_are_counted_and_a_text_needs_none(write: Any) -> None:
    row = {"conversations": said("human: Hi", "gpt: Ho"), "tools": '[{"name": ', "text": "Hi"}
    report = load(write(row), "demonstrations").report
    assert dropped(report) == {"tools is broken JSON": [1]}
    assert report.dropped["tools is broken JSON"].detail == ", column 11: Expecting value"  # of no table's cell
    assert read_text(write(row)).rows == ["Hi"]


# -- parts of a message ------------------------------------------------------------------------------------


def test_parts_of_text_are_joined_as_they_are(write: Any) -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hi", "image_url": None}]
    [row] = read_demonstrations(write([user(parts), assistant([{"type": "text", "text": "hi"}])])).rows
    assert (row.prompt, row.response) == ([user("Say hi")], "hi")


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "x"}},
        {"type": "input_audio"},
        {"type": "text", "text": None},
        "bare",
    ],
)
def test_a_part_that_is_no_text_is_refused(write: Any, part: Any) -> None:
    source = write([user([{"type": "text", "text": "What is it?"}, part]), assistant("A fox.")])
    assert dropped(load(source, "demonstrations").report) == {"a turn has a part that is not text": [1]}
    with pytest.raises(DataError, match="pictures and sound are not read"):
        read_demonstrations(source)


# -- prompts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"question_id": 1, "category": "x", "turns": ["Hi", "Again."], "reference": ["a", "b"]},
        {"turns": ["Hi"]},
        {"question_id": "a", "cluster": "x", "turns": [{"content": "Hi"}]},
        {"uid": "a", "category": "x", "cluster": "y", "prompt": "Hi"},
        {"conversations": said("human: Hi")},
        {"messages": said("human: Hi")},
        {"conversations": said("human: Hi"), "chosen": "a", "rejected": "b"},
        {"conversations": said("human: Hi"), "chosen": {"from": "gpt", "value": "a"}, "rejected": None},
    ],
)
def test_a_row_is_a_prompt_with_its_other_columns(write: Any, row: dict[str, Any]) -> None:
    [prompt] = read_prompts(write(row)).rows
    assert (prompt.messages, prompt.row) == ([user("Hi")], row)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"turns": []}, "turns is not a list of questions"),
        ({"turns": "Hi"}, "turns is not a list of questions"),
        ({"turns": [""]}, "empty prompt"),
        ({"turns": [3]}, "prompt is a number, not text"),
        ({"conversations": said("system: Hi")}, "the last turn of the prompt is not the user's"),
    ],
)
def test_an_unusable_prompt_is_counted_under_its_reason(write: Any, row: Any, reason: str) -> None:
    assert dropped(load(write(row), "prompts").report) == {reason: [1]}


# -- real files --------------------------------------------------------------------------------------------


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
