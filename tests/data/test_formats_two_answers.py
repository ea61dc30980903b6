"""Tables of comparisons (A/B): two answers side by side, and which of them won."""

from pathlib import Path
from typing import Any

import pytest
from formats_world import dropped, read, table, user

from rlhf.data.errors import DataError
from rlhf.data.examples import Ranking
from rlhf.data.recognise import recognise
from rlhf.data.rows import load, read_prompts, read_rankings
from rlhf.data.sources import Source

Q = [user("Q")]
FIRST, SECOND, TIE = [1, 2], [2, 1], [1, 1]
UNCLEAR = "numbers of winners can be read in several ways"


def votes(*winners: Any, names: tuple[str, str] = ("answer_a", "answer_b"), verdict: str = "winner") -> Any:
    """Ranks that rows with these winners give; ties are kept."""
    rows = ({"prompt": f"Q{n}", names[0]: "x", names[1]: "y", verdict: said} for n, said in enumerate(winners))
    return [ranking.ranks for ranking in read(*rows, keep_ties=True).rows]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("answer_a", "answer_b"),
        ("response_a", "response_b"),
        ("completion_a", "completion_b"),
        ("Output A", "Output B"),
        ("response_1", "response_2"),
        ("output_1", "output_2"),
        ("completion1", "completion2"),
        ("answer_0", "answer_1"),
    ],
)
def test_the_usual_names_of_two_answers_are_known_and_their_own_names_win(first: str, second: str) -> None:
    marks = first[-1], second[-1]
    assert votes(first, second.upper(), *marks, names=(first, second)) == [FIRST, SECOND, FIRST, SECOND]


@pytest.mark.parametrize("verdict", ["winner", "Preferred", "preference", "better", "choice"])
def test_the_verdict_may_have_several_names(verdict: str) -> None:
    assert votes("a", "B ", "tie", verdict=verdict) == [FIRST, SECOND, TIE]


def test_a_table_of_comparisons_is_preferences_and_its_prompts_are_prompts(tmp_path: Path) -> None:
    source = table(tmp_path, "question,answer_a,answer_b,winner\nQ,x,y,B\nR,x,y,a\nS,x,y,\nT,x,y,both\nU,x,,a\n")
    assert recognise(source.path).kind == "preferences"
    loaded = load(source, "preferences")
    assert loaded.report.format == "two_answers"
    assert loaded.rows == [Ranking(Q, ["x", "y"], [2, 1]), Ranking([user("R")], ["x", "y"], [1, 2])]
    assert dropped(loaded) == {"nobody judged it": [3], "all answers tied": [4], "empty response": [5]}
    assert [row.messages[0]["content"] for row in read_prompts(source).rows] == list("QRSTU")


def test_ties_and_the_arenas_words_are_understood_in_any_case() -> None:
    assert votes("model_a", "Model_B", "Response A", "answer b") == [FIRST, SECOND, FIRST, SECOND]
    assert votes("Tie", "both", "tie (bothbad)", "both_bad", "neither", "DRAW", "equal") == [TIE] * 7


@pytest.mark.parametrize("said", ["c", "model_c", "model_1", "gpt-4", True, [1], "prompt_a"])
def test_a_winner_that_is_neither_answer_is_told_with_what_is_known(said: Any) -> None:
    loaded = read({"prompt": "Q", "answer_a": "x", "answer_b": "y", "winner": said})
    why = loaded.report.dropped["unknown winner"].detail
    assert why.endswith("; known are a, b and tie")


@pytest.mark.parametrize(
    ("names", "winners"),
    [
        (("answer_a", "answer_b"), (1, "2", 1.0)),
        (("response_1", "response_2"), (1, "2.0", "1")),
        (("response_0", "response_1"), (0, "1", "0")),
    ],
)
def test_numbers_that_can_mean_one_thing_alone_are_winners(names: tuple[str, str], winners: tuple[Any, ...]) -> None:
    assert votes(*winners, names=names) == [FIRST, SECOND, FIRST]


@pytest.mark.parametrize(
    ("names", "winners", "why"),
    [
        (("answer_a", "answer_b"), (0, 1), "winner is 0 or 1 beside answer_a and answer_b; write a, b or tie"),
        (("answer_a", "answer_b"), (1, 1), "winner is 1 beside answer_a and answer_b; write a, b or tie"),
        (("response_1", "response_2"), (1, 0), "winner is 0 or 1 beside response_1 and response_2; write 1, 2 or tie"),
        (("response_0", "response_1"), (1, 2), "winner is 1 or 2 beside response_0 and response_1; write 0, 1 or tie"),
        (("output_1", "output_2"), (1, -3), "winner is -3 or 1 beside output_1 and output_2; write 1, 2 or tie"),
    ],
)
def test_numbers_that_could_mean_either_answer_are_all_refused_with_the_cure(
    names: tuple[str, str], winners: tuple[Any, ...], why: str
) -> None:
    rows = [{"prompt": "Q", names[0]: "x", names[1]: "y", "winner": said} for said in (*winners, names[0])]
    loaded = read(*rows)
    assert dropped(loaded) == {UNCLEAR: [1, 2]}
    assert loaded.report.dropped[UNCLEAR].detail == f": {why}"
    assert [ranking.ranks for ranking in loaded.rows] == [FIRST]  # its name says it


def test_columns_of_any_names_can_be_mapped(tmp_path: Path) -> None:
    text = "Frage,links,rechts,Sieger\nQ,x,y,2\nR,x,y,1\n"
    names = {"prompt": "Frage", "response_a": "links", "response_b": "rechts", "winner": "Sieger"}
    source = table(tmp_path, text, map=names)
    rows = read_rankings(source).rows
    assert [(row.responses, row.ranks) for row in rows] == [(["x", "y"], SECOND), (["x", "y"], FIRST)]
    assert len(read_prompts(source).rows) == 2
    assert recognise(source.path, names).kind == "preferences"


@pytest.mark.parametrize("names", [("answer_1", "answer_2"), ("response_1", "response_2")])
def test_a_map_may_name_one_column_or_all_of_them(tmp_path: Path, names: tuple[str, str]) -> None:
    text = f"question,{','.join(names)},best\nQ,x,y,2\nR,x,y,1\n"
    source = table(tmp_path, text, map={"winner": "best"})
    assert [row.ranks for row in read_rankings(source).rows] == [SECOND, FIRST]
    assert [row.messages for row in read_prompts(source).rows] == [Q, [user("R")]]
    swapped = {"winner": "best", "response_a": names[1], "response_b": names[0]}
    rows = read_rankings(table(tmp_path, text, map=swapped)).rows
    assert [(row.responses, row.ranks) for row in rows] == [(["y", "x"], SECOND), (["y", "x"], FIRST)]


def test_two_answers_without_a_winner_are_told_how_to_name_it(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_rankings(table(tmp_path, "prompt,answer_a,answer_b,best\nQ,x,y,a\n"))
    assert str(caught.value).partition("long.csv ")[2] == (
        "row 1: answers without a winner: no column says which of answer_a, answer_b is better; name the one that does "
        "(a, b or tie) with map: {winner: YOURS} (`rlhf data`: --map winner=YOURS). "
        "Nothing usable is left: kept 0 of 1 rows"
    )


@pytest.mark.parametrize("winner", [{}, {"winner": "a"}])
def test_more_answers_than_two_need_ranks(winner: dict[str, str]) -> None:
    loaded = read({"prompt": "Q", "answer_a": "x", "answer_b": "y", "answer_c": "z"} | winner)
    assert loaded.report.first_bad() == (
        1, "answers without their ranks: answer_a, answer_b, answer_c need rank_a, rank_b, rank_c (1 is the best), or "
        "score_a, score_b, score_c",
    )  # fmt: skip


def test_two_pairs_leave_a_choice_unless_one_has_the_names_that_a_map_has() -> None:
    pairs = {"answer_a": "x", "answer_b": "y", "output_a": "x", "output_b": "y", "winner": "a", "prompt": "Q"}
    assert read(pairs).rows == []
    assert read(pairs | {"response_a": "v", "response_b": "w"}).rows == [Ranking(Q, ["v", "w"], [1, 2])]


def test_scores_say_more_than_a_winner_and_formats_of_others_come_first() -> None:
    row = {"prompt": "Q", "answer_a": "x", "answer_b": "y", "winner": "b", "score_a": 1, "score_b": 5}
    assert read(row).rows == [Ranking(Q, ["x", "y"], [2, 1], [1, 5])]
    votes = {"instruction": "Q", "output_1": "x", "output_2": "y", "preference": 1}
    assert read(votes).report.format == "alpaca_votes"
    assert read({"prompt": "Q", "chosen": "x", "rejected": "y"} | row).rows == [Ranking(Q, ["x", "y"], [1, 2])]


def test_a_system_message_and_a_source_belong_to_the_ranking() -> None:
    row = {"prompt": "Q", "answer_a": "x", "answer_b": "y", "winner": "a", "system": "S", "source": "forum"}
    [ranking] = read(row).rows
    assert (ranking.prompt[0], ranking.source) == ({"role": "system", "content": "S"}, "forum")


def test_answers_beside_prompts_that_are_not_read_are_warned_of(tmp_path: Path) -> None:
    told = recognise(table(tmp_path, "prompt,answer_a,Answer_B,best\nQ,x,y,a\n").path)
    assert (told.kind, told.almost["preferences"]) == ("prompts", told.reasons["preferences"])
    [warning] = told.warnings
    assert warning.startswith(
        "only prompts are read of it, though answer_a, Answer_B look like answers; as preferences row 1: answers "
        "without a winner"
    )
    told = recognise(table(tmp_path, "prompt,Answer\nQ,x\n").path)
    [warning] = told.warnings
    assert warning.endswith(told.almost["demonstrations"])
    assert "though Answer looks like an answer; as demonstrations row 1: empty response" in warning
    assert warning.endswith("; map: {response: Answer} (`rlhf data`: --map response=Answer)")
    assert recognise(table(tmp_path, "prompt,topic\nQ,x\n").path).warnings == []


def test_the_answers_of_a_source_with_a_format_are_read_by_it(tmp_path: Path) -> None:
    text = "prompt,answer_a,answer_b,winner,response,score\nQ,x,y,a,v,1\nQ,x,y,b,w,2\n"
    with pytest.raises(DataError, match="format: scored_answers or two_answers"):
        read_rankings(table(tmp_path, text))
    source = Source(path=str(tmp_path / "long.csv"), format="two_answers")
    assert [row.ranks for row in read_rankings(source).rows] == [FIRST, SECOND]
