"""A run on two machines, which here are two processes of one: `rlhf run` on the first, `follow` on the second."""

import json
import os
import socket
import sys
import textwrap
from pathlib import Path
from threading import Event, Thread
from time import sleep
from typing import Any

import pytest
from forking import become, fork, free_port
from launching import start_by_forking

from rlhf.pipeline import cli, follow, launch
from rlhf.pipeline.errors import RunFailed
from rlhf.pipeline.lock import held
from rlhf.pipeline.recipe import Recipe, load_recipe
from rlhf.pipeline.summary import Entry, write_summary

# A rank: it tells how many there are, and all wait for each other.
STAGE = """
import json, os, sys
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
folder = Path(sys.argv[1])
(folder / f"rank-{rank}").write_text(f"{world} {os.environ['GROUP_RANK']} {os.environ['RLHF_NUM_PROCESSES']}")
dist.barrier()
if rank == 0:
    (folder / "status.json").write_text(json.dumps({"state": "done", "step": 1, "steps": 1, "message": ""}))
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def recipe(world: Path) -> Recipe:
    Path("machines.yaml").write_text(
        "distributed_type: MULTI_GPU\nnum_machines: 2\nnum_processes: 2\nmachine_rank: 0\nuse_cpu: true\n"
        f"main_process_ip: 127.0.0.1\nmain_process_port: {free_port()}\nmixed_precision: 'no'\n"
    )
    return load_recipe("recipe.yaml", ["accelerate_config=machines.yaml"])


def test_each_machine_starts_its_part_of_a_stage(recipe: Recipe) -> None:
    Path("fake_stage.py").write_text(textwrap.dedent(STAGE))
    run_dir = Path("run").absolute()
    (run_dir / "sft-1").mkdir(parents=True)
    machines = [fork(machine, Path.cwd()) for machine in (first_machine, other_machine)]
    for each in machines:
        each.join(120)
    said = Path("said").read_text()
    assert [each.exitcode for each in machines] == [0, 0], said
    assert [(run_dir / "sft-1" / f"rank-{rank}").read_text() for rank in (0, 1)] == ["2 0 2", "2 1 2"]
    assert not (run_dir / "sft-1" / launch.ORDER).exists()
    assert "machine 1: fake_stage run/sft-1" in said


def first_machine(world: Path) -> None:
    """What `rlhf run` does there for a stage."""
    os.chdir(world)
    start_by_forking()
    recipe = load_recipe("recipe.yaml", ["accelerate_config=machines.yaml"])
    words, environment = launch.command("sft", Path("run/sft-1"), recipe)
    assert "--main_process_port" not in words
    launch.command = lambda *_: ([*words[:-2], "fake_stage", words[-1]], environment)
    run_dir = Path("run").absolute()
    with held(run_dir, 0) as fd:
        launch.run_stage("sft", run_dir / "sft-1", recipe, fd)
        write_summary(run_dir, {"sft": Entry("done")})


def other_machine(world: Path) -> None:
    """`rlhf follow`, which looks more often than over a network."""
    os.chdir(world)
    said = os.open("said", os.O_CREAT | os.O_WRONLY)
    for number in (1, 2):
        os.dup2(said, number)
    start_by_forking()
    follow.SECONDS_BETWEEN_LOOKS = 0.2
    become(("follow", str(Path("run").absolute()), "1"))


class Launches:
    """Stands in for the launcher, and writes down what was started."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started: list[list[str]] = []
        self.received: list[int] = []
        self.code = 0
        monkeypatch.setattr(follow, "to_its_end", self)

    def __call__(self, words: list[str], environment: dict[str, str], *_: Any) -> launch.Ended:
        assert environment == {"A": "b"}
        self.started.append(words)
        return launch.Ended(self.code, self.received, "out of pairs")


@pytest.fixture
def launches(world: Path, monkeypatch: pytest.MonkeyPatch) -> Launches:
    Path("run").mkdir()
    monkeypatch.setattr(follow, "SECONDS_BETWEEN_LOOKS", 0.02)
    monkeypatch.setattr(follow, "sleep", lambda _: sleep(0.01))
    return Launches(monkeypatch)


def order(stage: str, pid: int, mark: str = "") -> None:
    path = Path("run", f"{stage}-1", launch.ORDER)
    path.parent.mkdir(parents=True, exist_ok=True)
    content: dict[str, Any] = {"words": ["launch", "-m", f"rlhf.stages.{stage}", f"run/{stage}-1"], "seconds": 1.0}
    content |= {"environment": {"A": "b"}, "cwd": str(Path.cwd()), "mark": mark or stage}
    path.write_text(json.dumps(content | {"host": socket.gethostname(), "pid": pid}))


def followed(status: str, *stages: str) -> int:
    """The exit code of a machine that follows a run of these stages, which ends when that machine has nothing to do."""
    code: list[int] = []
    ordered, idle = Event(), Event()
    find = follow.Run.order

    def finding(run: follow.Run, known: set[str]) -> dict[str, Any] | None:
        all_ordered = ordered.is_set()
        found = find(run, known)
        if found is None and all_ordered:
            idle.set()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follow.Run, "order", finding)
        with held(Path("run"), 0):
            thread = Thread(target=lambda: code.append(follow.follow(Path("run").absolute(), 3, lambda _: None)))
            thread.start()
            for stage in stages:
                order(stage, os.getpid())
            write_summary(Path("run"), {stage: Entry(status) for stage in stages})  # type: ignore[arg-type]
            ordered.set()
            while thread.is_alive() and not idle.wait(0.01):
                pass
        thread.join(60)
    return code[0]


def test_a_machine_starts_each_stage_once_with_its_own_number_and_ends_when_the_run_does(launches: Launches) -> None:
    assert followed("done", "pretrain", "sft") == 0
    assert sorted(launches.started) == [
        [sys.executable, "launch", "--machine_rank", "3", "-m", f"rlhf.stages.{stage}", f"run/{stage}-1"]
        for stage in ("pretrain", "sft")
    ]


def test_a_run_that_did_not_come_to_its_end_ends_the_others_with_code_1(launches: Launches) -> None:
    assert followed("failed", "sft") == 1


def test_what_an_earlier_run_left_is_not_started(launches: Launches) -> None:
    order("ppo", os.getpid() + 1)
    assert followed("done") == 0
    assert launches.started == []


def test_a_signal_ends_it_with_its_code(launches: Launches) -> None:
    launches.received = [15]
    assert followed("done", "sft") == 143


def test_a_place_that_it_cannot_use_once_it_has_begun_is_a_failure(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: str) -> None:
        raise PermissionError(13, "Permission denied", "there")

    monkeypatch.setattr(os, "chdir", denied)
    order("sft", os.getpid())
    with held(Path("run"), 0), pytest.raises(RunFailed, match=r"^there: Permission denied; "):
        follow.follow(Path("run").absolute(), 3, lambda _: None)


def test_where_no_run_begins_it_says_so(launches: Launches) -> None:
    said: list[str] = []
    assert follow.follow(Path("run"), 1, said.append, patience=0.1) == 1
    assert said == ["run: no run has begun here within 0.1 s; start `rlhf run` on machine 0"]


@pytest.mark.parametrize("words", [[], ["run"], ["run", "0"], ["run", "first"]])
def test_it_says_how_it_is_used(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["follow", *words])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: rlhf follow: ")
    assert ("MACHINE" if words else "RUN") in said


def test_the_command_ends_with_the_code_of_what_it_followed(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(follow, "follow", lambda *arguments: asked.append(arguments[:2]) or 1)
    with pytest.raises(SystemExit) as ended:
        cli.main(["follow", "run", "2"])
    assert (ended.value.code, asked) == (1, [(Path("run").absolute(), 2)])


def test_a_machine_is_ended_when_the_run_is_gone(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the first machine is lost: its processes would wait for those of the others."""
    ended = launch.to_its_end([sys.executable, "-c", "import time; time.sleep(600)"], {}, 5, None, lambda: True)
    assert (ended.code, ended.received) == (-15, [])


def test_a_machine_whose_part_ends_says_so_to_the_first(launches: Launches, capsys: pytest.CaptureFixture[str]) -> None:
    launches.code = 1
    assert followed("failed", "sft") == 1
    assert json.loads(Path("run/sft-1", launch.LOST).read_text()) == {"mark": "sft", "machine": 3}
    assert capsys.readouterr().err == "out of pairs"


def test_the_first_machine_ends_its_part_when_another_has_lost_its_own(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a process there was killed, and those here wait for it in a library that does not hear of it."""
    waits = [sys.executable, "-c", "import time; time.sleep(600)", "-m", "stage", "folder"]
    monkeypatch.setattr(launch, "command", lambda *_: (waits, {}))
    folder = Path("sft-1")
    folder.mkdir()

    def lose() -> None:
        while not (folder / launch.ORDER).is_file():
            sleep(0.05)
        (folder / launch.LOST).write_text(json.dumps({"mark": "of another run", "machine": 1}))
        sleep(0.3)
        mark = json.loads((folder / launch.ORDER).read_text())["mark"]
        (folder / launch.LOST).write_text(json.dumps({"mark": mark, "machine": 4}))

    thread = Thread(target=lose)
    thread.start()
    with held(Path(), 0) as fd, pytest.raises(RunFailed, match=r"^machine 4: its part ended and left no message"):
        launch.run_stage("sft", folder, recipe, fd)
    thread.join()
    assert list((folder / "checkpoints").iterdir()) == []
