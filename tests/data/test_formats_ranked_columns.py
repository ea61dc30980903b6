"""Ranking spreadsheets: one row a prompt, its answers and their ranks or scores in numbered columns."""

from pathlib import Path
from typing import Any

import pytest
from formats_world import dropped, read, user

from rlhf.data.errors import DataError
from rlhf.data.examples import Ranking
from rlhf.data.recognise import recognise
from rlhf.data.rows import read_rankings
from rlhf.data.sources import Source

Q = [user("Q")]


def table(folder: Path, text: str) -> Source:
    (folder / "ranked.csv").write_text(text)
    return Source(path=str(folder / "ranked.csv"))


def test_a_spreadsheet_of_four_answers_and_their_ranks(tmp_path: Path) -> None:
    source = table(
        tmp_path,
        "prompt,answer_1,answer_2,answer_3,answer_4,rank_1,rank_2,rank_3,rank_4\n"
        "Q,a,b,c,d,2,1,4,3\n"
        "R,a,b,,,2,1,,\n"
        "S,a,b,c, ,1,1,2, \n",
    )
    loaded = read_rankings(source)
    assert loaded.rows == [
        Ranking(Q, ["a", "b", "c", "d"], [2.0, 1.0, 4.0, 3.0]),
        Ranking([user("R")], ["a", "b"], [2.0, 1.0]),
        Ranking([user("S")], ["a", "b", "c"], [1.0, 1.0, 2.0]),
    ]
    assert (loaded.report.format, loaded.report.parts) == ("ranked_columns", {})
    assert recognise(source.path).kind == "preferences"


@pytest.mark.parametrize(
    ("answer", "rank"),
    [
        ("response_{}", "rank_{}"),
        ("responses.{}", "ranks.{}"),
        ("Answer {}", "Rank {}"),
        ("completion{}", "rank{}"),
        ("output-{}", "ranking-{}"),
        ("Candidate 0{}", "RANK_{}"),
    ],
)
def test_names_and_numbers_may_be_written_in_many_ways(answer: str, rank: str) -> None:
    for first in (0, 1):
        row = {"Prompt": "Q"} | {answer.format(n): text for n, text in enumerate("abc", first)}
        (ranking,) = read(row | {rank.format(n): value for n, value in enumerate((3, 1, 2), first)}).rows
        assert (ranking.responses, ranking.ranks) == (["a", "b", "c"], [3.0, 1.0, 2.0])


def test_letters_will_do_and_a_question_is_a_prompt() -> None:
    row = {"question": "Q", "answer_A": "x", "answer_B": "y", "rank_A": "2", "rank_B": "1"}
    assert read(row).rows == [Ranking(Q, ["x", "y"], [2.0, 1.0])]
    row = {"instruction": "Q", "input": "of 2", "output_1": "x", "output_2": "y", "rank_1": 1, "rank_2": 2}
    (ranking,) = read(row).rows
    assert ranking.prompt == [user("Q\nof 2")]


def test_of_scores_higher_is_better_and_a_comma_may_be_their_point() -> None:
    row = {"question": "Q", "answer_0": "x", "answer_1": "y", "score_0": "4,5", "score_1": 5}
    assert read(row).rows == [Ranking(Q, ["x", "y"], [2.0, 1.0], [4.5, 5.0])]
    rated = {"prompt": "Q", "answer1": "x", "answer2": "y", "rating1": 2, "rating2": 1}
    assert read(rated).rows == [Ranking(Q, ["x", "y"], [1.0, 2.0], [2.0, 1.0])]


def test_scores_beside_ranks_are_strengths() -> None:
    row: dict[str, Any] = {"prompt": "Q", "answer_1": "x", "answer_2": "y", "rank_1": 1, "rank_2": 2}
    assert read(row | {"score_1": 9, "score_2": 4}).rows == [Ranking(Q, ["x", "y"], [1.0, 2.0], [9.0, 4.0])]
    assert read(row | {"score_1": 9, "score_2": None}).rows[0].strengths is None
    assert read(row | {"score_1": "good", "score_2": 4}).rows == [Ranking(Q, ["x", "y"], [1.0, 2.0])]


def test_a_system_message_stands_before_the_question_in_whichever_column_it_is() -> None:
    row = {"answer_1": "x", "answer_2": "y", "rank_1": 1, "rank_2": 2, "system": "S"}
    for name in ("prompt", "question"):
        assert read(row | {name: "Q"}).rows[0].prompt == [{"role": "system", "content": "S"}, *Q]


def test_half_of_an_answer_is_left_out_and_counted() -> None:
    row = {"prompt": "Q", "answer_1": "x", "answer_2": "y", "answer_3": "z", "answer_4": None}
    loaded = read(row | {"rank_1": 1, "rank_2": 2, "rank_3": float("nan"), "rank_4": 3})
    assert loaded.rows == [Ranking(Q, ["x", "y"], [1.0, 2.0])]
    assert {why: part.rows for why, part in loaded.report.parts.items()} == {
        "an answer without its rank": [1], "a rank without its answer": [1],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ("Q,x,y,1,first", "row 2: a rank is not a finite number: 'first'"),
        ('Q,x,y,"1,500",2', r"row 2: a rank is not a finite number: '1,500'"),  # or is it 1.5?
        (",x,y,1,2", "row 2: empty prompt"),
        ("Q,x,,1,", "row 2: fewer than two answers"),
        ("Q,x,y,,", "row 2: no answer has a rank"),
        ("Q,x,x,1,2", "row 2: identical answers at different ranks: 'x'"),
    ],
)
def test_a_row_that_says_nothing_is_named(tmp_path: Path, cells: str, why: str) -> None:
    source = table(tmp_path, f"prompt,answer_1,answer_2,rank_1,rank_2\nP,a,b,1,2\n{cells}\n")
    with pytest.raises(DataError, match=rf"ranked\.csv {why}.*kept 1 of 2 rows"):
        read_rankings(source)


def test_a_number_is_no_answer() -> None:
    row = {"prompt": "Q", "answer_1": 4, "answer_2": "x", "rank_1": 1, "rank_2": 2}
    assert dropped(read(row)) == {"answer_1 is a number, not text": [1]}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Q", "answer_1": "x", "answer_2": "y"},
        {"prompt": "Q", "answer_1": "x", "answer_2": "y", "rank_1": 1, "rank_3": 2},
        {"answer_1": "x", "answer_2": "y", "rank_1": 1, "rank_2": 2},
        {"prompt": "Q", "answer_1": "x", "answer1": "z", "answer_2": "y", "rank_1": 1, "rank_2": 2},
        {"prompt": "Q", "answer_1": "x", "answer_2": "y", "output_1": "x", "output_2": "y", "rank_1": 1, "rank_2": 2},
    ],
)
def test_columns_that_are_not_all_there_or_leave_a_choice_are_not_guessed(row: dict[str, Any]) -> None:
    assert read(row).report.kept == 0


def test_our_own_columns_and_formats_that_need_more_come_first() -> None:
    numbered = {"answer_1": "x", "answer_2": "y", "rank_1": 2, "rank_2": 1}
    assert read({"prompt": "Q", "chosen": "a", "rejected": "b"} | numbered).rows[0].responses == ["a", "b"]
    webgpt = {"question": {"full_text": "Q"}, "answer_0": "x", "answer_1": "y", "score_0": 1, "score_1": -1}
    assert read(webgpt).report.format == "webgpt_comparisons"


def test_their_prompts_are_prompts() -> None:
    row = {"Question": "Q", "answer_1": "x", "answer_2": "y", "rank_1": 2, "rank_2": 1}
    assert [prompt.messages for prompt in read(row, kind="prompts").rows] == [Q]
