"""Files that are written whole: those of a folder that is swapped in can be read by whom the umask lets read."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlhf.stages.disk import give_usual_modes, swap_folder


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
