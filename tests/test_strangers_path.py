"""The way of somebody who has Python, the wheel, and text, pairs and preferences of their own: no line of Python.

The wheel is installed into a new environment, in which its dependencies are found in the one of the tests. What needs
torch is forked from a process of that environment, so that it is imported once.
"""

import csv
import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from wheels import newest_wheel

THINGS = ("kettle", "lamp", "chair", "gate", "letter", "clock", "boat", "mirror")
TASKS = [(verb, thing) for verb in ("clean", "mend", "move", "paint") for thing in THINGS]
TINY = (
    "pretrain.hidden_size=16", "pretrain.num_layers=1", "pretrain.num_heads=2", "pretrain.num_steps=2",
    "sft.num_epochs=1", "reward.num_epochs=1", "ppo.num_iterations=1", "ppo.rollout_batch_size=4",
    "ppo.max_new_tokens=8", "ppo.num_eval_samples=1",
)  # fmt: skip
FORKED = """
import json, sys
from pathlib import Path
sys.path.append(sys.argv[1])
import forking, rlhf
done = [
    forking.rlhf(*words, cwd=Path(), typed=typed, charts=words[0] == "report")
    for words, typed in json.loads(sys.argv[2])
]
print(json.dumps([list(rlhf.__path__), *map(vars, done)]))
"""

Call = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*install, newest_wheel(tmp_path_factory.mktemp("build"))], check=True, capture_output=True)
    # Of a folder that is added so, no further .pth is read: an editable install in it is not seen.
    (packages,) = folder.glob("lib/python*/site-packages")
    dependencies = {sysconfig.get_path(name) for name in ("purelib", "platlib")}
    (packages / "dependencies.pth").write_text("\n".join(dependencies), encoding="utf-8")
    return folder


@pytest.fixture
def stranger(environment: Path, tmp_path: Path) -> Call:
    """Types a command of the environment in an empty folder."""
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    variables |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def call(command: str, *words: str) -> subprocess.CompletedProcess[str]:
        typed = [environment / "bin" / command, *words]
        done = subprocess.run(typed, cwd=tmp_path, env=variables, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done

    return call


def write_files(folder: Path) -> None:
    """What a person may have: notes, a table of questions with answers, and which of two answers was better."""
    answers = {f"How do I {verb} a {thing}?": f"Look at the {thing}, then {verb} it slowly." for verb, thing in TASKS}
    (folder / "notes.txt").write_text("\n\n".join(answers.values()), encoding="utf-8")
    with (folder / "answers.csv").open("w", newline="", encoding="utf-8-sig") as file:  # as a spreadsheet writes it
        csv.writer(file).writerows([("question", "answer"), *answers.items()])
    with (folder / "preferences.jsonl").open("w", encoding="utf-8") as file:
        for prompt, answer in answers.items():
            file.write(json.dumps({"prompt": prompt, "chosen": answer, "rejected": "I do not know."}) + "\n")


def test_own_files_become_a_model_that_answers(stranger: Call, environment: Path, tmp_path: Path) -> None:
    assert "rlhf init my-run FILES" in stranger("rlhf").stdout
    write_files(tmp_path)
    written = stranger("rlhf", "init", "mine")
    assert "mine.yaml: pretrain, sft, reward, ppo" in written.stdout
    assert "left out" not in written.stdout
    before = (tmp_path / "mine.yaml").read_bytes()

    commands: list[tuple[list[str], str]] = [
        (["run", "mine.yaml", *TINY], ""),
        (["report", "runs/mine"], ""),
        (["chat", "runs/mine", "--max-new-tokens", "8", "--seed", "1"], "How do I mend a lamp?\nAnd a chair?\n"),
    ]
    (line,) = stranger("python", "-c", FORKED, str(Path(__file__).parent), json.dumps(commands)).stdout.splitlines()
    ours, *done = json.loads(line)
    assert [Path(folder) for folder in ours] == list(environment.glob("lib/python*/site-packages/rlhf"))
    asked = "> How do I mend a lamp?\n> And a chair?\n"
    for command in done:
        assert (command["returncode"], command["stderr"].replace(asked, "")) == (0, "")
    assert done[-1]["stderr"] == asked
    run, report, chat = (command["stdout"] for command in done)

    stages: dict[str, Any] = json.loads((tmp_path / "runs" / "mine" / "summary.json").read_text())["stages"]
    assert {stage: entry["status"] for stage, entry in stages.items()} == dict.fromkeys(
        ("pretrain", "sft", "reward", "ppo"), "done"
    )
    assert "report: runs/mine/report.html" in run
    assert report == "runs/mine/report.html\n"
    page = (tmp_path / "runs" / "mine" / "report.html").read_text(encoding="utf-8")
    assert page.count('class="verdict') >= 4
    assert len(chat.splitlines()) >= 2
    assert (tmp_path / "mine.yaml").read_bytes() == before
    assert "rlhf chat runs/mine" in stranger("rlhf").stdout
