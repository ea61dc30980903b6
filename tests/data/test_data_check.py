"""The JSON of `rlhf data check`."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from rlhf.data.check import check
from rlhf.data.errors import DataError, SettingsError
from rlhf.data.examples import Demonstration
from rlhf.data.formats import Format
from rlhf.data.messages import Unusable
from rlhf.data.sources import Source


@pytest.fixture
def words(tmp_path: Path) -> str:
    """A folder with a tokenizer whose tokens are words; what else its file asks for must not count."""
    tokenizer = Tokenizer(WordLevel({"?": 0}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=30)
    folder = tmp_path / "model"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


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
        "parts": {},
        "details": {"identical answers": " at different ranks: 'x'"},
        "contradictions": {"count": 0, "rows": []},
        "longer_wins": 0.5,  # all answers are of one length
        "lengths": None,
        "shared_prompts": None,
        "samples": [
            {"row": 1, "prompt": "a", "responses": ["x", "y", "z"], "ranks": [1, 2, 2]},
            {"row": 2, "prompt": "b", "responses": ["x", "y"], "ranks": [1, 2]},
            {"row": 3, "prompt": "b", "responses": ["x", "y"], "ranks": [1, 2]},
        ],
    }


def test_prompts_are_counted_once_each(write: Any) -> None:
    found = check(write({"prompt": "a"}, {"prompt": "a "}, {"prompt": "b"}), "prompts")
    assert (found["rows"], found["kept"], found["prompts"], found["duplicates"]) == (3, 2, 2, 1)
    assert found["dropped"] == {"duplicate prompt": {"count": 1, "rows": [2]}}
    assert found["warnings"] == []


def test_prompts_may_stand_beside_what_json_cannot_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": "a", "since": date(2024, 5, 1)}, {"prompt": "b", "since": None}]
    monkeypatch.setattr("rlhf.data.rows.read_rows", lambda source, files: enumerate(rows, 1))
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
        "nothing usable is left; row 1: empty response: no column 'response' (columns found: prompt, answer); "
        "demonstrations need prompt and response, or messages; name yours with map: {prompt: YOURS} "
        "(`rlhf data`: --map prompt=YOURS)"
    ]


def test_a_tie_is_counted_without_a_warning(write: Any) -> None:
    tied = {"prompt": "a", "responses": ["x", "y"], "ranks": [1, 1]}
    found = check(write(tied, {"prompt": "b", "chosen": "x", "rejected": "y"}), "preferences")
    assert found["dropped"] == {"all answers tied": {"count": 1, "rows": [1]}}
    assert (found["pairs"], found["ties"], found["warnings"]) == (1, 1, [])


def test_a_contradiction_is_a_pair_of_answers_ranked_both_ways(write: Any) -> None:
    source = write(
        {"prompt": "a", "responses": ["x", "y", "z"], "ranks": [1, 2, 3]},
        {"prompt": "b", "chosen": "y", "rejected": "x"},  # another prompt
        {"prompt": "a", "chosen": "x", "rejected": "z"},  # agrees
        {"prompt": "a ", "responses": ["z", "y ", "x"], "ranks": [1, 1, 2]},  # z > x and y > x, both against row 1
        {"prompt": "a", "chosen": "y", "rejected": "x"},  # against row 1 once more
        {"prompt": "b", "chosen": "x", "rejected": "y"},
    )
    assert check(source, "preferences")["contradictions"] == {"count": 3, "rows": [[1, 4], [1, 4], [2, 6]]}


def test_longer_wins_is_the_share_of_pairs_whose_better_answer_is_longer(write: Any) -> None:
    source = write(
        {"prompt": "a", "responses": ["two words", "one", "ten"], "ranks": [1, 2, 3]},  # yes, yes, as long
        {"prompt": "b", "chosen": "no", "rejected": "oh no"},  # no
        {"prompt": "c", "responses": ["x", "xx", "xxx"], "ranks": [3, 1, 1]},  # yes, yes; a tie is no pair
    )
    assert check(source, "preferences")["longer_wins"] == pytest.approx(4.5 / 6)
    assert check(write({"prompt": "a"}), "prompts")["longer_wins"] is None


def test_what_was_left_out_of_kept_rows_is_told(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(row: dict[str, Any]) -> list[Any]:
        return [Demonstration([{"role": "user", "content": "q"}], "r"), Unusable("a turn is deleted", ": turn 2")]

    tree = Format("tree", "demonstrations", ("turns",), read)
    monkeypatch.setattr("rlhf.data.formats.find", lambda *_: tree)
    found = check(write({"turns": 1}, {"turns": 2}), "demonstrations")
    assert (found["kept"], found["dropped"], found["duplicates"]) == (2, {}, 1)
    assert found["parts"] == {"a turn is deleted": {"count": 2, "rows": [1, 2]}}
    assert found["details"] == {"a turn is deleted": ": turn 2"}


def test_prompts_of_another_set_are_found_whatever_its_kind(write: Any, tmp_path: Path) -> None:
    source = write(
        {"prompt": "a", "response": "x"},
        {"prompt": "b", "response": "x"},
        {"prompt": "b", "response": "y"},  # once is enough
        {"prompt": [{"role": "user", "content": "c"}], "response": "x"},
    )
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": " b"}\n{"prompt": "c\\n"}\n{"prompt": "d"}\n{"prompt": ""}\n')
    against = Source(path=str(other))
    found = check(source, "demonstrations", against=against, against_kind="prompts")
    assert found["shared_prompts"] == {"count": 2, "rows": [2, 4]}
    with pytest.raises(DataError, match="no prompts to compare with, read as demonstrations; row 1: empty response"):
        check(source, "demonstrations", against=against)
    with pytest.raises(SettingsError, match="text has no prompts"):
        check(source, "demonstrations", against=against, against_kind="text")


def test_lengths_are_counted_in_tokens_of_the_texts_alone(write: Any, words: str) -> None:
    source = write(*({"prompt": "a b", "response": " ".join(["c"] * n)} for n in [1, *[16] * 8, 40]))
    found = check(source, "demonstrations", tokenizer=words)
    assert found["lengths"] == {
        "prompt": {"min": 2, "p50": 2, "p90": 2, "p99": 2, "max": 2, "buckets": [{"to": 16, "count": 10}]},
        "response": {
            "min": 1,
            "p50": 16,
            "p90": 16,
            "p99": 40,
            "max": 40,
            "buckets": [{"to": 16, "count": 9}, {"to": 32, "count": 0}, {"to": 64, "count": 1}],
        },
    }
    assert check(write({"text": "a <|end|> b"}), "text", tokenizer=words)["lengths"]["text"]["max"] == 5  # <|, end, |>
    assert check(write({"prompt": ""}), "prompts", tokenizer=words)["lengths"] == {}


def test_longer_wins_counts_tokens_where_there_is_a_tokenizer(write: Any, words: str) -> None:
    source = write({"prompt": "q", "chosen": "a b c", "rejected": "incomprehensible"})
    assert check(source, "preferences")["longer_wins"] == 0
    assert check(source, "preferences", tokenizer=words)["longer_wins"] == 1


def test_max_length_tells_what_would_be_truncated_and_left_out(write: Any, words: str) -> None:
    rows = [(2, 3), (4, 3), (5, 3), (1, 7), (1, 6), (9, 9)]  # tokens of prompt and response; one more ends it
    cells = [{"prompt": "p " * prompt, "response": "r " * response} for prompt, response in rows]
    found = check(write(*cells), "demonstrations", tokenizer=words, max_length=8)
    # 5 + 3 + 1 is cut; of 7 + 1 and 9 + 1 not one token of the prompt would be left
    assert found["lengths"]["max_length"] == {"tokens": 8, "truncated": 1 / 6, "left_out": 2 / 6}
    found = check(write({"prompt": "p " * 8}, {"prompt": "p " * 9}), "prompts", tokenizer=words, max_length=8)
    assert found["lengths"]["max_length"] == {"tokens": 8, "truncated": 0, "left_out": 0.5}
    with pytest.raises(SettingsError, match="give --tokenizer too"):
        check(write({"prompt": "p"}), "prompts", max_length=8)
    with pytest.raises(SettingsError, match="documents are cut into blocks"):
        check(write({"text": "p"}), "text", tokenizer=words, max_length=8)


def test_a_tokenizer_that_is_none_is_refused(write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: str) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", gone)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda url: None)
    source = write({"prompt": "a"})
    (tmp_path / "broken.json").write_text("{}")
    for where, message in [
        (str(tmp_path), "no tokenizer.json in this folder"),
        (str(tmp_path / "broken.json"), "is not a tokenizer.json"),
        ("owner/name", "nor a hub id that has one: no network"),
    ]:
        with pytest.raises(SettingsError, match=message):
            check(source, "prompts", tokenizer=where)


def test_samples_show_the_first_few_as_read_without_the_middle_of_long_texts(write: Any) -> None:
    long = "a" * 160 + "b" * 500 + "c" * 60
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    source = write({"prompt": ""}, {"prompt": turns, "response": long}, *[{"prompt": "p", "response": "r"}] * 3)
    assert check(source, "demonstrations")["samples"] == [
        {"row": 2, "prompt": "system: s\nuser: u", "response": "a" * 160 + " … " + "c" * 60},
        {"row": 3, "prompt": "p", "response": "r"},
        {"row": 4, "prompt": "p", "response": "r"},
    ]
    assert check(write({"prompt": "p", "other": [1]}), "prompts")["samples"] == [{"row": 1, "prompt": "p"}]
    answers, ranks = [f"a{n}" for n in range(12)], list(range(1, 13))
    [sample] = check(write({"prompt": "p", "responses": answers, "ranks": ranks}), "preferences")["samples"]
    assert sample == {"row": 1, "prompt": "p", "responses": answers[:10], "ranks": ranks[:10], "more_answers": 2}
    assert check(write({"text": long}), "text")["samples"] == [{"row": 1, "text": "a" * 160 + " … " + "c" * 60}]


def test_the_result_is_json(write: Any) -> None:
    found = check(write({"prompt": "a", "response": "x"}), "demonstrations")
    assert json.loads(json.dumps(found)) == found


def test_an_unknown_kind_is_refused(write: Any) -> None:
    with pytest.raises(DataError, match="'rankings'; choose from text, demonstrations, preferences, prompts"):
        check(write({"prompt": "a"}), "rankings")


def test_a_missing_source_is_still_an_error() -> None:
    with pytest.raises(DataError, match="no such file"):
        check(Source(path="gone.jsonl"), "prompts")
