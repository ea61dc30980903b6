"""Two processes: one is killed and the other does not wait for it; two runs at once do not meet."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from campaign import differences
from faults_world import processes_of, write_world

RLHF = str(Path(sys.executable).parent / "rlhf")


# Text that is read by a stage; in its process 1 the fifth step waits for something that does not come.
HANGS = """
import os, time
from rlhf.recipes import demo_world
def documents():
    return [{"text": text} for text in demo_world.documents(num=60)]
if os.environ.get("RANK") == "1":
    from rlhf.stages.pretrain import train
    optimise, calls = train.optimise, []
    def hang(*arguments):
        calls.append(1)
        if len(calls) == 5:
            time.sleep(600)
        return optimise(*arguments)
    train.optimise = hang
"""


def start(home: Path, run: str, *overrides: str) -> "subprocess.Popen[str]":
    """The pretrain stage in two processes, long enough to be killed in."""
    words = [RLHF, "run", "recipe.yaml", "num_processes=2", "pretrain.num_steps=100", "--to", "pretrain"]
    words += ["pretrain.eval_every=50", "--run-dir", str(home / run), *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        words, cwd=home, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("ranks")
    write_world(home)
    return home


def test_a30_two_runs_at_once_do_not_meet_and_one_whose_process_is_killed_ends_in_seconds_and_then_like_the_other(
    home: Path,
) -> None:
    """Accelerate's own port is taken. What becomes of a killed rank 1 is in tests/pipeline/test_signals.py."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # taken already is as good
            taken.bind(("", 29500))
            taken.listen()
        one, killed = start(home, "one"), start(home, "killed")
        while not any(path.read_text().count("\n") >= 5 for path in home.glob("killed/pretrain-*/metrics.jsonl")):
            assert killed.poll() is None
            time.sleep(0.01)
        os.kill(process_of_rank(home / "killed", 0), signal.SIGKILL)
        began = time.monotonic()
        said, _ = killed.communicate(timeout=60)
        assert time.monotonic() - began < 15
        assert processes_of(home / "killed") == []
        assert killed.returncode == 1
        assert said.splitlines()[-1].startswith("error: pretrain: ")
        assert "It was rank 0 (pid " in said
        assert "it goes on from step" in said
        again = start(home, "killed")
        for run, words in ((one, ""), (again, "resuming from step")):
            said, _ = run.communicate(timeout=300)
            assert run.returncode == 0, said
            assert words in said
    for name in ("one", "killed"):
        manifest = json.loads(next((home / name).glob("pretrain-*/manifest.json")).read_text())
        assert manifest["made_with"]["processes"] == 2
        assert processes_of(home / name) == []
    assert pretrain_differences(home / "killed", home / "one") == []


def test_a_process_that_hangs_ends_all_and_is_named_with_what_it_was_doing(home: Path) -> None:
    (home / "hangs.py").write_text(HANGS)
    run = start(home, "hung", "pretrain.data=hangs:documents", "stop_hung_after=3")
    said, _ = run.communicate(timeout=120)
    assert run.returncode == 1, said
    assert processes_of(home / "hung") == []
    last = said.splitlines()[-1]
    assert last.startswith("error: pretrain: it stands still: rank 1 (pid ")
    assert "after step 4" in last
    assert "it goes on from step 4" in last
    [log] = (home / "hung").glob("pretrain-*/error.log")
    assert "in hang" in log.read_text()  # where it hangs


def process_of_rank(run: Path, rank: int) -> int:
    (found,) = (
        number
        for number in processes_of(run, ranks_alone=True)
        if b"RANK=%d" % rank in Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
    )
    return found


def pretrain_differences(ours: Path, theirs: Path) -> list[str]:
    """Of all but the stages that are not there."""
    return [line for line in differences(ours, theirs) if not line.startswith(("sft: []", "reward: []", "ppo: []"))]
