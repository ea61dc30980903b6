"""Accepted shapes of rows, and rows that cannot be used by their reasons."""

from typing import Any

import pytest
from formats_world import assistant, counts, user

from rlhf.data.errors import DataError
from rlhf.data.rows import (
    Demonstration,
    Prompt,
    Ranking,
    load,
    prompt_key,
    prompt_text,
    read_demonstrations,
    read_prompts,
    read_rankings,
    read_text,
)


def transcript(answer: str, question: str = "Hi") -> str:
    return f"\n\nHuman: {question}\n\nAssistant:{answer}"


SYSTEM = {"role": "system", "content": "Answer in French."}


def test_people_see_one_user_message_as_it_is_and_longer_prompts_with_roles() -> None:
    assert prompt_text([user("Hi\n")]) == "Hi\n"
    assert prompt_text([SYSTEM, user("Hi")]) == "system: Answer in French.\nuser: Hi"


def test_the_key_of_a_prompt_ignores_outer_whitespace_only() -> None:
    assert prompt_key([user(" Hi ")]) == prompt_key([user("Hi\n")]) != prompt_key([user("H i")])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Q", "response": "A"},
        {"prompt": "Q", "completion": "A"},
        {"prompt": [user("Q")], "completion": [assistant("A")]},
        {"prompt": "Q", "response": [user("Q"), assistant("A")]},
        {"messages": [user("Q"), assistant("A")]},
        {"prompt": "first turn", "prompt_id": "1", "messages": [user("Q"), assistant("A")]},
        {"prompt": "Q", "response": "A", "messages": [user("other"), assistant("B")]},
        {"prompt": "Q", "response": None, "completion": None, "messages": [user("Q"), assistant("A")]},
        {"prompt": "Q", "response": "A", "messages": None},
    ],
)
def test_shapes_of_a_demonstration(write: Any, row: dict[str, Any]) -> None:
    assert read_demonstrations(write(row)).rows == [Demonstration([user("Q")], "A")]


def test_earlier_turns_and_the_system_message_belong_to_the_prompt(write: Any) -> None:
    turns = [SYSTEM, user("Q"), assistant("A"), user("More")]
    [row] = read_demonstrations(write({"messages": [*turns, assistant("B")]})).rows
    assert row == Demonstration(turns, "B")


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Q", "chosen": "A", "rejected": "B"},
        {"prompt": [user("Q")], "chosen": [assistant("A")], "rejected": [assistant("B")]},
        {"prompt": "Q", "chosen": [user("Q"), assistant("A")], "rejected": [user("Q"), assistant("B")]},
        {"chosen": [user("Q"), assistant("A")], "rejected": [user("Q"), assistant("B")]},
        {"prompt": "Q", "responses": ["A", "B"], "ranks": [1, 2]},
        {"prompt": "Q", "completions": ["A", "B"], "ranks": [1, 2]},
    ],
)
def test_shapes_of_a_ranking(write: Any, row: dict[str, Any]) -> None:
    assert read_rankings(write(row)).rows == [Ranking([user("Q")], ["A", "B"], [1.0, 2.0])]


def test_ranked_answers_keep_their_ties(write: Any) -> None:
    [row] = read_rankings(write({"prompt": "Q", "responses": ["a", "b", "c"], "ranks": [2, 1, 2]})).rows
    assert row == Ranking([user("Q")], ["a", "b", "c"], [2.0, 1.0, 2.0])


def test_a_transcript_is_split_at_its_last_answer_and_loses_no_character(write: Any) -> None:
    before = "\n\nHuman: Name a bird.\n\nAssistant: Robin.\n\nHuman: Another?\n\nAssistant:"
    loaded = read_rankings(write({"chosen": before + " Wren.", "rejected": before + " No.\n"}))
    assert loaded.rows == [Ranking([user(before)], [" Wren.", " No.\n"], [1.0, 2.0])]
    [prompt] = read_prompts(write({"chosen": before + " Wren.", "rejected": before + " No."})).rows
    assert prompt.messages == [user(before)]


def tied_and_not() -> list[dict[str, Any]]:
    return [
        {"prompt": "a", "responses": ["x", "y", "z"], "ranks": [2, 2, 2]},
        {"prompt": "b", "chosen": "x", "rejected": "y"},
    ]


def test_an_all_tied_ranking_is_counted_and_is_no_bad_row(write: Any) -> None:
    loaded = read_rankings(write(*tied_and_not()), max_dropped=0.0)
    assert [prompt_text(row.prompt) for row in loaded.rows] == ["b"]
    assert counts(loaded.report) == {"all answers tied": (1, [1])}
    assert (loaded.report.bad, loaded.report.dropped_ties) == (0, 3)


def test_an_all_tied_ranking_stays_where_ties_are_wanted(write: Any) -> None:
    loaded = read_rankings(write(*tied_and_not()), keep_ties=True)
    assert loaded.rows[0] == Ranking([user("a")], ["x", "y", "z"], [2.0, 2.0, 2.0])
    assert (loaded.report.kept, loaded.report.dropped, loaded.report.dropped_ties) == (2, {}, 0)


def test_ties_alone_teach_nothing(write: Any) -> None:
    with pytest.raises(DataError, match=r"all answers tied.*Nothing usable is left: kept 0 of 1"):
        read_rankings(write(tied_and_not()[0]))


def test_whitespace_inside_answers_is_kept(write: Any) -> None:
    [row] = read_demonstrations(write({"prompt": "Answer: ", "response": "\n blue"})).rows
    assert row == Demonstration([user("Answer: ")], "\n blue")


def test_prompts_come_from_any_kind_of_row_once_each(write: Any) -> None:
    loaded = read_prompts(
        write(
            {"prompt": "one"},
            {"messages": [user("two")]},
            {"prompt": "one ", "response": "x"},
            {"messages": [user("three"), assistant("x")]},
            {"prompt": "four", "responses": ["x", "x"], "ranks": [1, 1]},
            {"chosen": [user("five"), assistant("x")], "rejected": [user("five"), assistant("x")]},
            "six",
            {"prompt": "six", "messages": [user("seven"), assistant("x")]},
        )
    )
    texts = [prompt_text(prompt.messages) for prompt in loaded.rows]
    assert texts == ["one", "two", "three", "four", "five", "six", "seven"]
    assert counts(loaded.report) == {"duplicate prompt": (1, [3])}
    assert loaded.report.warnings == ["rows of 4 shapes in one source: prompt; messages; chosen, rejected; text"]


def test_a_prompt_keeps_the_row_that_it_was_read_from(write: Any) -> None:
    source = write({"question": "2 + 2?", "answer": "4", "tests": [1, 2]}, map={"prompt": "question"})
    row = {"question": "2 + 2?", "answer": "4", "tests": [1, 2], "prompt": "2 + 2?"}  # under our names too
    assert read_prompts(source).rows == [Prompt([user("2 + 2?")], row)]
    assert read_prompts(write("Hi")).rows == [Prompt([user("Hi")], {"prompt": "Hi"})]


def test_of_rows_with_one_prompt_the_first_is_kept(write: Any) -> None:
    [prompt] = read_prompts(write({"prompt": "Q", "answer": "1"}, {"prompt": " Q", "answer": "2"})).rows
    assert prompt.row["answer"] == "1"


def test_text_comes_from_a_column_or_is_the_row_itself(write: Any) -> None:
    source = write({"body": "one"}, "two", {"body": " \n"}, {"body": None})
    loaded = read_text(source.model_copy(update={"column": "body"}))
    assert loaded.rows == ["one", "two"]
    assert counts(loaded.report) == {"blank text": (2, [3, 4])}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "", "response": "x"}, "empty prompt"),
        ({"prompt": None, "response": "x"}, "empty prompt"),
        ({"prompt": [], "response": "x"}, "empty prompt"),
        ({"prompt": "w"}, "empty response"),
        ({"prompt": "y", "response": ""}, "empty response"),
        ({"prompt": "y", "response": " \n"}, "empty response"),
        ({"prompt": "y", "response": None}, "empty response"),
        ({"prompt": 4, "response": "x"}, "prompt is a number, not text"),
        ({"prompt": "y", "response": True}, "response is true or false, not text"),
        ({"prompt": "y", "response": {"a": 1}}, "response is an object, not text"),
        ({"prompt": "y", "response": ["x"]}, "response is a list, not text"),
        ({"prompt": "y", "response": "\ud83d"}, "response holds half a character (a lone surrogate)"),
        ({"topic": "y", "answer": "x"}, "no prompt"),
        ("y", "plain text where a row with columns is needed"),
        ({"messages": "y"}, "messages is text, not a list of messages"),
        (
            {"messages": [user("x"), assistant("y"), user("z")]},
            "the last turn of messages is not the assistant's",
        ),
        ({"messages": [user("x"), assistant(None)]}, "empty response"),
        ({"messages": [user("x"), assistant(None), user("y"), assistant("z")]}, "empty assistant turn"),
        ({"messages": [{"role": "narrator", "content": "x"}, assistant("y")]}, "unknown role"),
        (
            {"messages": [{"from": "human"}, assistant("y")]},
            "messages holds something that is not a message with role and content",
        ),
        ({"messages": [assistant("x"), assistant("y")]}, "the last turn of the prompt is not the user's"),
        ({"messages": [assistant("y")]}, "empty prompt"),
        (
            {"prompt": "y", "response": [user("z"), assistant("x")]},
            "response has turns that are not in the prompt",
        ),
    ],
)
def test_an_unusable_demonstration_is_counted_under_its_reason(write: Any, row: Any, reason: str) -> None:
    loaded = load(write(row), "demonstrations")
    assert loaded.rows == []
    assert counts(loaded.report) == {reason: (1, [1])}


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "q", "chosen": "7", "rejected": " 7 "}, "identical answers"),
        ({"prompt": "q", "responses": ["a", "b", "a"], "ranks": [1, 2, 3]}, "identical answers"),
        ({"prompt": "q", "chosen": "7"}, "empty response"),
        ({"prompt": "q", "chosen": 42, "rejected": "41"}, "chosen is a number, not text"),
        ({"prompt": "q", "responses": ["a", "b"], "ranks": [1, 1]}, "all answers tied"),
        ({"prompt": "q", "responses": ["a", "b"], "ranks": [1]}, "responses and ranks differ in length"),
        ({"prompt": "q", "responses": ["a"], "ranks": [1]}, "fewer than two answers"),
        ({"prompt": "q", "responses": "ab", "ranks": [1, 2]}, "responses is text, not a list"),
        ({"prompt": "q", "ranks": [1, 2]}, "responses is missing, not a list"),
        (
            {"prompt": "q", "responses": ["a", "b"], "ranks": [1, float("nan")]},
            "a rank is not a finite number",
        ),
        ({"prompt": "q", "responses": ["a", "b"], "ranks": [1, "second"]}, "a rank is not a finite number"),
        ({"prompt": "q", "responses": ["a", "b"], "ranks": [True, 2]}, "a rank is not a finite number"),
        ({"prompt": "q", "responses": ["a", ""], "ranks": [1, 2]}, "empty response"),
        ({"prompt": "q", "responses": ["a", "a "], "ranks": [1, 1]}, "identical answers"),
        ({"chosen": "Q: hi A: ok", "rejected": "Q: hi A: no"}, "chosen is text without a prompt"),
        ({"chosen": transcript(" a"), "rejected": "Paris"}, "rejected is text without a prompt"),
        ({"chosen": transcript(" a"), "rejected": transcript("")}, "empty response"),
        (
            {"chosen": transcript(" a"), "rejected": transcript(" b", "Bye")},
            "chosen and rejected answer different prompts",
        ),
        ({"chosen": "\n\nAssistant: a", "rejected": "\n\nAssistant: b"}, "empty prompt"),
        (
            {"chosen": [user("Q"), assistant("A")], "rejected": [user("Q"), assistant("A"), user("more")]},
            "the last turn of rejected is not the assistant's",
        ),
        (
            {"chosen": [user("Q"), assistant("A")], "rejected": [user("P"), assistant("B")]},
            "chosen and rejected answer different prompts",
        ),
        (
            {"chosen": [user("Q"), assistant("A")], "rejected": [user("Q"), assistant("A")]},
            "identical answers",
        ),
    ],
)
def test_an_unusable_ranking_is_counted_under_its_reason(write: Any, row: Any, reason: str) -> None:
    loaded = load(write(row), "preferences")
    assert loaded.rows == []
    assert counts(loaded.report) == {reason: (1, [1])}


def test_equal_answers_at_the_same_rank_contradict_nothing(write: Any) -> None:
    assert read_rankings(write({"prompt": "q", "responses": ["a", "b", "a"], "ranks": [1, 2, 1]})).report.kept == 1


def test_a_prompt_that_ends_with_an_answer_awaits_none(write: Any) -> None:
    loaded = load(write({"prompt": [user("x"), assistant("y")]}, {"messages": [SYSTEM]}), "prompts")
    assert counts(loaded.report) == {"the last turn of the prompt is not the user's": (2, [1, 2])}


def test_a_rank_of_hundreds_of_digits_is_counted_like_any_other_bad_rank(write: Any) -> None:
    source = write(*({"prompt": "q", "responses": ["a", "b"], "ranks": [1, 10**digits]} for digits in (1, 320, 400)))
    assert counts(load(source, "preferences").report) == {"a rank is not a finite number": (2, [2, 3])}
