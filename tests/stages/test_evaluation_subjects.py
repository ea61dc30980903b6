"""Which models an evaluation takes: those of the run itself, also where it was moved or copied, and of all rounds."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from ppo_world import model_folders, run_ppo

from rlhf.data.errors import RefusedError, SettingsError
from rlhf.stages.evaluation.config import cheap
from rlhf.stages.evaluation.evaluate import evaluate
from rlhf.stages.evaluation.subjects import find_subjects, in_run, is_current, refuse_damage


def test_a_run_folder_that_was_moved_is_evaluated_where_it_is(tmp_path: Path, tokenizer: Any) -> None:
    given = model_folders(tmp_path, tokenizer)
    old, new = tmp_path / "old", tmp_path / "new"
    for name in ("policy", "reward"):
        shutil.move(tmp_path / name, old / name / "model")
    chosen = given | {"model": str(old / "policy" / "model"), "reward_model": str(old / "reward" / "model")}
    run_ppo(old / "ppo", chosen, num_iterations=1)
    old.rename(new)
    told = evaluate(new, {"ppo": new / "ppo"}, cheap(None))
    assert told["models"]["sft"]["model"] == str(new / "policy" / "model")
    assert told["reward_model"] == str(new / "reward" / "model")


def write_summary(run_dir: Path, **folders: str | None) -> None:
    """One in which the stages with these folders are done."""
    stages = {stage: {"status": "done", "folder": folder} for stage, folder in folders.items()}
    (run_dir / "summary.json").write_text(json.dumps({"stages": stages}))


def copied_run(tmp_path: Path, tokenizer: Any) -> Path:
    """A copy of a run that is still at its old place; the summary of both names its stages."""
    given, run_dir = model_folders(tmp_path, tokenizer), tmp_path / "run"
    for name in ("policy", "reward"):
        shutil.move(tmp_path / name, run_dir / f"{name}-1" / "model")
    chosen = given | {name: str(run_dir / f"{of}-1" / "model") for name, of in MODELS_OF_PPO.items()}
    run_ppo(run_dir / "ppo-1", chosen, num_iterations=1)
    write_summary(run_dir, sft="policy-1", reward="reward-1", feedback=None, ppo="ppo-1")
    shutil.copytree(run_dir, tmp_path / "copy")
    return tmp_path / "copy"


MODELS_OF_PPO = {"model": "policy", "reward_model": "reward"}


def test_a_copy_of_a_run_is_evaluated_with_its_own_models_and_never_with_those_of_the_old_place(
    tmp_path: Path, tokenizer: Any
) -> None:
    copy = copied_run(tmp_path, tokenizer)
    done = {"ppo": copy / "ppo-1"}
    told = evaluate(copy, done, cheap(None))
    assert told["models"]["sft"]["model"] == str(copy / "policy-1" / "model")
    assert told["reward_model"] == str(copy / "reward-1" / "model")
    before = (copy / "evaluation.json").read_bytes()
    for name in ("reward-1", "policy-1"):
        shutil.move(copy / name, tmp_path / "aside")
        with pytest.raises(SettingsError, match=re.escape(f"{copy}: the folder {name} of this run is not")):
            evaluate(copy, done, cheap(None))
        shutil.move(tmp_path / "aside", copy / name)
    assert (copy / "evaluation.json").read_bytes() == before


@pytest.mark.parametrize(
    ("gone", "told"),
    [
        ("policy-1/model/model.safetensors", r"policy-1/model: holds no weights \(\*\.safetensors\); restore them"),
        ("reward-1/model/model.safetensors", r"reward-1/model: holds no weights"),
        ("reward-1/model/config.json", r"reward-1/model' holds no config\.json; it must be a saved model"),
        ("ppo-1/model/model.safetensors", r"^ppo-1: model/model\.safetensors is missing since it was sealed; restore"),
        ("ppo-1/settings.yaml", r"ppo-1: no settings\.yaml, which names the settings"),
    ],
)
def test_every_model_that_an_evaluation_opens_must_be_whole(
    tmp_path: Path, tokenizer: Any, gone: str, told: str
) -> None:
    """Also what no stage has sealed."""
    copy = copied_run(tmp_path, tokenizer)
    refuse_damage(copy, {"ppo": copy / "ppo-1"})
    (copy / gone).unlink()
    with pytest.raises(RefusedError, match=told):
        refuse_damage(copy, {"ppo": copy / "ppo-1"})


def test_a_model_of_another_run_stays_where_it_is(tmp_path: Path) -> None:
    """The summary does not name its folder, so it is no stage of this run."""
    run_dir, other = tmp_path / "run", tmp_path / "other" / "reward-2" / "model"
    for folder in (run_dir / "reward-1" / "model", other):
        folder.mkdir(parents=True)
    write_summary(run_dir, reward="reward-1")
    assert in_run(str(other), run_dir) == str(other)
    assert in_run("org/name", run_dir) == "org/name"
    assert in_run("/gone/reward-1/model", run_dir) == str(run_dir / "reward-1" / "model")


def test_earlier_rounds_are_stages_of_the_run_too(tmp_path: Path) -> None:
    rounds = [{"ppo": {"status": "done", "folder": folder}} for folder in ("ppo-1", "ppo-2")]
    (tmp_path / "summary.json").write_text(json.dumps({"stages": rounds[1], "rounds": rounds}))
    with pytest.raises(SettingsError, match="the folder ppo-1 of this run is not finished or missing"):
        in_run("/old/ppo-1/model", tmp_path)


@pytest.mark.parametrize("status", ["failed", "planned", "running"])
def test_another_run_s_model_counts_as_long_as_the_stage_of_its_key_is_not_done_here(
    tmp_path: Path, status: str
) -> None:
    """The recipe names it, and the run has none in its place."""
    other = "/other/reward-1/model"
    stages = {"reward": {"status": status, "folder": "reward-1"}}
    (tmp_path / "summary.json").write_text(json.dumps({"stages": stages}))
    assert in_run(other, tmp_path) == other
    write_summary(tmp_path, reward="reward-1")
    with pytest.raises(SettingsError, match="the folder reward-1 of this run is not finished or missing"):
        in_run(other, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        '{"stages": {"re',
        "[]",
        "{}",
        '{"stages": []}',
        '{"stages": {"reward": {}}}',
        '{"stages": {"reward": 1}}',
        "\xff",
    ],
)
def test_a_damaged_summary_is_named_with_its_cure(tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(SettingsError) as refused:
        in_run("/old/reward-1/model", tmp_path)
    assert str(refused.value).startswith(f"{tmp_path / 'summary.json'}: not a summary of a run (")
    assert str(refused.value).endswith("delete it and run again")


def test_a_summary_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> str:
        raise PermissionError(13, "Permission denied")

    write_summary(tmp_path, reward="reward-1")
    monkeypatch.setattr(Path, "read_text", forbidden)
    with pytest.raises(SettingsError, match=r"summary\.json: not a summary of a run \(.*Permission denied"):
        in_run("/old/reward-1/model", tmp_path)


def test_the_command_that_makes_a_missing_folder_anew_can_be_copied(tmp_path: Path) -> None:
    """Whatever the run is called."""
    run_dir = tmp_path / "my run"
    run_dir.mkdir()
    write_summary(run_dir, reward="reward-1")
    with pytest.raises(SettingsError) as refused:
        in_run("/old/reward-1/model", run_dir)
    _, command, _ = str(refused.value).split("`")
    assert shlex.split(command) == ["rlhf", "run", str(run_dir / "recipe.yaml"), "--run-dir", str(run_dir)]


def test_sft_is_what_the_first_round_started_from(chain: dict[str, Path], tmp_path: Path) -> None:
    """A later round may start from the policy of the round before; base is what SFT started from."""
    later = tmp_path / "ppo-later"
    shutil.copytree(chain["ppo"], later)
    settings = (later / "settings.yaml").read_text().replace(f"model: {chain['sft']}", f"model: {chain['ppo']}", 1)
    (later / "settings.yaml").write_text(settings)
    found = find_subjects(tmp_path, {"ppo": later})
    assert {name: one.made_by.folder for name, one in found.items() if one.made_by} == {
        "base": chain["pretrain"], "sft": chain["sft"], "ppo": later,
    }  # fmt: skip


def test_an_evaluation_is_current_while_the_models_are_the_same(chain: dict[str, Path], tmp_path: Path) -> None:
    assert is_current(tmp_path, {})
    assert not is_current(tmp_path, {"pretrain": chain["pretrain"]})
    evaluate(tmp_path, {"pretrain": chain["pretrain"]}, cheap(None))
    assert is_current(tmp_path, {"pretrain": chain["pretrain"], "reward": chain["reward"]})
    assert not is_current(tmp_path, {"sft": chain["sft"]})
