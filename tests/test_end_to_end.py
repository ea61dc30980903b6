"""The whole chain through the command line on a small recipe.

The commands that the README shows run in tests/test_docs_commands.py; the installed one is called in
tests/pipeline/test_odd_homes.py.
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import forking
import pytest

# The demo with a tenth of a per cent of the work.
SMALL = [
    *("pretrain.hidden_size=16", "pretrain.num_layers=1", "pretrain.num_heads=2", "pretrain.num_steps=4"),
    *("pretrain.eval_every=2", "pretrain.data.options.num=150", "sft.data.options.num=60", "sft.num_epochs=1"),
    *("reward.data.options.num=40", "reward.num_epochs=1", "reward.max_new_tokens=16", "ppo.max_new_tokens=16"),
    *("ppo.num_iterations=2", "ppo.rollout_batch_size=8", "ppo.num_eval_samples=1"),
]


def rlhf(*words: str, cwd: Path, code: int = 0, charts: bool = False) -> forking.Command:
    done = forking.rlhf(*words, cwd=cwd, charts=charts)
    assert done.returncode == code, f"rlhf {' '.join(words)}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


def summary(run: Path) -> dict[str, Any]:
    stages: dict[str, Any] = json.loads((run / "summary.json").read_text())["stages"]
    return stages


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory in which `rlhf run demo` ran once, small."""
    home = tmp_path_factory.mktemp("home")
    rlhf("run", "demo", *SMALL, cwd=home, charts=True)
    return home


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_one_command_takes_raw_text_to_a_ppo_tuned_model(home: Path) -> None:
    run = home / "runs" / "demo"
    stages = summary(run)
    assert list(stages) == ["pretrain", "sft", "reward", "ppo"]
    names = {
        "pretrain": {"val_loss", "vocab_size"},
        "sft": {"eval_loss", "base_eval_loss"},
        "reward": {"accuracy", "longer_wins_accuracy"},
        "ppo": {"true_quality", "sft_true_quality", "win_rate", "kl", "eos_share", "sft_eos_share"},
    }
    for stage, entry in stages.items():
        assert set(entry) >= {"status", "folder", "model", "seconds", "metrics"}
        assert entry["status"] == "done"
        assert names[stage] <= set(entry["metrics"])
        assert (run / entry["folder"] / "manifest.json").is_file()
        assert (run / entry["model"] / "config.json").is_file()
        assert (run / entry["model"] / "chat_template.jinja").is_file()
    assert (run / "recipe.yaml").is_file()
    report = (run / "report.html").read_text(encoding="utf-8")
    assert "<svg" in report
    assert not re.search(r"(src|href)=[\"']https?:", report)


def test_the_same_command_again_reuses_all_and_touches_nothing(home: Path) -> None:
    run = home / "runs" / "demo"
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    said = rlhf("run", "demo", *SMALL, cwd=home).stdout
    assert said.count(": reuse ") == 4
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()} == before


def test_the_plan_after_a_changed_setting_names_what_would_run_and_why(home: Path) -> None:
    said = rlhf("plan", "demo", *SMALL, "reward.learning_rate=5e-4", cwd=home).stdout
    lines = {line.split()[0]: line for line in said.splitlines() if line.strip()}
    assert "reuse" in lines["pretrain"]
    assert "reuse" in lines["sft"]
    assert "run" in lines["reward"]
    assert "reward.learning_rate 0.002 → 0.0005" in lines["reward"]
    assert "its input reward will be new" in lines["ppo"]


def test_a_reward_model_below_its_bar_ends_the_run_before_ppo(home: Path) -> None:
    shutil.copytree(home / "runs" / "demo", home / "runs" / "barred")
    command = ["run", "demo", *SMALL, "reward.min_over_longer_wins=1", "--run-dir", "runs/barred"]
    stopped = rlhf(*command, cwd=home, code=1)
    assert "less than reward.min_over_longer_wins 1" in stopped.stderr
    assert stopped.stdout.count(": reuse ") == 3
    assert "done, gate failed" in rlhf("status", "runs/barred", cwd=home).stdout
    report = (home / "runs" / "barred" / "report.html").read_text(encoding="utf-8")
    assert "The reward model's report card" in report
    assert "PPO does not start from it" in report


def test_a_stage_of_two_processes_makes_the_figures_of_one(home: Path) -> None:
    """SFT; a command of the README starts PPO so, tests/faults/test_ranks.py pretraining."""
    shutil.copytree(home / "runs" / "demo", home / "runs" / "two")
    rlhf("run", "demo", *SMALL, "num_processes=2", "--force", "sft", "--to", "sft", "--run-dir", "runs/two", cwd=home)
    one, two = (summary(home / "runs" / name)["sft"] for name in ("demo", "two"))
    manifest = json.loads((home / "runs" / "two" / two["folder"] / "manifest.json").read_text())
    assert manifest["made_with"]["processes"] == 2
    assert two["metrics"].keys() == one["metrics"].keys()
    for name in ("base_eval_loss", "eval_loss"):
        assert two["metrics"][name] == pytest.approx(one["metrics"][name], rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["demo", "ppo.data=nothing.jsonl"], "nothing.jsonl"),
        (["demo", "sft.data=empty.jsonl"], "empty.jsonl: it is empty"),
        (["demo", "ppo.kl_coeff=0.1"], "ppo: no setting 'kl_coeff'; did you mean 'kl_coef'?"),
        (["demo", "rewrad.learning_rate=1"], "did you mean 'reward'?"),
        (["demo", "sft.learning_rate=-1"], "sft.learning_rate"),
        (["demo", "sft.data=unanswered.jsonl"], "unanswered.jsonl row 2: empty response"),
        (["demo", "--run-dir", "a-file"], "a-file"),
        (["domo"], "did you mean 'demo'?"),
    ],
)
def test_bad_input_is_refused_with_code_2_and_one_message_before_anything_is_written(
    home: Path, change: list[str], message: str
) -> None:
    (home / "empty.jsonl").write_text("")
    (home / "a-file").write_text("mine")
    write(home / "unanswered.jsonl", [{"prompt": "a", "response": "b"}, {"prompt": "c", "response": " "}])
    run = home / "runs" / "demo"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    folders = set(os.listdir(run))
    refused = rlhf("run", *change, cwd=home, code=2)
    assert message in refused.stderr
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert set(os.listdir(run)) == folders
    assert (home / "a-file").read_text() == "mine"
