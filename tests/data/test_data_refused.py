"""Sources that are refused because of rows that cannot be used, and what they are told."""

from pathlib import Path
from typing import Any

import pytest
from formats_world import counts

from rlhf.data.errors import DataError
from rlhf.data.rows import load, read_demonstrations, read_prompts, read_rankings, read_text
from rlhf.data.sources import Source


def test_text_pairs_without_a_prompt_are_told_the_cure(write: Any) -> None:
    with pytest.raises(DataError, match=r"row 1: chosen is text without a prompt; add a column 'prompt', or write"):
        read_rankings(write({"chosen": "Q: sky? A: blue", "rejected": "Q: sky? A: blue and wide"}))


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
        "Repair them, or set max_dropped=0.6 (--max-dropped) to go on without them"
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
        "response, or messages; name yours with map: {prompt: YOURS} "
        "(`rlhf data`: --map prompt=YOURS). Nothing usable is left: kept 0 of 1 rows"
    )
    with pytest.raises(DataError, match=r"no column 'text' \(columns found: body\)"):
        read_text(write({"body": "x"}))


@pytest.mark.parametrize("name", ["responses", "completions"])
def test_a_ranking_without_ranks_is_told_so(write: Any, name: str) -> None:
    with pytest.raises(DataError) as caught:
        read_rankings(write({"prompt": "q", name: ["a", "b"], "marks": [1, 2]}))
    why = str(caught.value).partition("rows.jsonl")[2]
    assert why.startswith(
        f" row 1: answers without their ranks: no column 'ranks' (1 is the best) beside '{name}' "
        f"(columns found: prompt, {name}, marks); preferences need prompt, chosen and rejected, or"
    )
    assert "name yours with map: {ranks: YOURS} (`rlhf data`: --map ranks=YOURS). Nothing usable is left" in why


def test_only_the_first_few_row_numbers_are_kept(write: Any) -> None:
    loaded = load(write(*[{"text": 1}] * 9), "text")
    assert counts(loaded.report) == {"text is a number, not text": (9, [1, 2, 3, 4, 5])}
    assert loaded.report.summary() == "kept 0 of 9 rows; 9 × text is a number, not text (rows 1, 2, 3, 4, 5, …)"


def test_a_bad_row_of_a_folder_is_named_by_its_own_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "x"}\n{"prompt": "y"}\n')
    (tmp_path / "b.jsonl").write_text('{"prompt": "z"}\n{"prompt": ""}\n')
    with pytest.raises(DataError, match=r"b\.jsonl row 2: empty prompt"):
        read_prompts(Source(path=str(tmp_path)))


def test_a_function_may_give_such_a_rank_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"prompt": "q", "responses": ["a", "b"], "ranks": [1, 10**5000]}]
    monkeypatch.setattr("rlhf.data.rows.read_rows", lambda source, files: enumerate(rows, 1))
    with pytest.raises(DataError, match="row 1: a rank is not a finite number: it has hundreds of digits"):
        read_rankings(Source(path="made:rows"))
