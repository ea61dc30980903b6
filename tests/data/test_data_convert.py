"""Rows written down in the toolkit's own format, and read again."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from rlhf.data.convert import convert
from rlhf.data.errors import DataError, SettingsError
from rlhf.data.rows import Ranking, Report, iterate, load, read_rankings
from rlhf.data.sources import Source


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


TURNS = [{"role": "system", "content": "Be kind. "}, user("Hé\u2028?")]


def written(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_bytes().split(b"\n")[:-1]]


def test_rankings_keep_ties_strengths_and_source(write: Any, tmp_path: Path) -> None:
    rows: list[Any] = [
        {
            "prompt": TURNS,
            "responses": ["x ", "y", "z"],
            "ranks": [1, 2, 2],
            "strengths": [0.5, -1, -1],
            "source": "s",
        },
        {"prompt": "all tied", "responses": ["x", "y"], "ranks": [1, 1]},
        {"prompt": "pair", "responses": ["x", "y"], "ranks": [1.5, 2]},
    ]
    out = tmp_path / "out.jsonl"
    report = convert(write(*rows), "preferences", out)
    assert (report.rows, report.kept) == (3, 3)
    assert written(out) == rows
    back = read_rankings(Source(path=str(out)), keep_ties=True).rows
    assert back[0] == Ranking(TURNS, ["x ", "y", "z"], [1.0, 2.0, 2.0], [0.5, -1.0, -1.0], "s")
    assert back == load(write(*rows), "preferences", keep_ties=True).rows


@pytest.mark.parametrize(
    ("kind", "rows", "own"),
    [
        (
            "preferences",
            [{"prompt": "q", "chosen": "x", "rejected": "y", "source": "s"}],
            [{"prompt": "q", "responses": ["x", "y"], "ranks": [1, 2], "source": "s"}],
        ),
        (
            "preferences",  # a format of others
            [{"prompt": "\n\nHuman: q\n\nAssistant:", "answers": [{"answer": a, "rank": r} for a, r in ("x2", "y1")]}],
            [{"prompt": "\n\nHuman: q\n\nAssistant:", "responses": ["x", "y"], "ranks": [2, 1]}],
        ),
        (
            "demonstrations",
            [{"messages": [*TURNS, {"role": "assistant", "content": " x"}]}, {"prompt": "q ", "completion": "x\n"}],
            [{"prompt": TURNS, "response": " x"}, {"prompt": "q ", "response": "x\n"}],
        ),
        ("text", ["one", {"text": "two\n\nthree"}, {"text": " "}], [{"text": "one"}, {"text": "two\n\nthree"}]),
        (
            "prompts",
            [{"prompt": "q", "answer": 4}, {"id": 1, "prompt": TURNS}],
            [{"prompt": "q", "answer": 4}, {"prompt": TURNS, "id": 1}],
        ),
    ],
)
def test_what_was_written_reads_as_the_same_examples(
    write: Any, tmp_path: Path, kind: str, rows: list[Any], own: list[Any]
) -> None:
    out = tmp_path / "out.jsonl"
    convert(write(*rows), kind, out)
    assert written(out) == own
    assert load(Source(path=str(out)), kind).rows == load(write(*rows), kind).rows


def test_prompts_of_messages_stay_the_same_prompts(write: Any, tmp_path: Path) -> None:
    source = write(
        {"messages": [*TURNS, {"role": "assistant", "content": "x"}], "level": 2},
        {"prompt": "only its beginning", "messages": TURNS[1:], "level": 3},
        {"chosen": [user("c"), {"role": "assistant", "content": "x"}], "rejected": "y"},
        # a format whose prompt is a list in JSON, which the written one is not
        {"prompt": '["d"]', "response_a": '["x"]', "response_b": '["y"]', "level": 5}
        | {"winner_model_a": 1, "winner_model_b": 0, "winner_tie": 0},
        # one of whose columns a prompt would turn into another format's
        {"messages": [user("e")], "message_tree_id": "t", "level": 6},
    )
    out = tmp_path / "out.jsonl"
    convert(source, "prompts", out)
    back = load(Source(path=str(out)), "prompts").rows
    assert [prompt.messages for prompt in back] == [TURNS, TURNS[1:], [user("c")], [user("d")], [user("e")]]
    assert [prompt.row.get("level") for prompt in back] == [2, 3, None, 5, 6]


def test_what_json_cannot_hold_becomes_text_and_half_a_character_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "a", "since": date(2024, 5, 1)}, {"prompt": "b", "other": "\ud800"}]
    monkeypatch.setattr("rlhf.data.rows.read_rows", lambda source, files: enumerate(rows, 1))
    out = tmp_path / "out.jsonl"
    convert(Source(path="made:rows"), "prompts", out)
    assert written(out) == [{"prompt": "a", "since": "2024-05-01"}, {"prompt": "b", "other": "\ud800"}]


def test_too_many_lost_rows_are_refused_and_nothing_is_written(write: Any, tmp_path: Path) -> None:
    source = write({"prompt": "a", "response": "x"}, {"prompt": "b"})
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=r"row 2: empty response.*max_dropped=0\.5"):
        convert(source, "demonstrations", tmp_path / "out.jsonl")
    assert sorted(tmp_path.iterdir()) == before
    report = convert(source, "demonstrations", tmp_path / "out.jsonl", max_dropped=0.5)
    assert report.dropped["empty response"].count == 1
    assert written(tmp_path / "out.jsonl") == [{"prompt": "a", "response": "x"}]


def test_a_file_is_written_over_only_if_forced_and_only_as_a_whole(write: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("mine")
    with pytest.raises(SettingsError, match=r"out\.jsonl: already there; give another name, or --force"):
        convert(write({"prompt": "a"}), "prompts", out)
    with pytest.raises(DataError):
        convert(write({"prompt": ""}), "prompts", out, force=True)
    assert out.read_text() == "mine"
    convert(write({"prompt": "a"}), "prompts", out, force=True)
    assert written(out) == [{"prompt": "a"}]
    own = Source(path=str(out))
    convert(own, "prompts", out, force=True)  # onto itself
    assert written(out) == [{"prompt": "a"}]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("out.json", "must end in .jsonl"),
        ("gone/out.jsonl", "no folder"),
        ("rows.jsonl/out.jsonl", "no folder"),
        ("folder.jsonl", "already there; give another name$"),
    ],
)
def test_a_name_that_cannot_be_written_is_refused(write: Any, tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(SettingsError, match=message):
        convert(write({"prompt": "a"}), "prompts", tmp_path / name, force=True)


def test_a_file_that_the_system_refuses_is_named_with_what_it_says_and_the_cure(
    write: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(source: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(source))

    rows = write({"prompt": "a"})
    monkeypatch.setattr("os.replace", denied)
    with pytest.raises(SettingsError, match=r"out\.jsonl: cannot be written: Permission denied; name another place$"):
        convert(rows, "prompts", tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    ("strengths", "reason"),
    [
        ([1.0], "strengths and responses differ in length"),
        (3, "strengths is a number, not a list"),
        (["much", 1], "a strength is not a finite number"),
    ],
)
def test_strengths_that_say_nothing_are_counted(write: Any, strengths: Any, reason: str) -> None:
    report = Report("preferences")
    row = {"prompt": "q", "responses": ["x", "y"], "ranks": [1, 2], "strengths": strengths}
    assert list(iterate(write(row), "preferences", report)) == []
    assert list(report.dropped) == [reason]


def test_a_folder_is_not_converted_into_itself(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.jsonl").write_text('{"prompt": "p", "response": "r"}\n')
    with pytest.raises(SettingsError, match=r"out.jsonl: lies in the folder that is read"):
        convert(Source(path=str(tmp_path / "set")), "demonstrations", tmp_path / "set" / "out.jsonl")
