"""`rlhf clean` lists first, deletes only what nothing leads to, and never what is not ours."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_world import FakeStages, contents

from rlhf.pipeline import clean, runner
from rlhf.pipeline.lock import held
from rlhf.pipeline.recipe import load_recipe
from rlhf.stages.alone import alone_in

RUN = Path("run")
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def twice(world: Path, stages: FakeStages) -> dict[str, Path]:
    """A run that is done, after an earlier one with another reward model: the folders of both."""
    run("reward.learning_rate=0.002")
    run()
    named = (RUN / "summary.json").read_text()
    return {
        ("" if path.name in named else "old ") + path.name.partition("-")[0]: path for path in sorted(RUN.glob("*-*"))
    }


def run(*overrides: str) -> None:
    runner.run(load_recipe("recipe.yaml", overrides), RUN, say=lambda _: None)


def test_a_run_that_needs_all_it_has_stays_as_it_is(world: Path, stages: FakeStages, rlhf: Call) -> None:
    run()
    before = contents(RUN)
    assert rlhf("clean", "run", "--yes") == (0, "0 bytes freed\n", "")
    assert contents(RUN) == before


def test_a_finished_stage_goes_only_with_yes_and_is_listed_before(twice: dict[str, Path], rlhf: Call) -> None:
    before = contents(RUN)
    code, out, _ = rlhf("clean", "run")
    lines = out.splitlines()
    assert code == 0
    assert contents(RUN) == before
    listed = {line.split()[0]: line for line in lines[1:-1]}
    assert listed.keys() == {twice["old reward"].name, twice["old ppo"].name}
    line = listed[twice["old reward"].name]
    assert "finished, but not what summary.json names" in line
    assert "only with --yes" in line
    assert lines[-1] == "0 bytes freed"

    code, out, _ = rlhf("clean", "run", "--yes")

    lines = out.splitlines()
    assert code == 0
    assert not twice["old reward"].exists()
    assert not twice["old ppo"].exists()
    left = contents(RUN)
    assert left.items() <= before.items()
    assert {path.name for path in RUN.glob("*-*")} == {
        path.name for name, path in twice.items() if name not in ("old reward", "old ppo")
    }
    run()  # nothing to do


def test_what_no_one_can_use_goes_at_once(twice: dict[str, Path], rlhf: Call) -> None:
    left = [
        RUN / ".summary.json.4711.writing",
        RUN / "tokens" / ".0123456789abcdef.writing" / "tokens.bin",
        twice["sft"] / ".settings.yaml.4711.writing",
        twice["sft"] / ".model.writing" / "config.json",
        twice["sft"] / "checkpoints" / "step-00000003" / "state.json",
    ]
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("12345")
    code, out, _ = rlhf("clean", "run")
    lines = out.splitlines()
    assert code == 0
    assert not any(path.exists() for path in left)
    assert not (twice["sft"] / "checkpoints").exists()
    assert [line for line in lines if "checkpoints of a stage that is finished" in line and "5 bytes" in line]
    assert lines[-1] == "25 bytes freed"


def test_an_unfinished_stage_goes_only_when_the_recipe_does_not_lead_to_it(
    world: Path, stages: FakeStages, rlhf: Call
) -> None:
    run()
    for name in ("sft", "reward"):
        (next(RUN.glob(f"{name}-*")) / "manifest.json").unlink()
    lost = RUN / "sft-00000000"
    shutil.copytree(next(RUN.glob("sft-*")), lost)
    before = contents(RUN)
    _, out, _ = rlhf("clean", "run")
    lines = out.splitlines()
    assert contents(RUN) == before
    assert [line.split()[0] for line in lines[1:-1]] == ["sft-00000000"]
    assert "recipe.yaml does not lead to it" in lines[1]
    rlhf("clean", "run", "--yes")
    assert not lost.exists()
    assert contents(RUN) == {path: found for path, found in before.items() if "sft-00000000" not in path}


def test_where_the_recipe_cannot_be_followed_unfinished_stages_stay(
    world: Path, stages: FakeStages, rlhf: Call
) -> None:
    run()
    lost = RUN / "sft-00000000"
    lost.mkdir()
    Path("text.jsonl").unlink()
    code, out, _ = rlhf("clean", "run", "--yes")
    lines = out.splitlines()
    assert code == 0
    assert lost.exists()
    assert "what recipe.yaml leads to is not known: pretrain.data: text.jsonl: no such file" in lines[0]
    assert "sft-00000000 stays" in lines[1]


def test_what_a_stage_that_stays_was_made_from_stays_too(twice: dict[str, Path], rlhf: Call) -> None:
    settings = twice["ppo"] / "settings.yaml"
    settings.write_text(settings.read_text() + f"# made from {twice['old reward'].absolute()}/model\n")
    rlhf("clean", "run", "--yes")
    assert twice["old reward"].exists()
    assert not twice["old ppo"].exists()


def test_the_variants_of_a_sweep_stay(twice: dict[str, Path], rlhf: Call) -> None:
    (RUN / "sweep.json").write_text(f'{{"rows": [{{"folder": "{twice["old reward"].name}"}}]}}')
    rlhf("clean", "run", "--yes")
    assert twice["old reward"].exists()
    assert not twice["old ppo"].exists()


def test_nobody_elses_files_are_touched_and_no_link_is_followed(twice: dict[str, Path], rlhf: Call) -> None:
    outside = Path("outside")
    (outside / "step-00000003").mkdir(parents=True)
    theirs = [
        RUN / ".notes.4711.writing", RUN / "notes.txt", RUN / "sft-mine" / "x", twice["old reward"] / "notes.txt",
        twice["sft"] / ".typewriting", outside / "step-00000003" / "state.json",
    ]  # fmt: skip
    for path in theirs:
        path.parent.mkdir(exist_ok=True)
        path.write_text("theirs")
    os.symlink(outside.absolute(), twice["sft"] / "checkpoints")
    os.symlink(outside.absolute(), twice["old ppo"] / "critic")
    os.symlink(outside.absolute(), RUN / "sft-00000000")
    code, out, _ = rlhf("clean", "run", "--yes")
    lines = out.splitlines()
    assert code == 0
    assert all(path.read_text() == "theirs" for path in theirs)
    assert (RUN / "sft-00000000").is_symlink()
    assert (twice["old ppo"] / "critic").is_symlink()
    assert os.listdir(twice["old reward"]) == ["notes.txt"]
    assert f"{twice['old reward'].name} stays, with what is not ours: notes.txt" in lines


def test_it_is_refused_while_a_run_works_there_and_where_there_is_none(twice: dict[str, Path], rlhf: Call) -> None:
    with held(RUN, 0):
        code, out, err = rlhf("clean", "run", "--yes")
        lines = out.splitlines()
    assert code == 2
    assert lines == []
    assert f"another rlhf run is working here (pid {os.getpid()}" in err
    assert twice["old reward"].exists()
    Path("empty").mkdir()
    for folder in ("empty", "nowhere"):
        code, _, err = rlhf("clean", folder)
        assert code == 2
        assert "not a run folder" in err
    assert os.listdir("empty") == []


def test_it_is_refused_while_a_stage_that_was_started_by_hand_trains_there(twice: dict[str, Path], rlhf: Call) -> None:
    before = contents(RUN)
    with alone_in(twice["old reward"]):
        code, out, err = rlhf("clean", "run", "--yes")
    assert (code, out) == (2, "")
    assert f"{twice['old reward']}: another process is training in it" in err
    assert contents(RUN) == before


def test_a_run_takes_away_what_a_killed_one_left_half_written(world: Path, stages: FakeStages) -> None:
    run()
    stage = next(RUN.glob("sft-*"))
    for folder, name in ((RUN, "recipe.yaml"), (stage, "status.json")):  # of a stage that is finished
        (folder / f".{name}.4711.writing").write_text("half")
        (folder / ".mine.4711.writing").write_text("theirs")
    run()
    for folder, name in ((RUN, "recipe.yaml"), (stage, "status.json")):
        assert not (folder / f".{name}.4711.writing").exists()
        assert (folder / ".mine.4711.writing").exists()
    (left := RUN / "tokens" / ".text.writing").mkdir(parents=True)
    with alone_in(next(RUN.glob("ppo-*"))):  # whose text it may be
        run()
    assert left.exists()
    run()
    assert not left.exists()


def test_a_strangers_file_in_a_stages_folder_survives_resume_and_sealing(world: Path, stages: FakeStages) -> None:
    stages.in_stage["sft"] = lambda folder: 1 / 0  # type: ignore[assignment, return-value]
    with pytest.raises(RuntimeError):
        run()
    folder = next(RUN.glob("sft-*"))
    (folder / "notes.txt").write_text("mine")
    stages.in_stage.clear()
    run()
    assert (folder / "notes.txt").read_text() == "mine"
    assert "notes.txt" not in (folder / "manifest.json").read_text()
    (folder / "notes.txt").unlink()
    run()  # it is no part of the result
    assert clean.find(RUN) == ([], [])
