"""settings.yaml says what a stage runs with; one that cannot be used is named with what is wrong."""

from pathlib import Path

import pytest

from rlhf.data.errors import SettingsError
from rlhf.stages.settings_file import read_settings, write_settings
from rlhf.stages.sft.config import SFTSettings


def test_settings_come_back_as_they_were_written(tmp_path: Path) -> None:
    settings = SFTSettings.load({"model": "base", "data": "rows.jsonl"}, "sft")
    write_settings(tmp_path / "stage", settings)
    assert read_settings(tmp_path / "stage", SFTSettings) == settings


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "it holds no settings"),
        (b"[]", "it holds no settings"),
        (b"7", "it holds no settings"),
        (b"\xff\xfe", "'utf-8' codec can't decode"),
        (b"data: {path: x", "line 1, column 7 did not find expected ',' or '}'"),
        (b"- " * 2000 + b"x", "maximum"),
    ],
)
def test_settings_that_cannot_be_read_are_named_with_what_is_wrong(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "settings.yaml").write_bytes(content)
    with pytest.raises(SettingsError) as refused:
        read_settings(tmp_path, SFTSettings)
    before = f"{tmp_path}/settings.yaml: cannot be read as a stage's settings ("
    assert str(refused.value).startswith(before)
    assert told in str(refused.value)
    assert str(refused.value).endswith("); put it back as it was")


def test_each_wrong_setting_of_a_file_is_told_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_text("data: rows.jsonl\nmax_length: long\nlearnin_rate: 1.0\n")
    with pytest.raises(SettingsError) as refused:
        read_settings(tmp_path, SFTSettings)
    first, second = str(refused.value).splitlines()
    assert first.startswith(f"{tmp_path}/settings.yaml: sft.max_length: ")
    assert second == f"{tmp_path}/settings.yaml: sft: no setting 'learnin_rate'; did you mean 'learning_rate'?"
