"""Lists in the cells of a table, which are JSON."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from formats_world import user

from rlhf.data.errors import DataError
from rlhf.data.examples import Demonstration, Ranking
from rlhf.data.rows import load, read_rankings
from rlhf.data.sources import Source


def table(folder: Path, *rows: dict[str, Any], **settings: Any) -> Source:
    with (folder / "lists.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return Source(path=str(folder / "lists.csv"), **settings)


def test_answers_and_ranks_may_be_lists_in_cells(tmp_path: Path) -> None:
    row = {"prompt": "Q", "Responses": json.dumps(['a "b", c', "[1]"]), "ranks": " [2, 1]", "strengths": "[0.5, 3]"}
    source = table(tmp_path, row, row | {"strengths": " "})
    assert read_rankings(source).rows == [
        Ranking([user("Q")], ['a "b", c', "[1]"], [2, 1], [0.5, 3]),
        Ranking([user("Q")], ['a "b", c', "[1]"], [2, 1]),
    ]


def test_mapped_columns_and_conversations_may_be_lists_in_cells(tmp_path: Path) -> None:
    names = {"responses": "Antworten", "ranks": "Rang"}
    source = table(tmp_path, {"prompt": "Q", "Antworten": '["a", "b"]', "Rang": "[1, 2]"}, map=names)
    assert read_rankings(source).rows == [Ranking([user("Q")], ["a", "b"], [1, 2])]
    said = json.dumps([{"from": "human", "value": "Q"}, {"from": "gpt", "value": "a"}])
    for name in ("messages", "conversations"):
        assert load(table(tmp_path, {name: said}), "demonstrations").rows == [Demonstration([user("Q")], "a")]


@pytest.mark.parametrize(
    ("responses", "ranks", "why"),
    [
        (
            "['a', 'b']",
            "[1, 2]",
            r"responses is broken JSON, column 2: Expecting value; in a table's cell it is JSON, such as \[\"a",
        ),
        ('["a", "b"', "[1, 2]", "responses is broken JSON, column 10: Expecting ',' delimiter"),
        ('["a", "b"]', "1, 2", r"ranks is text, not a list; in a table's cell it is JSON, such as \[1, 2\]"),
        ("a; b", "[1, 2]", "responses is text, not a list; in a table's cell it is JSON"),
        ('["a", "b"]', "[1]", "responses and ranks differ in length: 2 and 1"),
        ('["a", "b"]', '["first", 2]', "a rank is not a finite number: 'first'"),
        ("[" * 100_000, "[1]", "responses is JSON nested too deeply"),
    ],
)
def test_a_cell_that_holds_no_list_is_named_with_the_cure(tmp_path: Path, responses: str, ranks: str, why: str) -> None:
    good = {"prompt": "P", "responses": '["a", "b"]', "ranks": "[1, 2]"}
    source = table(tmp_path, good, {"prompt": "Q", "responses": responses, "ranks": ranks})
    with pytest.raises(DataError, match=rf"lists\.csv row 2: {why}"):
        read_rankings(source)


@pytest.mark.parametrize("kind", ["demonstrations", "prompts"])
@pytest.mark.parametrize("name", ["messages", "conversations", "conversation"])
@pytest.mark.parametrize(
    ("cell", "why"),
    [
        ("[{'role': 'user'}]", "is broken JSON, column 3: Expecting property name enclosed in double quotes; in a"),
        ("user: Hi", "is text, not a list of messages; in a table's cell it is JSON"),
    ],
)
def test_a_conversation_that_is_no_list_is_named_with_the_cure(
    tmp_path: Path, kind: str, name: str, cell: str, why: str
) -> None:
    source = table(tmp_path, {name: cell})
    report = load(source, kind).report
    [(reason, drop)] = report.dropped.items()
    assert f"{name} {why}" in reason + drop.detail
    assert 'such as [{"role": "user", "content": "Hi"}, ' in drop.detail


def test_broken_lists_of_others_formats_say_where(tmp_path: Path) -> None:
    for kind, name in (("demonstrations", "instances"), ("preferences", "completions")):
        report = load(table(tmp_path, {"instruction": "Q", name: '[{"output": }]'}), kind).report
        assert list(report.dropped) == [f"{name} is broken JSON"]
        assert ", column 13: Expecting value" in report.dropped[f"{name} is broken JSON"].detail


def test_texts_that_look_like_lists_stay_texts(tmp_path: Path) -> None:
    source = table(tmp_path, {"prompt": "[1, 2]", "response": '["a"]'})
    assert load(source, "demonstrations").rows == [Demonstration([user("[1, 2]")], '["a"]')]


def test_a_broken_list_matters_to_those_alone_who_read_it(tmp_path: Path) -> None:
    source = table(tmp_path, {"prompt": "Q", "response": "a", "responses": "[a", "ranks": "[1"})
    assert load(source, "demonstrations").rows == [Demonstration([user("Q")], "a")]
    assert [prompt.messages for prompt in load(source, "prompts").rows] == [[user("Q")]]
