"""A damaged artifact or checkpoint is named by `rlhf verify`, and found before the next stage is built on it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_world import FakeStages, contents

from rlhf.data.errors import SettingsError
from rlhf.pipeline import runner
from rlhf.pipeline.lock import held
from rlhf.pipeline.recipe import load_recipe
from rlhf.pipeline.verify import Found, verify
from rlhf.stages.artifact import Artifact, refuse_damaged_model
from rlhf.stages.disk import file_digest

RUN = Path("run")


@pytest.fixture
def sft(world: Path, stages: FakeStages) -> Path:
    """The sealed sft stage of a run that is done."""
    run()
    return next(RUN.glob("sft-*"))


def run(*overrides: str, verify: bool = False) -> None:
    runner.run(load_recipe("recipe.yaml", overrides), RUN, say=lambda _: None, verify=verify)


def damage(found: Found) -> list[str]:
    return [f"{one.place} {one.what}" for one in found.damage]


def flip(path: Path) -> None:
    """Other bytes, and as many."""
    path.write_bytes(path.read_bytes()[::-1])


def test_a_run_as_it_was_sealed_is_well(sft: Path, rlhf: Callable[..., tuple[int, str, str]]) -> None:
    before = contents(RUN)
    code, out, err = rlhf("verify", "run")
    assert (code, err) == (0, "")
    assert f"{sft.name}: 2 files, " in out
    assert contents(RUN) == before


@pytest.mark.parametrize(
    ("harm", "what"),
    [
        (lambda path: path.unlink(), "model/config.json is missing since it was sealed"),
        (flip, "model/config.json was changed since it was sealed"),
        (lambda path: path.write_text("{}"), "model/config.json was changed since it was sealed: 2 bytes, not 79"),
        (lambda path: (path.parent / "pytorch_model.bin").touch(), "model/pytorch_model.bin came after it was sealed"),
    ],
)
def test_each_kind_of_damage_is_named_with_its_cure(
    sft: Path, rlhf: Callable[..., tuple[int, str, str]], harm: Callable[[Path], None], what: str
) -> None:
    harm(sft / "model" / "config.json")
    code, out, err = rlhf("verify", "run")
    assert code == 1
    assert f"{sft.name}/{what}; " in out
    assert err == "error: run: 1 thing is not as it was, named above\n"
    code, out, _ = rlhf("verify", "run", "--json")
    told = json.loads(out)
    assert code == 1
    assert not told["ok"]
    assert told["damage"][0].keys() == {"place", "what", "cure"}
    assert len(told["good"]) == 3


def test_a_manifest_that_is_damaged_or_of_another_folder_is_named(sft: Path) -> None:
    copy = RUN / "sft-00000000"
    shutil.copytree(sft, copy)
    (sft / "manifest.json").write_text("{")
    assert damage(verify(RUN)) == [
        f"sft-00000000/manifest.json has the key {Artifact(copy).manifest['key']}, which is not that of its folder "
        "(was it copied or renamed?)",
        f"{sft.name}/manifest.json is damaged",
    ]


def test_a_result_that_the_summary_names_and_nobody_finds_is_damage(sft: Path) -> None:
    shutil.rmtree(sft)
    assert damage(verify(RUN)) == [f"summary.json says that sft is done, but {sft.name} is not sealed"]
    (RUN / "summary.json").write_text("{")
    assert damage(verify(RUN)) == ["summary.json is damaged"]


def test_what_is_no_run_folder_is_refused(tmp_path: Path, rlhf: Callable[..., tuple[int, str, str]]) -> None:
    code, _, err = rlhf("verify", str(tmp_path))
    assert code == 2
    assert "not a run folder" in err
    assert rlhf("verify", str(tmp_path / "nowhere"))[0] == 2


def test_a_strangers_file_is_told_and_is_no_damage(sft: Path) -> None:
    (sft / "notes.txt").write_text("mine")
    found = verify(RUN)
    assert not found.damage
    assert found.foreign == [f"{sft.name}/notes.txt"]


def test_checkpoints_are_hashed_too_unless_a_run_is_working(sft: Path) -> None:
    (sft / "manifest.json").unlink()
    (RUN / "summary.json").write_text('{"stages": {}}')
    for step in (10, 20):
        checkpoint = sft / "checkpoints" / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "weights").write_text("abc")
        about = {"size": 3, "sha256": file_digest(checkpoint / "weights")}
        state = {"step": step, "processes": 1, "device": "cpu", "state": {}, "files": {"weights": about}}
        (checkpoint / "state.json").write_text(json.dumps(state))
    assert not verify(RUN).damage
    flip(sft / "checkpoints" / "step-00000020" / "weights")
    found = verify(RUN)
    assert len(found.damage) == 1
    assert found.damage[0].place == f"{sft.name}/checkpoints/step-00000020"
    assert "weights has another hash" in found.damage[0].what
    assert any("step-00000010: complete, 3 bytes" in line for line in found.good)
    with held(RUN, 0):
        found = verify(RUN)
    assert not found.damage
    assert "a run is working here" in found.notes[0]


def test_a_model_cut_short_or_grown_is_found_before_it_is_used(sft: Path) -> None:
    weights = sft / "model" / "config.json"
    whole = weights.read_bytes()
    for content in (whole[:-1], whole + b" "):
        weights.write_bytes(content)
        before = contents(RUN)
        with pytest.raises(
            SettingsError, match=rf"{sft.name}: model/config\.json was changed .* restore it, or delete"
        ):
            run("reward.learning_rate=0.002")
        assert contents(RUN) == before


def test_a_flipped_byte_is_found_with_verify_before_anything_trains(sft: Path, stages: FakeStages) -> None:
    flip(sft / "model" / "config.json")
    before = contents(RUN)
    for overrides in ([], ["reward.learning_rate=0.002"]):  # reused, and started from
        with pytest.raises(SettingsError, match=rf"{sft.name}: model/config\.json was changed since it was sealed;"):
            run(*overrides, verify=True)
    assert contents(RUN) == before
    assert len(stages.trained) == 4
    flip(sft / "model" / "config.json")
    run("reward.learning_rate=0.002", verify=True)
    assert stages.trained[4:] == ["reward", "ppo"]


def test_verify_is_an_option_of_run_and_of_the_stages(
    sft: Path, stages: FakeStages, rlhf: Callable[..., tuple[int, str, str]]
) -> None:
    flip(sft / "model" / "config.json")
    assert rlhf("run", "recipe.yaml", "--run-dir", "run")[0] == 0
    assert rlhf("run", "recipe.yaml", "--run-dir", "run", "--verify")[0] == 2
    assert rlhf("reward", "recipe.yaml", "reward.seed=3", "--run-dir", "run", "--verify")[0] == 2


def test_a_stage_that_is_run_by_hand_looks_at_its_model_too(sft: Path) -> None:
    refuse_damaged_model(sft / "model")
    (sft / "model" / "config.json").write_text("{}")
    with pytest.raises(SettingsError, match="was changed since it was sealed: 2 bytes"):
        refuse_damaged_model(sft / "model")


def test_a_manifest_of_before_sizes_were_kept_is_verified_all_the_same(sft: Path) -> None:
    manifest = Artifact(sft).manifest
    assert manifest["sizes"].keys() == manifest["files"].keys()
    del manifest["sizes"]
    (sft / "manifest.json").write_text(json.dumps(manifest))
    assert not verify(RUN).damage
    (sft / "model" / "config.json").write_text("{}")
    assert damage(verify(RUN)) == [f"{sft.name}/model/config.json was changed since it was sealed"]
