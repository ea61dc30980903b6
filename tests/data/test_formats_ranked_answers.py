"""Tables of one answer a row with its rank or score: the rows of one prompt are a ranking."""

from pathlib import Path
from typing import Any

import pytest
from formats_world import answers, dropped, found, read, table, user

from rlhf.data.errors import DataError
from rlhf.data.examples import Ranking
from rlhf.data.recognise import recognise
from rlhf.data.rows import load, read_rankings
from rlhf.data.sources import Source

Q = [user("Q")]
R = [user("R")]


def test_rows_of_one_prompt_are_one_ranking_wherever_they_lie(tmp_path: Path) -> None:
    source = table(tmp_path, "prompt,response,rank\nQ,a,2\nR,x,1\n Q ,b,1\nR,y,1\nR,z,2\nQ,c,3\n")
    loaded = read_rankings(source)
    assert loaded.rows == [Ranking(Q, ["a", "b", "c"], [2, 1, 3]), Ranking(R, ["x", "y", "z"], [1, 1, 2])]
    assert (loaded.report.format, loaded.report.rows, loaded.report.kept) == ("ranked_answers", 6, 6)
    assert found(source) == ("ranked_answers", 6, 6, {}, 5, 1, 2)


def test_of_scores_higher_is_better_and_the_mean_counts() -> None:
    loaded = read(*answers("4,5", 5, 1, name="score"), {"prompt": "Q", "response": "a", "score": 6.5})
    assert loaded.rows == [Ranking(Q, ["a", "b", "c"], [1, 2, 3], [5.5, 5.0, 1.0])]
    assert loaded.report.format == "scored_answers"


def test_scores_beside_ranks_are_strengths_if_all_are_there() -> None:
    rows = [row | {"score": score} for row, score in zip(answers(2, 1), (3, 4), strict=True)]
    assert read(*rows).rows == [Ranking(Q, ["a", "b"], [2, 1], [3, 4])]
    for said in (None, "good", "4/10", True):
        assert read(rows[0], rows[1] | {"score": said}).rows == [Ranking(Q, ["a", "b"], [2, 1])]


def test_ranks_that_scores_contradict_are_warned_of() -> None:
    rows = [row | {"score": score} for row, score in zip(answers(1, 2, 3), (1, 5, 9), strict=True)]
    others = [row | {"score": score} for row, score in zip(answers(1, 2, prompt="R"), (2, 2), strict=True)]
    [warning] = read(*others, *rows).report.warnings
    assert warning == (
        "1 ranking (row 3) has a lower score or strength for an answer of better rank; ranks decide, and 1 is the "
        "best: do both mean the same?"
    )
    many = [row | {"score": row["rank"], "prompt": f"{n}"} for n in range(7) for row in answers(1, 2)]
    assert read(*many).report.warnings[0].startswith("7 rankings (rows 1, 3, 5, 7, 9, …) have a lower score or")
    assert read(*others).report.warnings == []
    own = {"prompt": "Q", "responses": ["a", "b"], "ranks": [1, 2], "strengths": [0, 1]}
    assert read(own).report.warnings[0].startswith("1 ranking (row 1) has")
    assert read(own, kind="prompts").report.warnings == []
    three = own | {"responses": ["a", "b", "c"], "ranks": [1, 2, 1]}
    assert read(three | {"strengths": [3, 2, 2]}).report.warnings == []
    assert read(three | {"strengths": [3, 2, 1]}).report.warnings != []  # c's is less than b's
    assert read(three | {"ranks": [1, 2, 2], "strengths": [2, 3, 1]}).report.warnings != []  # and here a's


@pytest.mark.parametrize(
    ("header", "ranks"),
    [
        ("Question;ANSWER;Rating", [2, 1]),
        ("query;completion;ranking", [1, 2]),
        ("instruction;output;Rank", [1, 2]),
        ("PROMPT;candidate;score ", [2, 1]),
    ],
)
def test_names_may_be_those_of_a_ranking_spreadsheet(tmp_path: Path, header: str, ranks: list[float]) -> None:
    source = table(tmp_path, f"{header}\nQ;a;1\nQ;b;2\n", "utf-16")
    assert [(one.prompt, one.responses, one.ranks) for one in read_rankings(source).rows] == [(Q, ["a", "b"], ranks)]
    assert recognise(source.path).kind == "preferences"


def test_a_parquet_table_is_read_too(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(answers(1, 2)), tmp_path / "long.parquet")
    assert read_rankings(Source(path=str(tmp_path / "long.parquet"))).rows == [Ranking(Q, ["a", "b"], [1, 2])]


def test_columns_of_other_names_can_be_mapped(tmp_path: Path) -> None:
    text = "Frage,Antwort,Rang\nQ,a,2\nQ,b,1\n"
    names = {"prompt": "Frage", "response": "Antwort", "rank": "Rang"}
    assert read_rankings(table(tmp_path, text, map=names)).rows == [Ranking(Q, ["a", "b"], [2, 1])]
    assert recognise(str(tmp_path / "long.csv"), names).kind == "preferences"
    source = table(tmp_path, text.replace("Rang", "score"), map={"prompt": "Frage", "response": "Antwort"})
    assert read_rankings(source).rows[0].ranks == [1, 2]


def test_a_prompt_with_one_answer_is_dropped_and_counted() -> None:
    loaded = read(*answers(1, 2), *answers(1, prompt="R"))
    assert (len(loaded.rows), dropped(loaded)) == (1, {"fewer than two answers": [3]})


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ("Q,c,", "row 3: an answer without its rank: rank is empty"),
        ("Q,c,best", "row 3: a rank is not a finite number: 'best'"),
        ("Q,c,nan", "row 3: a rank is not a finite number"),
        ("Q,,3", "row 3: empty response"),
        (",c,3", "row 3: empty prompt; each answer needs its prompt in its own row"),
        ("S,c,3", "row 3: fewer than two answers: no other usable row has its prompt"),
    ],
)
def test_a_row_that_says_nothing_is_named_and_the_others_are_a_ranking(tmp_path: Path, cells: str, why: str) -> None:
    source = table(tmp_path, f"prompt,response,rank\nQ,a,2\nQ,b,1\n{cells}\n")
    with pytest.raises(DataError, match=rf"long\.csv {why}.*kept 2 of 3 rows"):
        read_rankings(source)
    assert read_rankings(source, max_dropped=0.5).rows == [Ranking(Q, ["a", "b"], [2, 1])]


def test_one_answer_at_two_ranks_costs_its_prompt_and_both_rows_are_named(tmp_path: Path) -> None:
    source = table(tmp_path, "prompt,response,rank\nR,x,1\nQ,a,2\nQ,b,1\nR,y,2\nQ,a ,1\n")
    with pytest.raises(DataError, match=r"row 2: identical answers at different ranks: 'a' in rows 2 and 5; give it"):
        read_rankings(source)
    assert found(source)[3] == {"identical answers": (3, [2, 3, 5])}


def test_one_answer_twice_at_one_rank_counts_once() -> None:
    assert read(*answers(1, 2), *answers(1)).rows == [Ranking(Q, ["a", "b"], [1, 2])]


def test_of_an_answer_twice_at_one_rank_the_mean_score_is_its_strength() -> None:
    rows = [row | {"score": score} for row, score in zip(answers(1, 2), (5, 1), strict=True)]
    again = rows[0] | {"score": 8}
    assert read(*rows, again).rows == [Ranking(Q, ["a", "b"], [1, 2], [6.5, 1])]
    assert read(*rows, again | {"score": None}).rows == [Ranking(Q, ["a", "b"], [1, 2])]


def test_as_demonstrations_all_are_read_with_a_warning() -> None:
    loaded = read(*answers(1, 2), kind="demonstrations")
    assert len(loaded.rows) == 2
    [warning] = loaded.report.warnings
    assert warning == loaded.report.judged
    assert warning.startswith("each row has one answer and how good it is (ranked_answers): all are learned from, bad")
    rated = {"prompt": "Q", "response": "a", "helpfulness": 1}
    assert "(helpsteer_ratings)" in read(rated, kind="demonstrations").report.warnings[0]
    assert read({"prompt": "Q", "response": "a"}, kind="demonstrations").report.warnings == []


def test_answers_that_nothing_is_compared_with_stay_demonstrations(tmp_path: Path) -> None:
    source = table(tmp_path, "prompt,response,score\nQ,a,2\nR,b,1\nS,c,3\n")
    told = recognise(source.path)
    assert (told.kind, len(told.warnings)) == ("demonstrations", 1)
    assert told.reasons["preferences"] == "row 1: fewer than two answers: no other usable row has its prompt"


def test_columns_that_leave_a_choice_are_not_guessed() -> None:
    row = {"question": "Q", "answer": "gold", "output": "a", "score": 1}
    assert read(row, row | {"output": "b", "score": 2}).rows == []
    [ranking] = read(*(row | {"response": text, "score": n} for n, text in enumerate("xy"))).rows
    assert ranking.responses == ["x", "y"]  # as among demonstrations


def test_other_formats_and_our_own_columns_come_first() -> None:
    pair = {"prompt": "Q", "chosen": "a", "rejected": "b", "response": "c", "score": 1}
    assert read(pair).report.format == "prompt, chosen, rejected"
    numbered = {"answer_1": "x", "answer_2": "y", "rank_1": 2, "rank_2": 1}
    for more in ({"response": "c", "score": 1}, {"answer": "c", "rank": 1}):
        loaded = read({"prompt": "Q"} | numbered | more)
        assert (loaded.report.format, loaded.rows) == ("ranked_columns", [Ranking(Q, ["x", "y"], [2, 1])])
    rated = {"prompt": "Q", "response": "a", "helpfulness": 1, "score": 5}
    assert read(rated, rated | {"response": "b", "helpfulness": 2}).report.format == "helpsteer_ratings"


@pytest.mark.parametrize("said", [{"format": "scored_answers"}, {"map": {"response": "response", "score": "score"}}])
def test_one_answer_a_row_beside_numbered_ones_is_read_where_the_source_says_so(
    tmp_path: Path, said: dict[str, Any]
) -> None:
    text = "prompt,answer_1,answer_2,rank_1,rank_2,response,score\nQ,x,y,1,2,a,4\nQ,x,y,1,2,b,5\n"
    assert read_rankings(table(tmp_path, text, **said)).rows == [Ranking(Q, ["a", "b"], [2, 1], [4, 5])]


def test_their_prompts_are_prompts(tmp_path: Path) -> None:
    source = table(tmp_path, "query,candidate,rank\nQ,a,1\nQ,b,2\nR,a,no\nS,,\n")
    loaded = load(source, "prompts")
    assert [prompt.messages for prompt in loaded.rows] == [Q, R, [user("S")]]
    assert dropped(loaded) == {"duplicate prompt": [2]}
    for format in ("ranked_answers", "scored_answers"):
        source = table(tmp_path, f"instruction,candidate,{'rank' if format < 's' else 'score'}\nQ,a,1\n", format=format)
        assert [prompt.messages for prompt in load(source, "prompts").rows] == [Q]


def test_scores_whose_mean_is_no_number_cost_their_prompt() -> None:
    huge = [*answers(1e308, 1, name="score"), *answers(1e308, name="score")]
    assert dropped(read(*huge)) == {"a score is not a finite number": [1, 2, 3]}
    ranked = [row | {"rank": rank} for row, rank in zip(huge, (1, 2, 1), strict=True)]
    assert read(*ranked).rows == [Ranking(Q, ["a", "b"], [1, 2])]


@pytest.mark.parametrize("name", ["rank", "score"])
def test_beside_ranks_and_scores_a_label_does_not_matter(name: str) -> None:
    rows = [row | {"label": label} for row, label in zip(answers(1, 2, 3, name=name), (None, True, False), strict=True)]
    loaded = read(*rows)
    assert [ranking.responses for ranking in loaded.rows] == [["a", "b", "c"]]
    assert dropped(loaded) == {}


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("names", [("prompt", "response"), ("question", "answer"), ("prompt", "completion")])
def test_an_answer_without_the_column_of_its_rank_is_named_wherever_it_stands(
    tmp_path: Path, place: int, names: tuple[str, str]
) -> None:
    rows: list[dict[str, Any]] = [dict(zip(names, ("Q", text), strict=True)) for text in "abc"]
    for rank, row in enumerate(row for row in rows if row is not rows[place]):
        row["rank"] = rank
    loaded = read(*rows)
    assert [ranking.ranks for ranking in loaded.rows] == [[0, 1]]
    why = f"an answer without its rank or score (columns found: {', '.join(names)})"
    assert loaded.report.first_bad() == (place + 1, why)
    pair = {"prompt": "Q", "chosen": "x", "rejected": "y", "response": "z"}
    assert len(read(*answers(1, 2), pair).rows) == 2


def test_answers_of_which_none_has_a_rank_are_told_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read_rankings(table(tmp_path, "prompt,response\nQ,a\nQ,b\n"))
    assert str(caught.value).partition("long.csv ")[2] == (
        "row 1: an answer without its rank or score (columns found: prompt, response); preferences need prompt, chosen "
        "and rejected, or prompt, responses and ranks, or prompt, response_a, response_b and winner, or of one answer "
        "a row prompt, response and rank (or score); name yours with map: {prompt: YOURS} "
        "(`rlhf data`: --map prompt=YOURS). "
        "Nothing usable is left: kept 0 of 2 rows"
    )
