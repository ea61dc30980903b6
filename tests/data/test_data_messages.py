"""What a message may hold beside text: calls of tools, tools that are offered, and parts."""

import json
from typing import Any

import pytest
from formats_world import assistant, dropped, said, system, tool, user

from rlhf.data.errors import DataError
from rlhf.data.rows import load, read_demonstrations, read_prompts, read_text

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
    assert dropped(load(write({"messages": messages}), "demonstrations")) == {reason: [1]}


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
    loaded = load(write(row), "demonstrations")
    assert dropped(loaded) == {"tools is broken JSON": [1]}
    assert loaded.report.dropped["tools is broken JSON"].detail == ", column 11: Expecting value"  # of no table's cell
    assert read_text(write(row)).rows == ["Hi"]


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
    assert dropped(load(source, "demonstrations")) == {"a turn has a part that is not text": [1]}
    with pytest.raises(DataError, match="pictures and sound are not read"):
        read_demonstrations(source)
