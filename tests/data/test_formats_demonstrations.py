"""Other people's demonstrations and prompts, in small rows."""

from typing import Any

import pytest
from formats_world import assistant, dropped, said, system, user

from rlhf.data.errors import DataError
from rlhf.data.rows import load, prompt_text, read_demonstrations, read_prompts


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
        ({"instruction": "a", "output": "x", "history": "b"}, NO_HISTORY),
        ({"instruction": "a", "output": "x", "history": [["b"]]}, NO_HISTORY),
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
    assert dropped(loaded) == {reason: [1]}


def test_each_instance_of_an_instruction_is_a_demonstration(write: Any) -> None:
    instances = [{"input": "1 2", "output": "3"}, {"input": "", "output": "0"}, {"input": "4", "output": ""}]
    loaded = read_demonstrations(write({"instruction": "Add.", "instances": instances}))
    assert [(prompt_text(row.prompt), row.response) for row in loaded.rows] == [("Add.\n1 2", "3"), ("Add.", "0")]
    assert (loaded.report.rows, loaded.report.kept, loaded.report.dropped) == (1, 1, {})
    assert {reason: part.count for reason, part in loaded.report.parts.items()} == {"empty response": 1}


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
    assert dropped(load(write(row), "prompts")) == {reason: [1]}
