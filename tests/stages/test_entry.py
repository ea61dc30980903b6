"""A stage as it is started by hand: `python -m rlhf.stages.STAGE FOLDER`."""

import errno
import fcntl
import os
import shlex
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from forking import forked_helper

from rlhf.data.errors import RefusedError
from rlhf.stages import entry
from rlhf.stages.alone import alone_in
from rlhf.stages.artifact import Identity, seal

WITHOUT_TORCH = """
import runpy, sys
try:
    runpy.run_module(f"rlhf.stages.{sys.argv.pop(1)}", run_name="__main__")
except SystemExit as end:
    print(end.code, "torch" in sys.modules)
"""


def sealed(folder: Path, stage: str) -> None:
    (folder / "model").mkdir(parents=True)
    (folder / "settings.yaml").write_text(f"stage: {stage}\n")
    seal(folder, Identity(stage, {}, {}, {}), {}, 1, {})


@pytest.mark.parametrize("stage", ["pretrain", "sft", "feedback", "reward", "ppo"])
def test_a_finished_folder_is_refused_before_torch_is_imported_with_the_commands_that_run_it_once_more(
    tmp_path: Path, stage: str
) -> None:
    folder = tmp_path / "my runs" / "demo" / f"{stage}-0123abcd"
    sealed(folder, stage)
    words = [sys.executable, "-c", WITHOUT_TORCH, stage, str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
    assert done.stderr.startswith(f"error: {folder}: is finished ")
    make, copy, run = done.stderr.split("`")[1].split(" && ")
    subprocess.run(shlex.split(make), check=True)
    subprocess.run(shlex.split(copy), check=True)
    new = tmp_path / "my runs" / "again" / folder.name
    assert (new / "settings.yaml").read_text() == f"stage: {stage}\n"
    assert shlex.split(run) == ["python", "-m", f"rlhf.stages.{stage}", str(new)]


def test_a_folder_whose_name_is_not_utf_8_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (folder := tmp_path / "bad\udcff").mkdir()
    (folder / "settings.yaml").write_text("stage: sft\n")
    words = [sys.executable, "-c", WITHOUT_TORCH, "sft", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"
    assert done.stderr.startswith(f"error: '{tmp_path}/bad\\udcff': the name is not UTF-8")


@pytest.mark.parametrize("in_a_run", [False, True])
def test_the_last_line_by_hand_names_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], in_a_run: bool
) -> None:
    """In a run it is the run's."""
    module = ModuleType("rlhf.stages.sft.train")
    module.train = lambda folder: sealed(folder, "sft")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(sys, "argv", ["sft", str(tmp_path / "sft")])
    monkeypatch.delenv("RLHF_RUN", raising=False)
    if in_a_run:
        monkeypatch.setenv("RLHF_RUN", "a mark")
    entry.run_stage("sft")
    assert capsys.readouterr().out == ("" if in_a_run else f"sft: done, {tmp_path}/sft/model\n")


@pytest.mark.parametrize("what", ["fcntl.flock", "os.open"])
def test_a_folder_that_cannot_be_locked_is_trained_in_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """A file system may have no locks, and a folder may not be listed; each is asked once."""
    asked: list[Any] = []

    def refuse(*given: Any) -> None:
        asked.append(given)
        raise OSError(errno.ENOLCK, "No locks available")

    module = ModuleType("rlhf.stages.sft.train")
    module.train = lambda folder: sealed(folder, "sft")  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv("RLHF_RUN", raising=False)
    with monkeypatch.context() as patch:
        patch.setattr(what, refuse)
        with alone_in(tmp_path):
            pass
    assert len(asked) == 1
    monkeypatch.setattr("fcntl.flock", refuse)
    (folder := tmp_path / "sft").mkdir()
    monkeypatch.setattr(sys, "argv", ["sft", str(folder)])
    entry.run_stage("sft")
    assert capsys.readouterr().out == f"sft: done, {folder}/model\n"


def test_a_folder_in_which_another_process_trains_is_refused(tmp_path: Path) -> None:
    """Both would write the same model, and take each other's files away."""
    (tmp_path / "settings.yaml").write_text("stage: sft\n")
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as such a process has it
    words = [sys.executable, "-c", WITHOUT_TORCH, "sft", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    os.close(descriptor)
    assert done.stdout == "2 False\n"
    cure = "wait until it is done, or use another folder"
    assert done.stderr == f"error: {tmp_path}: another process is training in it; {cure}\n"


def test_a_folder_is_free_when_its_stage_has_ended_though_a_helper_of_it_lives_on(tmp_path: Path) -> None:
    """As one that loads rows, which is forked with all that is open."""
    other = os.open(tmp_path, os.O_RDONLY)
    with ExitStack() as living:
        with alone_in(tmp_path):
            living.enter_context(forked_helper())
            with pytest.raises(BlockingIOError):
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with pytest.raises(RefusedError), alone_in(tmp_path):
            pass
        os.close(other)
    with alone_in(tmp_path):
        pass
