"""The whole chain through the command line on a small recipe, and every command that the README shows.

The installed command is called in tests/pipeline/test_odd_homes.py.
"""

import glob
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import forking
import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

# The demo with a tenth of a per cent of the work.
SMALL = [
    *("pretrain.hidden_size=16", "pretrain.num_layers=1", "pretrain.num_heads=2", "pretrain.num_steps=4"),
    *("pretrain.eval_every=2", "pretrain.data.options.num=150", "sft.data.options.num=60", "sft.num_epochs=1"),
    *("reward.data.options.num=40", "reward.num_epochs=1", "reward.max_new_tokens=16", "ppo.max_new_tokens=16"),
    *("ppo.num_iterations=2", "ppo.rollout_batch_size=8", "ppo.num_eval_samples=1"),
]


def rlhf(*words: str, cwd: Path, code: int = 0, typed: str = "") -> forking.Command:
    done = forking.rlhf(*words, cwd=cwd, typed=typed)
    assert done.returncode == code, f"rlhf {' '.join(words)}\n{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done


def summary(run: Path) -> dict[str, Any]:
    stages: dict[str, Any] = json.loads((run / "summary.json").read_text())["stages"]
    return stages


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory in which `rlhf run demo` ran once, small, and with files of a user's own beside it."""
    home = tmp_path_factory.mktemp("home")
    rlhf("run", "demo", *SMALL, cwd=home)
    recipe = re.search(r"```yaml\n(.*?)```", README, re.DOTALL)
    assert recipe is not None
    base = str(next((home / "runs" / "demo").glob("pretrain-*/model")).relative_to(home))
    text = recipe.group(1).replace("Qwen/Qwen3-0.6B", base)
    text = text.replace("sft:\n", "sft:\n  max_length: 96\n  global_batch_size: 4\n")
    text = text.replace("reward:\n", "reward:\n  max_length: 96\n  global_batch_size: 4\n")
    text = text.replace(
        "ppo:\n",
        "ppo:\n  num_iterations: 2\n  rollout_batch_size: 4\n  max_prompt_length: 64\n  max_new_tokens: 8\n",
    )
    (home / "mine.yaml").write_text(text)
    heroes = ("fox", "cat", "dog", "bear", "duck", "goat", "king", "wolf")
    write(home / "demonstrations.jsonl", [{"prompt": f"Who is {h}?", "response": f"A {h}."} for h in heroes])
    write(home / "rankings.jsonl", [
        {"prompt": f"Who is {h}?", "responses": [f"A {h}.", "No.", "Who?"], "ranks": [1, 2, 2]} for h in heroes
    ])  # fmt: skip
    (home / "input.txt").write_text("To be, or not to be: that is the question. " * 30)
    write(home / "prompts.jsonl", [{"prompt": f"Who is {h}?"} for h in heroes])
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


TINY = [
    f"pretrain.{setting}"
    for setting in (
        "hidden_size=16", "num_heads=2", "num_layers=1", "block_size=16", "num_steps=2", "global_batch_size=2",
        "sample_length=4",
    )
]  # fmt: skip
"""What makes an hour on a GPU a second on a CPU."""


def readme_commands() -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    lines = [line.split("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("rlhf ")]


def test_every_command_of_the_readme_runs(home: Path) -> None:
    shutil.copy(ROOT / "accelerate_config.yaml", home)
    commands = [command.replace("num_processes=4", "num_processes=2") for command in readme_commands()]
    assert len(commands) >= 10
    processes = []
    for command in commands:
        words = [word for part in shlex.split(command)[1:] for word in (glob.glob(part, root_dir=home) or [part])]
        if words[1].startswith("shakespeare"):
            words += TINY
        launched = any(word.startswith(("num_processes=", "accelerate_config=")) for word in words)
        before = set(home.glob("runs/mine/ppo-*"))
        said = rlhf(*words, *(["--force", "ppo"] if launched else []), cwd=home, typed="Who is the fox?\n")
        assert said.stderr in ("", "> Who is the fox?\n")  # a question that is piped in is shown
        if launched:  # and not reused
            (new,) = set(home.glob("runs/mine/ppo-*")) - before
            processes.append(json.loads((new / "manifest.json").read_text())["made_with"]["processes"])
    assert processes == [2, 1]
    assert os.path.exists(home / "runs" / "only-sft" / "summary.json")


def test_a_stage_of_two_processes_makes_the_figures_of_one(home: Path) -> None:
    """SFT; the next test but one above starts PPO so, tests/faults/test_ranks.py pretraining."""
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
