"""The JSON of `rlhf data check`."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from rlhf.data.check import check
from rlhf.data.errors import DataError
from rlhf.data.sources import Source


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(*rows: Any) -> Source:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Source(path=str(file))

    return write


def test_preferences_are_counted_as_pairs_and_ties(write: Any) -> None:
    source = write(
        {"prompt": "a", "responses": ["x", "y", "z"], "ranks": [1, 2, 2]},  # 2 pairs, 1 tie
        {"prompt": "b", "chosen": "x", "rejected": "y"},  # 1 pair
        {"prompt": "b", "chosen": "x", "rejected": "y"},  # again
        {"prompt": "c", "responses": ["x", "y", "z"], "ranks": [1, 1, 1]},  # dropped with its 3 ties
        {"prompt": "c", "chosen": "x", "rejected": "x "},
    )
    assert check(source, "preferences") == {
        "kind": "preferences",
        "format": "prompt, responses, ranks; prompt, chosen, rejected",
        "rows": 5,
        "kept": 3,
        "dropped": {
            "all answers tied": {"count": 1, "rows": [4]},
            "identical answers": {"count": 1, "rows": [5]},
        },
        "prompts": 2,
        "pairs": 4,
        "ties": 4,
        "duplicates": 1,
        "warnings": [
            "rows of 2 shapes in one source: prompt, responses, ranks; prompt, chosen, rejected",
            "1 of 5 rows are unusable; a run refuses unless max_dropped allows it",
        ],
    }


def test_prompts_are_counted_once_each(write: Any) -> None:
    found = check(write({"prompt": "a"}, {"prompt": "a "}, {"prompt": "b"}), "prompts")
    assert (found["rows"], found["kept"], found["prompts"], found["duplicates"]) == (3, 2, 2, 1)
    assert found["dropped"] == {"duplicate prompt": {"count": 1, "rows": [2]}}
    assert found["warnings"] == []


def test_prompts_may_stand_beside_what_json_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": "a", "since": date(2024, 5, 1)}, {"prompt": "b", "since": None}]
    monkeypatch.setattr("rlhf.data.rows.read_rows", lambda source: enumerate(rows, 1))
    found = check(Source(path="made:rows"), "prompts")
    assert (found["prompts"], found["duplicates"]) == (2, 0)


def test_texts_have_no_prompts(write: Any) -> None:
    found = check(write({"text": "one"}, {"text": "one"}, {"text": ""}), "text")
    assert (found["kept"], found["prompts"], found["pairs"], found["duplicates"]) == (2, 0, 0, 1)


def test_bad_rows_are_a_warning_not_an_error(write: Any) -> None:
    some = check(write({"prompt": "a", "response": "x"}, {"prompt": "b"}), "demonstrations")
    assert some["warnings"] == ["1 of 2 rows are unusable; a run refuses unless max_dropped allows it"]
    none = check(write({"prompt": "b", "answer": "x"}), "demonstrations")
    assert none["kept"] == 0
    assert none["warnings"] == [
        "nothing usable is left; row 1: empty response: no column 'response' (columns found: prompt, answer)"
    ]


def test_a_tie_is_counted_without_a_warning(write: Any) -> None:
    tied = {"prompt": "a", "responses": ["x", "y"], "ranks": [1, 1]}
    found = check(write(tied, {"prompt": "b", "chosen": "x", "rejected": "y"}), "preferences")
    assert found["dropped"] == {"all answers tied": {"count": 1, "rows": [1]}}
    assert (found["pairs"], found["ties"], found["warnings"]) == (1, 1, [])


def test_the_result_is_json(write: Any) -> None:
    found = check(write({"prompt": "a", "response": "x"}), "demonstrations")
    assert json.loads(json.dumps(found)) == found


def test_an_unknown_kind_is_refused(write: Any) -> None:
    with pytest.raises(DataError, match="'rankings'; choose from text, demonstrations, preferences, prompts"):
        check(write({"prompt": "a"}), "rankings")


def test_a_missing_source_is_still_an_error() -> None:
    with pytest.raises(DataError, match="no such file"):
        check(Source(path="gone.jsonl"), "prompts")
