"""What a stage read is found again, from any folder, by its digest; what is not found costs its own figures alone."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from ppo_world import model_folders, run_ppo
from stages_world import WORLD, run_stage

from rlhf.data.errors import DataError, SettingsError
from rlhf.recipes import demo_world
from rlhf.stages.artifact import Artifact
from rlhf.stages.evaluation.config import cheap
from rlhf.stages.evaluation.evaluate import evaluate
from rlhf.stages.evaluation.held_out import demonstrations
from rlhf.stages.evaluation.places import model_as_read, with_data_as_read
from rlhf.stages.evaluation.records import read_figures
from rlhf.stages.evaluation.subjects import find_subjects
from rlhf.stages.settings_file import read_settings
from rlhf.stages.sft.config import SFTSettings

REWARD = "def rate(prompts, responses):\n    return [float(len(text)) for text in responses]\n"


def write_demos(path: Path, num: int = 60, seed: int = 0) -> None:
    rows = [{"prompt": f"What is {n}?", "response": f"{n + seed}"} for n in range(num)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def other(tmp_path: Path, policy_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an SFT stage, in runs/a of its project; the working directory is another one."""
    project, here = tmp_path / "project", tmp_path / "some" / "where"
    project.mkdir()
    here.mkdir(parents=True)
    write_demos(project / "demos.jsonl")
    monkeypatch.chdir(project)
    folder = project / "runs" / "a" / "sft-1"
    run_stage("sft", folder, model="../policy", data="demos.jsonl", max_length=64)
    monkeypatch.chdir(here)
    return folder


def test_another_runs_data_and_model_are_found_beside_it_and_never_what_is_called_the_same_here(
    other: Path, tmp_path: Path
) -> None:
    write_demos(Path("demos.jsonl"), seed=1)
    told = evaluate(tmp_path, {"sft": other}, cheap(None))
    assert told["left_out"] == []
    assert [figures["model"] for figures in told["models"].values()] == [str(tmp_path / "project/../policy"), "sft-1"]
    loss = Artifact(other).manifest["metrics"]["eval_loss"]
    assert told["models"]["sft"]["response_perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)


def test_data_that_lie_in_the_working_directory_keep_the_name_that_the_settings_have(
    other: Path, tmp_path: Path
) -> None:
    shutil.copy(tmp_path / "project" / "demos.jsonl", ".")
    found = with_data_as_read(read_settings(other, SFTSettings), other)
    assert found.data.path == "demos.jsonl"
    assert demonstrations(other, read_settings(other, SFTSettings))


@pytest.mark.parametrize("there", [True, False])
def test_data_that_are_not_what_the_stage_read_cost_their_own_figures_and_are_named(
    other: Path, tmp_path: Path, there: bool
) -> None:
    """Of SFT alone the prompts are those of its demonstrations."""
    (tmp_path / "project" / "demos.jsonl").unlink()
    why = f"no such file or folder (looked from {Path.cwd()})"
    if there:
        write_demos(Path("demos.jsonl"), num=61)
        why = "not as sft-1 had it, by its digest"
    told = evaluate(tmp_path, {"sft": other}, cheap(None))
    assert told["left_out"] == [f"sft.data: demos.jsonl: {why}; left out: the perplexity of responses, all answers"]
    assert told["models"]["sft"]["response_perplexity"] is None
    assert told["models"]["sft"]["length"] is None
    assert read_figures(tmp_path) == told


def test_a_function_of_the_same_name_that_gives_other_rows_is_not_what_was_read(
    chain: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = demo_world.documents

    def changed(num: int = 4000, seed: int = 0) -> Any:
        yield from found(num, seed + 1)

    moved = tmp_path / "pretrain"
    shutil.copytree(chain["pretrain"], moved)  # without its tokens
    monkeypatch.setattr(demo_world, "documents", changed)
    evaluate(tmp_path, {"pretrain": moved}, cheap(None))  # which has no figures of the text that could be lost
    told = evaluate(tmp_path, {"pretrain": moved}, cheap(None).model_copy(update={"form": "full"}))
    where = f"pretrain.data: {WORLD}:documents"
    assert told["left_out"] == [f"{where}: not as pretrain had it, by its digest; left out: the perplexity of text"]
    assert told["models"]["base"]["text_perplexity"] is None


def test_without_its_prompts_ppo_has_perplexities_and_without_its_reward_function_all_but_scores(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "rates.py").write_text(REWARD)
    given = model_folders(tmp_path, tokenizer) | {"reward_model": None, "rewards": [{"function": "rates:rate"}]}
    run_ppo(tmp_path / "ppo", given, num_iterations=1)
    done = {"ppo": tmp_path / "ppo"}
    assert evaluate(tmp_path, done, cheap(None))["models"]["ppo"]["score"] is not None
    (tmp_path / "rates.py").write_text(REWARD.replace("float", "-"))
    kept = (tmp_path / "evaluation.jsonl").read_bytes()
    with pytest.raises(
        SettingsError, match=r"left out: scores, which evaluation\.json has of these models, and keeps; "
    ):
        evaluate(tmp_path, done, cheap(None))
    assert (tmp_path / "evaluation.jsonl").read_bytes() == kept
    (tmp_path / "evaluation.json").unlink()
    told = evaluate(tmp_path, done, cheap(None))
    assert told["left_out"] == ["ppo.rewards.0: rates:rate: not as ppo had it, by its digest; left out: scores"]
    assert told["models"]["ppo"]["score"] is None
    assert told["models"]["ppo"]["kl"] is not None
    (tmp_path / "rates.py").write_text(REWARD)
    (tmp_path / "held_out.jsonl").unlink()
    (tmp_path / "evaluation.json").unlink()
    (left_out,) = evaluate(tmp_path, done, cheap(None))["left_out"]
    assert left_out.startswith(f"ppo.eval_data: {tmp_path}/held_out.jsonl: no such file or folder")
    assert left_out.endswith("; left out: all answers")


def test_a_model_of_the_same_name_is_refused(other: Path, tmp_path: Path) -> None:
    """What is compared has to be there; a hub id is one, whatever lies beside the run."""
    (tmp_path / "policy" / "config.json").write_text('{"other": 1}')
    told = r"^sft\.model: .*project/\.\./policy: not as sft-1 had it, by its digest; put it back as it was, or evaluate"
    with pytest.raises(SettingsError, match=told):
        find_subjects(tmp_path, {"sft": other})
    manifest = Artifact(other).manifest
    (other / "manifest.json").write_text(json.dumps(manifest | {"inputs": {"model": "hub:gpt2"}}))
    (tmp_path / "project" / "gpt2").mkdir()
    assert model_as_read("sft.model", "gpt2", other) == "gpt2"


def test_what_the_manifest_does_not_tell_of_is_not_taken(other: Path) -> None:
    (other / "manifest.json").write_text(json.dumps({"stage": "sft", "files": {}}))
    with pytest.raises(DataError, match=r"^sft\.data: .*demos\.jsonl: not as sft-1 had it, by its digest$"):
        with_data_as_read(read_settings(other, SFTSettings), other)


DATED = """
from datetime import date

def rows():
    for number in range(8):
        yield {"prompt": f"What is {number}?", "day": date(2024, 1, 1 + number)}

def is_text(prompts, responses, rows):
    return [float(isinstance(row["day"], str)) for row in rows]
"""


def test_a_reward_function_is_given_rows_as_in_training(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "dated.py").write_text(DATED)
    given = model_folders(tmp_path, tokenizer) | {
        "reward_model": None, "rewards": [{"function": "dated:is_text"}], "data": "dated:rows", "eval_data": None,
        "eval_share": 0.5,
    }  # fmt: skip
    metrics = run_ppo(tmp_path / "ppo", given, num_iterations=1)
    assert metrics["score"] == 1.0
    assert evaluate(tmp_path, {"ppo": tmp_path / "ppo"}, cheap(None))["models"]["ppo"]["score"]["mean"] == 1.0
