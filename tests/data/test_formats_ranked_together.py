"""Which answers of a table of one answer a row are to the same prompt, and what makes another prompt."""

from pathlib import Path
from typing import Any

import pytest
from formats_world import answers, dropped, read, system, table, user

from rlhf.data.errors import DataError
from rlhf.data.examples import Ranking
from rlhf.data.formats import MOST_ANSWERS
from rlhf.data.recognise import recognise
from rlhf.data.rows import read_rankings

Q = [user("Q")]
R = [user("R")]


@pytest.mark.parametrize("name", ["rank", "score", "helpfulness"])
def test_answers_that_were_offered_different_tools_are_of_different_prompts(name: str) -> None:
    rows = [row | {"tools": [{"name": f"t{n % 2}"}]} for n, row in enumerate(answers(1, 2, 3, 4, name=name))]
    loaded = read(*rows)
    assert [ranking.responses for ranking in loaded.rows] == [["a", "c"], ["b", "d"]]
    assert [ranking.prompt for ranking in loaded.rows] == [
        [system(f'Tools:\n{{"name": "t{n}"}}'), *Q] for n in range(2)
    ]
    assert list(dropped(read(*rows[:2]))) == ["fewer than two answers"]
    assert dropped(read(*answers(1, 2, name=name), rows[2] | {"tools": "[{"})) == {"tools is broken JSON": [3]}


@pytest.mark.parametrize(
    ("row", "name", "first"),
    [
        ({"prompt": "Q"}, "system", "system"),
        ({"question": "Q"}, "system", "system"),
        ({"question": "Q"}, "system_prompt", "system"),
        ({"instruction": "Q"}, "history", "user"),
    ],
)
def test_what_stands_before_the_question_tells_prompts_apart(row: dict[str, Any], name: str, first: str) -> None:
    said = [[["s0", "A"]], [["s1", "A"]]] if name == "history" else ["s0", "s1"]
    rows = [row | {"response": "abcd"[n], "rank": n, name: said[n % 2]} for n in range(4)]
    loaded = read(*rows)
    assert [ranking.responses for ranking in loaded.rows] == [["a", "c"], ["b", "d"]]
    assert [ranking.prompt[0] for ranking in loaded.rows] == [{"role": first, "content": f"s{n}"} for n in range(2)]
    assert all(ranking.prompt[-1:] == Q for ranking in loaded.rows)


def test_so_many_answers_to_one_prompt_are_refused_and_the_prompt_is_named(tmp_path: Path) -> None:
    def rows(num: int) -> str:
        return "instruction,text,output,score\n" + "".join(f"Sum up,doc {n // 2},answer {n},{n}\n" for n in range(num))

    assert len(read_rankings(table(tmp_path, rows(MOST_ANSWERS))).rows[0].ranks) == MOST_ANSWERS
    many = table(tmp_path, rows(MOST_ANSWERS + 2))
    why = (
        r"row 1: more than 1000 answers to one prompt: 1002 to 'Sum up'; does another column tell the prompts apart\? "
        r"map: \{prompt: YOURS\}"
    )
    with pytest.raises(DataError, match=why):
        read_rankings(many)
    mapped = table(tmp_path, rows(MOST_ANSWERS + 2), map={"prompt": "text", "response": "output"})
    assert len(read_rankings(mapped).rows) == MOST_ANSWERS // 2 + 1


def test_many_verdicts_on_few_answers_are_not_many_answers() -> None:
    loaded = read(*answers(1, 2, name="score") * (MOST_ANSWERS // 2 + 1))
    assert [ranking.ranks for ranking in loaded.rows] == [[2, 1]]


@pytest.mark.parametrize("said", ["rank", "score", "helpfulness"])
@pytest.mark.parametrize("column", ["system", "System", "system_prompt"])
def test_a_models_name_under_system_is_told_from_a_system_message(tmp_path: Path, said: str, column: str) -> None:
    rows = [row | {column: name} for row, name in zip(answers(1, 2, name=said), ("gpt-4", "llama-7b"), strict=True)]
    loaded = read({"prompt": "R", "response": "x", said: 1}, *rows)
    name = column.lower()
    assert loaded.rows == []
    assert dropped(loaded) == {"fewer than two answers": [1], "fewer than two answers under one system message": [2, 3]}
    assert loaded.report.dropped["fewer than two answers under one system message"].detail == (
        f": row 3 has its prompt under another one; if {name!r} names the model that answered, rename the column, or "
        f"call it something else with map: {{source: {name}}} (`rlhf data`: --map source={name})"
    )


def test_the_cure_for_a_models_name_under_system_is_one(tmp_path: Path) -> None:
    text = "prompt,response,rank,system\nQ,a,2,gpt-4\nR,x,1,gpt-4\nQ,b,1,llama-7b\nR,y,2,llama-7b\n"
    with pytest.raises(DataError, match=r"row 1: .*: row 3 has its prompt .* map: \{source: system\}.*kept 0 of 4"):
        read_rankings(table(tmp_path, text))
    cured = [Ranking(Q, ["a", "b"], [2, 1]), Ranking(R, ["x", "y"], [1, 2])]
    assert read_rankings(table(tmp_path, text, map={"source": "system"})).rows == cured
    assert read_rankings(table(tmp_path, text.replace("system", "model"))).rows == cured
    told = recognise(str(tmp_path / "long.csv"))
    assert (told.kind, told.rows) == ("preferences", 4)


def test_only_answers_that_stand_alone_are_told_of_other_system_messages() -> None:
    rows = [row | {"system": name} for row, name in zip(answers(1, 2, 3), ("s", "s", "t"), strict=True)]
    loaded = read(*rows, {"prompt": "Q", "response": "d", "rank": 4})
    assert [ranking.responses for ranking in loaded.rows] == [["a", "b"]]
    assert dropped(loaded) == {"fewer than two answers under one system message": [3, 4]}
    others = [row | {"tools": [{"name": f"t{n}"}], "system": "s"} for n, row in enumerate(answers(1, 2))]
    assert dropped(read(*others)) == {"fewer than two answers": [1, 2]}  # under one, but offered other tools


@pytest.mark.parametrize("name", ["rank", "score"])
def test_a_ranking_has_the_source_that_all_its_rows_name(name: str) -> None:
    rows = [row | {"source": "forum"} for row in answers(1, 2, name=name)]
    assert [ranking.source for ranking in read(*rows).rows] == ["forum"]
    assert [ranking.source for ranking in read(rows[0], rows[1] | {"source": "wiki"}).rows] == [""]
