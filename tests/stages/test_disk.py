"""Files that are written whole: those of a folder that is swapped in can be read by whom the umask lets read."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlhf.data.errors import SettingsError
from rlhf.stages.disk import give_usual_modes, refuse_no_room_beside, refuse_other_than_utf8, swap_folder


@pytest.fixture(params=[0o022, 0o027, 0o077])
def mode(request: pytest.FixtureRequest) -> Iterator[int]:
    """What a new file's mode is by the umask."""
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def test_weights_are_as_open_as_all_other_files(tmp_path: Path, mode: int) -> None:
    writing = tmp_path / ".model.writing"
    (writing / "adapter").mkdir(parents=True)
    (writing / "config.json").write_text("{}")
    for folder in (writing, writing / "adapter"):
        save_file({"a": torch.zeros(1)}, folder / "model.safetensors")
    swap_folder(writing, tmp_path / "model")
    files = [path for path in (tmp_path / "model").rglob("*") if path.is_file()]
    assert {path.name for path in files} == {"config.json", "model.safetensors"}
    assert {path.stat().st_mode & 0o777 for path in files} == {mode}


def test_a_mode_that_somebody_chose_stays(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.touch(0o640)
    file.chmod(0o640)
    give_usual_modes([file])
    assert file.stat().st_mode & 0o777 == 0o640


def test_what_stands_in_a_folder_of_an_impossible_name_is_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "w\udcff").mkdir()  # the byte 0xff
    with pytest.raises(
        SettingsError, match=r"^--run-dir '.*/w\\udcff/run': the name is not UTF-8, .*; choose one that"
    ):
        refuse_other_than_utf8(folder / "run", "--run-dir ")
    refuse_other_than_utf8(Path("läuft 狐"))
    monkeypatch.chdir(folder)
    with pytest.raises(SettingsError, match=r"^'.*w\\udcff/model.yaml': the name is not UTF-8"):
        refuse_no_room_beside(Path("model.yaml"))
