"""Single answers with a verdict: those of one prompt are a ranking, and bad ones no demonstrations; TRL's formats."""

from pathlib import Path
from typing import Any

import pytest
from formats_world import assistant, found, ranks, user, why
from formats_world import said as shared

from rlhf.data.errors import DataError
from rlhf.data.rows import Demonstration, Ranking, read_demonstrations, read_prompts, read_rankings
from rlhf.data.sources import Source

DATA = Path(__file__).resolve().parents[3] / "shared" / "data" / "preferences"
published = pytest.mark.skipif(not DATA.is_dir(), reason="no shared data here")


LONE = "one answer that was judged good or bad, with none to compare"
BAD = "a response that was judged bad"


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("Q"), assistant("A")], "label": True},
        {"prompt": "Q", "completion": "A", "label": False},
        {"prompt": "Q", "response": "A", "thumbs": "up"},
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}], "kto_tag": False},
        {"instruction": "Q", "output": "A", "label": "False"},
    ],
)
def test_single_answers_with_a_verdict_are_known_and_refused_where_each_prompt_has_one_alone(
    write: Any, row: Any
) -> None:
    source = write(row)
    assert found(source)[:4] == ("unpaired_labels", 1, 0, {LONE: (1, [1])})
    with pytest.raises(
        DataError, match="need two answers to the same prompt: pair a good and a bad one as prompt, cho"
    ):
        read_rankings(source)
    assert [prompt.messages for prompt in read_prompts(source).rows] == [[user("Q")]]


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"prompt": "Q", "completion": "A", "label": True}, {"completion": "B", "label": False}),
        ({"prompt": "Q", "response": "A", "thumbs": "up"}, {"response": "B", "thumbs": "down"}),
        ({"instruction": "Q", "output": "A", "label": "True"}, {"output": "B", "label": "False"}),
        ({"question": "Q", "answer": "A", "kto_tag": True}, {"answer": "B", "kto_tag": False}),
        (
            {"messages": [user("Q"), assistant("A")], "label": True},
            {"messages": [user("Q"), assistant("B")], "label": False},
        ),
        (
            {"conversations": shared("human: Q", "gpt: A"), "label": True},
            {"conversations": shared("human: Q", "gpt: B"), "label": False},
        ),
    ],
)
def test_a_good_and_a_bad_answer_to_one_prompt_are_a_ranking_in_any_format(write: Any, good: Any, bad: Any) -> None:
    source = write(good | bad, good)
    assert read_rankings(source).rows == [Ranking([user("Q")], ["B", "A"], [2, 1], [0, 1])]
    assert found(source)[0] == "unpaired_labels"
    loaded = read_demonstrations(source, max_dropped=0.5)
    assert (loaded.rows, loaded.report.warnings) == ([Demonstration([user("Q")], "A")], [])


def test_equal_labels_tie_and_prompts_with_one_kind_of_label_are_left_out(write: Any) -> None:
    labels = {"Q": (True, False, True), "R": (True, True), "S": (False, False), "T": (True,)}
    rows = [
        {"prompt": prompt, "completion": text, "label": label}
        for prompt, said in labels.items()
        for text, label in zip("abc", said, strict=False)
    ]
    source = write(*rows)
    assert ranks(source) == [[1, 3, 1], [1, 1], [1, 1]]
    assert found(source)[2:6] == (3, {"all answers tied": (4, [4, 5, 6, 7]), LONE: (1, [8])}, 2, 3)
    assert read_rankings(source, max_dropped=0.125).report.bad == 1


def test_an_answer_that_was_judged_both_ways_lies_between(write: Any) -> None:
    said = (("a", True), ("b", True), ("b", False), ("c", False))
    [row] = read_rankings(write(*({"prompt": "Q", "completion": text, "label": label} for text, label in said))).rows
    assert (row.responses, row.strengths) == (["a", "b", "c"], [1, 0.5, 0])


def test_a_label_of_another_name_is_a_score_that_is_true_or_false(write: Any) -> None:
    rows = ({"prompt": "Q", "text": text, "good": label} for text, label in (("a", False), ("b", True)))
    source = write(*rows, map={"response": "text", "score": "good"})
    assert read_rankings(source).rows == [Ranking([user("Q")], ["a", "b"], [2, 1], [0, 1])]
    words = write(*({"prompt": "Q", "response": text, "score": str(text == "b")} for text in "ab"))
    assert ranks(words) == [[2, 1]]


def test_a_labelled_row_whose_prompt_leaves_a_choice_is_told(write: Any) -> None:
    row = {"instruction": "Q", "output": "A", "question": "R", "answer": "B", "label": True}
    assert why(write(row)) == {"prompt and answer can be read in several ways": [1]}
    assert why(write({"output": "A", "label": True})) == {"no prompt": [1]}


def test_pairs_are_pairs_whatever_else_their_rows_hold(write: Any) -> None:
    row = {"prompt": "Q", "chosen": "A", "rejected": "B", "label": False, "response": "A"}
    assert ranks(write(row, {"prompt": "Q", "responses": ["A", "B"], "ranks": [1, 2], "label": True})) == [[1, 2]] * 2


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [user("Q"), assistant("A")]},
        {"prompt": "Q", "completion": "A"},
        {"instruction": "Q", "output": "A"},
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
    ],
)
def test_an_answer_that_was_judged_bad_is_no_demonstration_in_any_format(write: Any, row: Any) -> None:
    verdicts = [{"label": True}, {"label": False}, {"label": None}, {"kto_tag": "false"}, {"thumbs": "down"}, {}]
    source = write(*(row | verdict for verdict in verdicts))
    assert why(source, "demonstrations") == {BAD: [2, 4, 5]}
    assert read_demonstrations(source).report.bad == 0  # which are what such a file is made of


def test_where_all_were_judged_bad_the_column_that_says_so_is_named(write: Any) -> None:
    with pytest.raises(DataError, match=r"row 1: a response that was judged bad: label is False; rename the column"):
        read_demonstrations(write({"prompt": "Q", "completion": "A", "label": False}))


def test_a_bad_answer_is_none_through_a_map_either(write: Any) -> None:
    source = write({"q": "Q", "a": "A", "label": False}, map={"prompt": "q", "response": "a"})
    assert why(source, "demonstrations") == {BAD: [1]}


def test_labels_that_are_numbers_or_words_may_mean_anything(write: Any) -> None:
    source = write(*({"prompt": "Q", "completion": "A", "label": value} for value in (0, 1, "negative", [False])))
    assert read_demonstrations(source).report.kept == 4


def test_labelled_steps_are_no_rankings(write: Any) -> None:
    source = write({"prompt": "Q", "completions": ["a", "b"], "labels": [True, False]})
    assert found(source)[0] == "stepwise_labels"
    assert why(source) == {"labels on the steps of one answer, with none to compare": [1]}


@published
def test_kto_demo() -> None:
    source = Source(path=str(DATA / "lf_kto_en_demo.json"))
    lost = {LONE: (294, [1, 2, 3, 4, 5]), "all answers tied": (4, [37, 103, 182, 294])}
    assert found(source) == ("unpaired_labels", 300, 2, lost, 1, 2, 1)  # of three prompts that come twice
    bad = {BAD: (150, [5, 6, 8, 9, 12])}
    assert found(source, "demonstrations") == ("messages", 300, 150, bad, 0, 0, 148)
    repeated = {"duplicate prompt": (3, [103, 196, 294])}
    assert found(source, "prompts") == ("messages", 300, 297, repeated, 0, 0, 297)


FIRST = [1, 2, 3, 4, 5]
NO_TEXT, NO_PROMPT, NO_RESPONSE, NO_RANK = (
    {reason: (19, FIRST)}
    for reason in ("no column 'text'", "no prompt", "empty response", "an answer without its rank or score")
)
WITHOUT = {"chosen is text without a prompt": (19, FIRST)}
STEPS = {"labels on the steps of one answer, with none to compare": (19, FIRST)}
UNPAIRED = {LONE: (19, FIRST)}


@published
@pytest.mark.parametrize(
    ("name", "losses"),
    [
        ("standard_language_modeling", ({}, NO_PROMPT, NO_PROMPT, NO_PROMPT)),
        ("standard_prompt_only", (NO_TEXT, NO_RESPONSE, NO_RESPONSE, {})),
        ("standard_prompt_completion", (NO_TEXT, {}, NO_RANK, {})),
        ("standard_preference", (NO_TEXT, NO_RESPONSE, {}, {})),
        ("standard_implicit_prompt_preference", (NO_TEXT, NO_PROMPT, WITHOUT, WITHOUT)),
        ("standard_unpaired_preference", (NO_TEXT, {BAD: (9, [2, 3, 6, 8, 11])}, UNPAIRED, {})),
        ("standard_stepwise_supervision", (NO_TEXT, NO_RESPONSE, STEPS, {})),
        ("conversational_language_modeling", (NO_TEXT, {}, NO_PROMPT, {})),
        ("conversational_prompt_only", (NO_TEXT, NO_RESPONSE, NO_RESPONSE, {})),
        ("conversational_prompt_completion", (NO_TEXT, {}, NO_RANK, {})),
        ("conversational_preference", (NO_TEXT, NO_RESPONSE, {}, {})),
        ("conversational_implicit_prompt_preference", (NO_TEXT, NO_PROMPT, {}, {})),
        ("conversational_unpaired_preference", (NO_TEXT, {BAD: (6, [4, 8, 10, 12, 14])}, UNPAIRED, {})),
    ],
)
def test_each_of_trls_formats_is_read_as_what_it_is_and_as_nothing_else(name: str, losses: Any) -> None:
    for kind, lost in zip(("text", "demonstrations", "preferences", "prompts"), losses, strict=True):
        _, rows, kept, dropped, pairs, ties, prompts = found(Source(path=str(DATA / f"trl_formats/{name}.jsonl")), kind)
        expected = 19 - sum(count for count, _ in lost.values())
        assert (kind, rows, kept, dropped) == (kind, 19, expected, lost)
        assert (pairs, ties) == (expected if kind == "preferences" else 0, 0)
        assert prompts == (0 if kind == "text" else expected)
