"""`rlhf eval` of a run folder that is not whole: it is refused before anything is measured, with file and cure."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_world import FakeStages

from rlhf.pipeline.report.run import read_run
from rlhf.stages.artifact import STAGES

Call = Callable[..., tuple[int, str, str]]
BASE, SFT, ALL = ["base"], ["base", "sft"], ["base", "sft", "ppo"]


def test_a_copy_without_the_whole_folder_of_a_finished_stage_is_refused_and_told(
    world: Path, stages: FakeStages, rlhf: Call
) -> None:
    """Though what a stage started from still lies at the old place; and its status stays what it was."""
    rlhf("run", "recipe.yaml", "--run-dir", "run")
    code, out, err = rlhf("status", "run")
    assert (code, err, "missing" in out) == (0, "", False)
    assert read_run("run").warnings == []
    assert "message" not in json.loads(rlhf("status", "run", "--json")[1])["stages"]["reward"]
    for stage in STAGES:
        shutil.copytree("run", stage)
        (folder,) = Path(stage).glob(f"{stage}-*")
        for leave_out in ((folder / "manifest.json").unlink, lambda folder=folder: shutil.rmtree(folder)):
            leave_out()
            told = (
                f"{stage}: the folder {folder.name} of this run is not finished or missing; copy it whole from the run "
                f"that this is a copy of, or `rlhf run {stage}/recipe.yaml --run-dir {stage}` makes it anew"
            )
            assert rlhf("eval", stage) == (2, "", f"error: {told}\n")
            code, out, _ = rlhf("status", stage)
            (row,) = [line for line in out.splitlines() if line.startswith(f"{stage} ")]
            assert (code, "done, folder missing" in row) == (0, True)
            assert f"warning: {told}" in out.splitlines()
            entries = json.loads(rlhf("status", stage, "--json")[1])["stages"]
            assert {entry["status"] for entry in entries.values()} == {"done"}
            assert entries[stage]["message"] == told
            assert told in read_run(stage).warnings
    assert stages.evaluated == [BASE, SFT, ALL]
    shutil.copytree("run", "copy")
    assert rlhf("eval", "copy")[0] == 0
    models = json.loads(Path("copy/evaluation.json").read_text())["models"]
    assert [figures["model"].partition("-")[0] for figures in models.values()] == ["pretrain", "sft", "ppo"]


def _as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE: dict[str, Callable[[Path], object]] = {
    "half of it": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    **{text: lambda path, text=text: path.write_text(text) for text in ("", "[]", "{}", "null", "7")},
    "no UTF-8": lambda path: path.write_bytes(b"\xff\xfe"),
    "a folder": _as_folder,
    "nothing": lambda path: path.unlink(),
}
OF_A_STAGE = ("manifest.json", "settings.yaml", "model/config.json")


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_refused_before_anything_is_measured_with_its_name_and_a_cure(
    world: Path, stages: FakeStages, rlhf: Call, damage: str
) -> None:
    """Of every file that an evaluation opens, those of a reward model too."""
    rlhf("run", "recipe.yaml", "--run-dir", "run")
    folders = sorted(path.name for path in Path("run").glob("*-*"))
    names = ["summary.json", "recipe.yaml", *(f"{folder}/{name}" for folder in folders for name in OF_A_STAGE)]
    unread = next(f"{folder}/settings.yaml" for folder in folders if folder.startswith("reward"))
    for name in names:
        shutil.copytree("run", "copy")
        DAMAGE[damage](Path("copy", name))
        code, out, err = rlhf("eval", "copy")
        if name == unread or (name, damage) == ("recipe.yaml", "nothing"):  # a run may be without its recipe
            assert code == 0
        else:
            assert (code, out, err.startswith("error: "), "; " in err) == (2, "", True, True)
            assert name.partition("/")[0] in err
            assert "Error" not in err
        shutil.rmtree("copy")
    assert stages.evaluated[3:] == [ALL] * (2 if damage == "nothing" else 1)


def test_what_may_not_be_read_is_refused_too(
    world: Path, stages: FakeStages, rlhf: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An administrator may read everything, so that a mode alone is no test."""
    rlhf("run", "recipe.yaml", "--run-dir", "run", "--to", "pretrain")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "settings.yaml")
    code, _, err = rlhf("eval", "run")
    assert (code, "settings.yaml may not be read; " in err) == (2, True)


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_measured(
    world: Path, stages: FakeStages, rlhf: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    rlhf("run", "recipe.yaml", "--run-dir", "run", "--to", "pretrain")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    code, _, err = rlhf("eval", "run")
    assert (code, "run: cannot be written to, and the figures go there" in err) == (2, True)
    assert stages.evaluated == [BASE]


@pytest.mark.parametrize("name", ["evaluation.json", "evaluation.jsonl", "report.html"])
def test_a_folder_where_a_file_is_to_be_written_is_refused(
    world: Path, stages: FakeStages, rlhf: Call, name: str
) -> None:
    rlhf("run", "recipe.yaml", "--run-dir", "run", "--to", "pretrain")
    _as_folder(Path("run", name))
    told = f"error: run/{name}: is a folder, where a file is to be written; move it away\n"
    assert rlhf("eval", "run") == (2, "", told)
    assert stages.evaluated == [BASE]
