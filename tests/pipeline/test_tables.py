"""What a table looks like where there is room for it, and where there is not."""

import re

import pytest

from rlhf.pipeline.tables import show_table
from rlhf.stages.metric_names import number

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


def test_without_a_terminal_each_row_is_one_line_however_wide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A line break in somebody's text is written as Python writes it, and so is what a terminal would obey."""
    monkeypatch.setenv("COLUMNS", "40")
    show_table(("name", "value"), [("long", "word " * 60 + "end"), ("a\nb", "one\r\ntwo\u2028three\u202e\x1b[2J\n")])
    assert capsys.readouterr().out.split("\n") == [
        "name  value", f"long  {'word ' * 60}end", r"a\nb  one\r\ntwo\u2028three\u202e\x1b[2J\n", ""
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "shown"), [(999.4, "999"), (999.7, "1,000"), (-999.6, "-1,000"), (0.5, "0.500"), (12, "12")]
)
def test_a_number_has_three_digits_and_no_power_of_ten_that_it_does_not_need(value: float, shown: str) -> None:
    assert number(value) == shown
