"""Cases of public bug reports that need a whole pipeline: folders that are used, saves that are cut, few prompts."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from campaign import differences, undisturbed
from faults_world import Server, write_rows
from points import STAGES, Point

Calls = dict[tuple[str, str], int]
PRETRAIN = ["run", "recipe.yaml", "--to", "pretrain", "--run-dir"]


@pytest.fixture(scope="module")
def calls(server: Server) -> Calls:
    """What a whole run, which lies in `whole`, called."""
    return undisturbed(server)


@pytest.fixture(scope="module")
def whole(server: Server, calls: Calls) -> Path:
    """A finished run."""
    return server.home / "whole"


def kill_late(server: Server, calls: Calls, run: Path, stage: str) -> list[Path]:
    """Kill a stage shortly before its end; its checkpoints."""
    for number in range(calls[stage, "write"] - 2, 0, -1):
        point = Point(stage, "write", number, "before")
        assert server.rlhf("run", "recipe.yaml", "--to", stage, "--run-dir", run.name, point=point).killed
        if not list(run.glob(f"{stage}-*/manifest.json")):
            break
        shutil.rmtree(next(run.glob(f"{stage}-*")))  # too late
    return sorted(run.glob(f"{stage}-*/checkpoints/step-*"))


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_a15_a_used_folder_is_reused_resumed_or_left_alone(server: Server, calls: Calls) -> None:
    run = server.home / "used"
    run.mkdir()
    (run / "notes.txt").write_text("mine")
    kill_late(server, calls, run, "pretrain")
    (folder,) = run.glob("pretrain-*")
    (folder / "notes.txt").write_text("mine too")
    resumed = server.rlhf(*PRETRAIN, "used")
    assert "pretrain: resuming from step" in resumed.said
    before = files(run)
    reused = server.rlhf(*PRETRAIN, "used")
    assert "(finished; nothing it depends on changed)" in reused.said
    assert files(run) == before
    changed = server.rlhf(*PRETRAIN, "used", "pretrain.learning_rate=0.5")
    assert re.search(r"pretrain: run pretrain-\w+ \(pretrain\.learning_rate \S+ → 0\.5\)", changed.said)
    (other,) = (path for path in run.glob("pretrain-*") if path != folder)
    kept = {name: content for name, content in before.items() if Path(name).is_relative_to(folder)}
    assert {name: content for name, content in files(run).items() if name in kept} == kept
    assert (other / "manifest.json").is_file()
    assert (run / "notes.txt").read_text() == "mine"
    assert "notes.txt" not in json.loads((folder / "manifest.json").read_text())["files"]


def _cut(checkpoint: Path) -> None:
    weights = next(checkpoint.glob("tensors/*.safetensors"))
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])


def _flip(checkpoint: Path) -> None:
    weights = next(checkpoint.glob("tensors/*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")


def _without_state(checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()


@pytest.mark.parametrize(
    ("stage", "damage", "reason"),
    [
        ("pretrain", _cut, r"\S+ has \d+ bytes, not \d+"),
        ("sft", _without_state, "it has no state.json"),
        ("reward", _flip, r"tensors/\S+\.safetensors has another hash"),
        ("ppo", _cut, r"\S+ has \d+ bytes, not \d+"),
    ],
)
def test_a16_a_damaged_checkpoint_is_named_and_the_one_before_ends_like_an_undisturbed_run(
    server: Server, calls: Calls, whole: Path, stage: str, damage: Callable[[Path], None], reason: str
) -> None:
    run = server.home / f"damaged-{stage}"
    if stage != "pretrain":  # which would find its tokens
        shutil.copytree(whole, run)
        for later in STAGES[STAGES.index(stage) :]:
            shutil.rmtree(next(run.glob(f"{later}-*")))
    before, newest = kill_late(server, calls, run, stage)
    damage(newest)
    ended = server.rlhf("run", "recipe.yaml", "--to", stage, "--run-dir", run.name)
    assert ended.code == 0, ended.said
    assert re.search(rf"^{stage}: warning: passed over the checkpoint {newest.name}: .*{reason}", ended.said, re.M)
    assert f"{stage}: resuming from step {int(before.name[-8:])} of" in ended.said
    not_run = tuple(f"{later}{sign}" for later in STAGES[STAGES.index(stage) + 1 :] for sign in (": []", "-"))
    assert [line for line in differences(run, whole) if not line.startswith(not_run)] == []


@pytest.mark.parametrize("batch", [8, 2])
def test_a21_five_prompts_are_all_used_whatever_the_rollout(server: Server, whole: Path, batch: int) -> None:
    run = server.home / f"few-{batch}"
    shutil.copytree(whole, run)
    prompts = [{"prompt": f"Write about a {hero} and a kite."} for hero in ("fox", "cat", "dog", "bear", "king")]
    write_rows(server.home / "five.jsonl", prompts)
    write_rows(server.home / "held_out.jsonl", [{"prompt": "Write about a wolf and a bell."}])
    words = ["ppo.data=five.jsonl", "ppo.eval_data=held_out.jsonl", f"ppo.rollout_batch_size={batch}"]
    ended = server.rlhf("run", "recipe.yaml", *words, "--run-dir", run.name)
    assert ended.code == 0, ended.said
    assert "5 prompts, 1 held out" in ended.said
    (made,) = (path for path in run.glob("ppo-*") if path.name not in {old.name for old in whole.glob("ppo-*")})
    rows = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert all(row["policy_grad_norm"] > 0 for row in rows)


def test_a28_every_model_folder_has_the_tokenizer_and_the_template(whole: Path) -> None:
    folders = [next(whole.glob(f"{stage}-*/model")) for stage in STAGES] + list(whole.glob("ppo-*/critic"))
    for name in ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json", "config.json"):
        found = {(folder / name).read_bytes() for folder in folders}
        assert len(found) == 1 or name == "config.json"
