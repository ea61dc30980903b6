"""Accepted shapes of rows, and what happens to rows that cannot be used."""

from pathlib import Path
from typing import Any

import pytest

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
from rlhf.data.sources import Source


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str | None) -> dict[str, str | None]:
    return {"role": "assistant", "content": text}


def transcript(answer: str, question: str = "Hi") -> str:
    return f"\n\nHuman: {question}\n\nAssistant:{answer}"


SYSTEM = {"role": "system", "content": "Answer in French."}


def counts(report: Any) -> dict[str, tuple[int, list[int]]]:
    return {reason: (drop.count, drop.rows) for reason, drop in report.dropped.items()}


def test_people_see_one_user_message_as_it_is_and_longer_prompts_with_roles() -> None:
    assert prompt_text([user("Hi\n")]) == "Hi\n"
    assert prompt_text([SYSTEM, user("Hi")]) == "system: Answer in French.\nuser: Hi"  # type: ignore[list-item]


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
    assert row == Demonstration(turns, "B")  # type: ignore[arg-type]


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


def test_text_pairs_without_a_prompt_are_told_the_cure(write: Any) -> None:
    with pytest.raises(DataError, match=r"row 1: chosen is text without a prompt; add a column 'prompt', or write"):
        read_rankings(write({"chosen": "Q: sky? A: blue", "rejected": "Q: sky? A: blue and wide"}))


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
    source = mapped(write({"question": "2 + 2?", "answer": "4", "tests": [1, 2]}), prompt="question")
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


def test_blank_texts_alone_are_nothing(write: Any) -> None:
    with pytest.raises(DataError, match=r"row 1: blank text.*Nothing usable is left: kept 0 of 2"):
        read_text(write({"text": " "}, {"text": ""}))


def test_a_text_file_is_no_set_of_prompts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Say hi\nSay bye\n")
    with pytest.raises(DataError) as caught:
        read_prompts(Source(path=str(tmp_path / "a.txt")))
    assert str(caught.value).endswith(
        "a.txt row 1: a text file is one document; prompts are rows of a CSV or JSON Lines file with prompt, or "
        "messages. Nothing usable is left: kept 0 of 1 rows"
    )
    for kind in ("demonstrations", "preferences"):
        assert counts(load(Source(path=str(tmp_path)), kind).report) == {"a text file is one document": (1, [1])}


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


def test_broken_lines_are_counted_like_other_bad_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "ok", "response": "fine"}\n{"prompt": "ok 2", "resp')
    loaded = read_demonstrations(Source(path=str(file)), max_dropped=0.5)
    assert counts(loaded.report) == {"broken JSON": (1, [2])}
    with pytest.raises(DataError, match=r"rows\.jsonl row 2: broken JSON, column 20"):
        read_demonstrations(Source(path=str(file)))


def some_bad() -> list[dict[str, Any]]:
    return [
        {"prompt": "ok 1", "completion": "fine"},
        {"prompt": "y", "completion": ""},
        {"prompt": "z", "completion": 3},
        {"prompt": "ok 2", "completion": "fine"},
        {"prompt": "v", "completion": None},
    ]


def test_bad_rows_are_refused_with_file_row_reason_and_cure(write: Any) -> None:
    with pytest.raises(DataError) as caught:
        read_demonstrations(write(*some_bad()))
    assert str(caught.value).partition("rows.jsonl")[2] == (
        " row 2: empty response. kept 2 of 5 rows; 2 × empty response (rows 2, 5); "
        "1 × completion is a number, not text (row 3). "
        "Repair them, or set max_dropped=0.6 to go on without them"
    )


def test_max_dropped_is_the_share_that_may_be_lost(write: Any) -> None:
    assert read_demonstrations(write(*some_bad()), max_dropped=0.6).report.kept == 2
    with pytest.raises(DataError):
        read_demonstrations(write(*some_bad()), max_dropped=0.59)


def test_the_share_that_the_message_proposes_is_enough(write: Any) -> None:
    bad = [{"prompt": "x"}] * 29
    source = write(*bad, *[{"prompt": "x", "response": "y"}] * 71)
    with pytest.raises(DataError, match=r"max_dropped=0\.29 "):
        read_demonstrations(source)
    assert read_demonstrations(source, max_dropped=0.29).report.kept == 71


def test_nothing_left_is_an_error_whatever_may_be_dropped(write: Any) -> None:
    with pytest.raises(DataError, match="Nothing usable is left: kept 0 of 2 rows"):
        read_demonstrations(write({"prompt": "w"}, {"prompt": " "}), max_dropped=1.0)


def test_wrong_column_names_are_told_with_those_found(write: Any) -> None:
    with pytest.raises(DataError) as caught:
        read_demonstrations(write({"prompt": "q", "answer": "a"}))
    assert str(caught.value).partition("rows.jsonl")[2] == (
        " row 1: empty response: no column 'response' (columns found: prompt, answer); demonstrations need prompt and "
        "response, or messages; name yours with map: {prompt: YOURS}. Nothing usable is left: kept 0 of 1 rows"
    )
    with pytest.raises(DataError, match=r"no column 'text' \(columns found: body\)"):
        read_text(write({"body": "x"}))


def test_only_the_first_few_row_numbers_are_kept(write: Any) -> None:
    loaded = load(write(*[{"text": 1}] * 9), "text")
    assert counts(loaded.report) == {"text is a number, not text": (9, [1, 2, 3, 4, 5])}
    assert loaded.report.summary() == "kept 0 of 9 rows; 9 × text is a number, not text (rows 1, 2, 3, 4, 5, …)"


def test_a_bad_row_of_a_folder_is_named_by_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n{"prompt": "y"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "z"}\n{"prompt": ""}\n')
    with pytest.raises(DataError, match=r"b\.jsonl row 2: empty prompt"):
        read_prompts(Source(path=str(tmp_path)))


def test_a_rank_of_hundreds_of_digits_is_counted_like_any_other_bad_rank(write: Any) -> None:
    source = write(*({"prompt": "q", "responses": ["a", "b"], "ranks": [1, 10**digits]} for digits in (1, 320, 400)))
    assert counts(load(source, "preferences").report) == {"a rank is not a finite number": (2, [2, 3])}


def test_a_function_may_give_such_a_rank_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": "q", "responses": ["a", "b"], "ranks": [1, 10**5000]}]
    monkeypatch.setattr("rlhf.data.rows.read_rows", lambda source, files: enumerate(rows, 1))
    with pytest.raises(DataError, match="row 1: a rank is not a finite number: it has hundreds of digits"):
        read_rankings(Source(path="made:rows"))
