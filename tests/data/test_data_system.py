"""A column with a system message: in every kind and format, unless the source says that it is something else."""

from pathlib import Path
from typing import Any

import pytest
from formats_world import assistant, dropped, read, said, system, user

from rlhf.data.convert import convert
from rlhf.data.errors import DataError
from rlhf.data.rows import load, read_demonstrations, read_prompts, read_rankings, read_text
from rlhf.data.sources import Source

ASKED = [system("Be brief."), user("Q")]
OWN = [system("Own."), user("Q")]


def prompts(loaded: Any) -> list[Any]:
    assert loaded.report.kept == loaded.report.rows
    return [row.prompt for row in loaded.rows]


@pytest.mark.parametrize("name", ["system", "system_prompt", "System "])
@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Q", "response": "A"},
        {"prompt": [user("Q")], "completion": [assistant("A")]},
        {"prompt": "Q", "response": [user("Q"), assistant("A")]},
        {"messages": [user("Q"), assistant("A")]},
        {"instruction": "Q", "output": "A"},
        {"instruction": "Q", "response": "A"},
        {"instruction": "Q", "instances": [{"input": "", "output": "A"}]},
        {"question": "Q", "answer": "A"},
        {"input": "Q", "output": "A"},
        {"conversations": said("human: Q", "gpt: A")},
        {"prompt": "Q", "response": "A", "helpfulness": 3},
    ],
)
def test_it_stands_before_a_demonstration(write: Any, row: dict[str, Any], name: str) -> None:
    source = write(row | {name: "Be brief."})
    assert prompts(read_demonstrations(source)) == [ASKED]
    assert [prompt.messages for prompt in read_prompts(source).rows] == [ASKED]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "Q", "chosen": "A", "rejected": "B"},
        {"prompt": "Q", "chosen": [user("Q"), assistant("A")], "rejected": [user("Q"), assistant("B")]},
        {"chosen": [user("Q"), assistant("A")], "rejected": [user("Q"), assistant("B")]},
        {"prompt": "Q", "responses": ["A", "B"], "ranks": [1, 2]},
        {"prompt": "Q", "answer_1": "A", "answer_2": "B", "rank_1": 1, "rank_2": 2},
        {"instruction": "Q", "output_1": "A", "output_2": "B", "preference": 1},
        {"conversations": said("human: Q"), "chosen": "A", "rejected": "B"},
    ],
)
def test_it_stands_before_a_ranking(write: Any, row: dict[str, Any]) -> None:
    source = write(row | {"system": "Be brief."})
    assert prompts(read_rankings(source)) == [ASKED]
    assert [prompt.messages for prompt in read_prompts(source).rows] == [ASKED]


def test_a_prompt_alone_is_asked_under_it_too(write: Any) -> None:
    rows = [{"prompt": "Q"}, {"prompt": "Q", "system": "Be brief."}, {"messages": [user("Q")], "system": "Be brief."}]
    loaded = load(write(*rows), "prompts")
    assert [prompt.messages for prompt in loaded.rows] == [[user("Q")], ASKED]
    assert dropped(loaded) == {"duplicate prompt": [3]}


def test_a_transcript_keeps_its_markers_behind_it(write: Any) -> None:
    before = "\n\nHuman: Hi\n\nAssistant:"
    row = {"chosen": before + " a", "rejected": before + " b", "system": "Be brief."}
    assert prompts(read_rankings(write(row))) == [[system("Be brief."), user(before)]]


@pytest.mark.parametrize("said_of_it", [None, "", " \n", float("nan")])
def test_an_empty_one_is_none_and_the_other_column_is_looked_at(write: Any, said_of_it: Any) -> None:
    row = {"prompt": "Q", "response": "A", "system": said_of_it}
    assert prompts(read_demonstrations(write(row, row | {"system_prompt": "Be brief."}))) == [[user("Q")], ASKED]


def test_a_prompt_with_a_system_message_keeps_its_own(write: Any) -> None:
    rows = [{"messages": [*OWN, assistant("A")]}, {"prompt": OWN, "response": "A"}]
    for column in ("Be brief.", 7):
        assert prompts(read_demonstrations(write(*(row | {"system": column} for row in rows)))) == [OWN, OWN]


@pytest.mark.parametrize("kind", ["demonstrations", "preferences", "prompts"])
def test_one_that_is_no_text_is_refused_with_the_cure(write: Any, kind: str) -> None:
    row = {"prompt": "Q", "chosen": "A", "rejected": "B", "response": "A"}
    loaded = load(write(row, row | {"prompt": "R", "system": 7}), kind)
    assert loaded.report.first_bad() == (
        2,
        "system is a number, not text; if it is no system message, rename the column, or call it something else with "
        "map: {source: system} (`rlhf data`: --map source=system)",
    )


def test_a_text_takes_no_notice_of_it(write: Any) -> None:
    assert read_text(write({"text": "one", "system": 7})).rows == ["one"]


def test_a_map_finds_it_under_another_name(write: Any) -> None:
    source = write({"Frage": "Q", "Antwort": "A", "Rolle": "Be brief."})
    names = {"prompt": "Frage", "response": "Antwort"}
    mapped = source.model_copy(update={"map": names | {"system": "Rolle"}})
    assert prompts(read_demonstrations(mapped)) == [ASKED]
    assert prompts(read_demonstrations(source.model_copy(update={"map": names}))) == [[user("Q")]]
    other = write({"Frage": "Q", "Antwort": "A", "Rolle": "Be brief.", "system": "gpt-4"})
    both = other.model_copy(update={"map": names | {"system": "Rolle", "source": "system"}})
    assert prompts(read_demonstrations(both)) == [ASKED]


@pytest.mark.parametrize("column", ["system", "System", "system_prompt"])
def test_a_column_that_a_map_calls_something_else_is_none(write: Any, column: str) -> None:
    row = {"prompt": "Q", "chosen": "A", "rejected": "B", column: "gpt-4"}
    source = write(row, map={"source": column})
    [ranking] = read_rankings(source).rows
    assert (ranking.prompt, ranking.source) == ([user("Q")], "gpt-4")
    [prompt] = read_prompts(source).rows
    assert (prompt.messages, prompt.row["source"]) == ([user("Q")], "gpt-4")


@pytest.mark.parametrize("settings", [{}, {"map": {"source": "system"}}])
def test_converted_rows_read_alike(write: Any, tmp_path: Path, settings: dict[str, Any]) -> None:
    source = write({"prompt": "Q", "response": "A", "System": "Be brief.", "chosen": "x", "rejected": "y"}, **settings)
    for kind in ("demonstrations", "preferences", "prompts"):
        out = tmp_path / f"{kind}.jsonl"
        convert(source, kind, out)
        found, again = (load(one, kind).rows[0] for one in (source, Source(path=str(out))))
        if kind == "prompts":
            assert found.messages == again.messages
        else:
            assert found == again


def test_votes_under_different_ones_are_on_different_prompts() -> None:
    row = {"instruction": "Q", "output_1": "A", "output_2": "B", "preference": 1, "system": "Be brief."}
    loaded = read(row, row | {"preference": 2, "system": "Own."}, row)
    assert [(ranking.prompt, ranking.ranks) for ranking in loaded.rows] == [(ASKED, [1, 2]), (OWN, [2, 1])]


def test_a_run_is_refused_where_it_is_no_text(write: Any) -> None:
    with pytest.raises(DataError, match=r"row 1: system_prompt is a list, not text; .* map: \{source: system_prompt\}"):
        read_demonstrations(write({"prompt": "Q", "response": "A", "system_prompt": ["Be brief."]}))
