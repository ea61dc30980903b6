"""What a table looks like where there is room for it, and where there is not."""

import re

import pytest

from rlhf.pipeline.tables import show_table

COLUMNS = ("stage", "what happened", "model")
ROWS = [("sft", "loss 1.25  accuracy 0.5", "sft-0123abcd/model"), ("ppo", "", "ppo-4567cdef/model")]


def drawn(width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Its lines on a terminal of that width."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    show_table(COLUMNS, ROWS)
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()  # without colours
    assert max(map(len, lines)) <= width
    return [line.strip() for line in lines if line.strip(" ─")]


def test_a_terminal_with_room_gets_a_line_per_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [line.split("  ")[0] for line in drawn(60, monkeypatch, capsys)] == ["stage", "sft", "ppo"]


def test_with_less_room_sentences_wrap_and_names_of_folders_stay_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = drawn(45, monkeypatch, capsys)
    assert len(lines) == 4
    assert [line.split()[-1] for line in lines] == ["model", "sft-0123abcd/model", "0.5", "ppo-4567cdef/model"]


def test_where_not_even_words_fit_each_row_is_told_by_itself_and_nothing_is_cut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert drawn(36, monkeypatch, capsys) == [
        "sft", "what happened loss 1.25  accuracy", "0.5", "model sft-0123abcd/model", "ppo", "model ppo-4567cdef/model"
    ]  # fmt: skip
