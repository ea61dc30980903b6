"""Two processes: one is killed and the other does not wait for it; two runs at once do not meet."""

import json
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

from campaign import differences
from faults_world import write_world
from forking import begin
from launching import ranks

# Text that is read by a stage; in the process whose rank is in the file `hangs`, the fifth step waits for something
# that does not come. From that step on, nothing moves: now half a hundredth of `stop_hung_after` is enough, in which
# processes that live write six times where they are.
HANGS = """
import os, time
from pathlib import Path
from rlhf.recipes import demo_world
def documents():
    return [{"text": text} for text in demo_world.documents(num=60)]
if Path("hangs").exists():
    from rlhf.stages import watchdog
    from rlhf.stages.pretrain import train
    watchdog.SECONDS_BETWEEN_WORDS = 0.5
    optimise, calls = train.optimise, []
    def hang():
        time.sleep(600)
    def step(*arguments):
        calls.append(1)
        if len(calls) == 5:
            assert watchdog._current.interval == 0.5
            watchdog._current.limit /= 200
            if os.environ.get("RANK") == Path("hangs").read_text():
                hang()
        return optimise(*arguments)
    train.optimise = step
"""
# The pretrain stage in two processes.
WORDS = [
    "run",
    "recipe.yaml",
    "--to",
    "pretrain",
    "--run-dir",
    "run",
    "num_processes=2",
    "pretrain.data=text:documents",
]


def prepare(home: Path, hangs: str | None) -> None:
    """A working directory; rank `hangs` will hang."""
    write_world(home)
    (home / "text.py").write_text(HANGS)
    if hangs is not None:
        (home / "hangs").write_text(hangs)


def test_a30_two_runs_at_once_do_not_meet_and_one_whose_process_is_killed_ends_in_seconds_and_then_like_the_other(
    tmp_path: Path,
) -> None:
    """Accelerate's own port is taken. What becomes of a killed rank 1 is in tests/pipeline/test_signals.py."""
    homes = [tmp_path / name for name in ("one", "killed")]
    prepare(homes[0], hangs=None)
    prepare(homes[1], hangs="0")
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # taken already is as good
            taken.bind(("", 29500))
            taken.listen()
        one, killed = (begin(*WORDS, cwd=home, charts=False) for home in homes)
        while not any(path.read_text().count("\n") >= 3 for path in homes[1].glob("run/pretrain-*/metrics.jsonl")):
            assert killed.process.exitcode is None
            time.sleep(0.01)
        os.kill(ranks(homes[1])["RANK=0"], signal.SIGKILL)
        ended = killed.end(60)  # what waits for a process that is gone, waits for hours
        assert ranks(homes[1]) == {}
        assert ended.returncode == 1
        last = ended.stderr.splitlines()[-1]
        assert last.startswith("error: pretrain: ")
        assert "It was rank 0 (pid " in last
        assert "it goes on from step" in last
        (homes[1] / "hangs").unlink()
        again = begin(*WORDS, cwd=homes[1], charts=False)
        for run, words in ((one, ""), (again, "resuming from step")):
            ended = run.end(300)
            assert ended.returncode == 0, ended
            assert words in ended.stdout
    for home in homes:
        manifest = json.loads(next(home.glob("run/pretrain-*/manifest.json")).read_text())
        assert manifest["made_with"]["processes"] == 2
        assert ranks(home) == {}
    assert pretrain_differences(homes[1] / "run", homes[0] / "run") == []


def test_a_process_that_hangs_ends_all_and_is_named_with_what_it_was_doing(tmp_path: Path) -> None:
    prepare(tmp_path, hangs="1")
    ended = begin(*WORDS, "stop_hung_after=600", cwd=tmp_path, charts=False).end(240)
    assert ended.returncode == 1, ended
    assert ranks(tmp_path) == {}
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("error: pretrain: it stands still: rank 1 (pid ")
    assert "after step 4" in last
    assert "raise stop_hung_after, which is 3 seconds" in last
    assert "it goes on from step 4" in last
    [log] = (tmp_path / "run").glob("pretrain-*/error.log")
    assert "in hang" in log.read_text()  # where it hangs


def pretrain_differences(ours: Path, theirs: Path) -> list[str]:
    """Of all but the stages that are not there."""
    return [line for line in differences(ours, theirs) if not line.startswith(("sft: []", "reward: []", "ppo: []"))]
