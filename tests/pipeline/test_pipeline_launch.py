"""Stages in processes of their own: the command, how the result is read, and what a signal does."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread, Timer
from time import monotonic, sleep
from typing import Any

import pytest
from forking import fork
from launching import start_by_forking
from pipeline_world import FakeStages

from rlhf.data.errors import RefusedError
from rlhf.pipeline import launch
from rlhf.pipeline.errors import DEBUG, RunFailed
from rlhf.pipeline.lock import held
from rlhf.pipeline.recipe import Recipe, load_recipe

STAGE = """
import json, os, signal, sys, time
def tell(state, message=""):
    content = {"state": state, "step": 1, "steps": 9, "message": message}
    open("status.tmp", "w").write(json.dumps(content)); os.replace("status.tmp", "status.json")
def stop(number, frame):
    time.sleep(0.3)  # saves
    tell("stopped"); sys.exit(0)
signal.signal(signal.SIGTERM, stop); signal.signal(signal.SIGINT, stop)
tell("running")
"""


RUN = Path("run")
"""The run folder; the stage of these tests has the working directory for its own."""


@pytest.fixture
def recipe(world: Path) -> Recipe:
    RUN.mkdir()
    return load_recipe("recipe.yaml")


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of device files: none."""
    folder = tmp_path / "dev"
    folder.mkdir()
    monkeypatch.setattr(launch, "DEVICES", folder)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return folder


def appears(path: Path, seconds: float = 120) -> bool:
    until = monotonic() + seconds
    while not path.exists() and monotonic() < until:
        sleep(0.02)
    return path.exists()


def run_script(monkeypatch: pytest.MonkeyPatch, recipe: Recipe, ending: str) -> None:
    """Run a stage whose process does `ending`."""
    monkeypatch.setattr(launch, "stays_in_process", lambda *_: False)
    monkeypatch.setattr(launch, "command", lambda *_: ([sys.executable, "-c", STAGE + textwrap.dedent(ending)], {}))
    with held(RUN, 0) as lock:
        launch.run_stage("sft", Path(), recipe, lock)


def words_of(recipe: Recipe, **changes: Any) -> str:
    return " ".join(launch.command("sft", Path("run/sft-1"), recipe.model_copy(update=changes))[0])


def test_the_command_is_what_a_person_would_type(recipe: Recipe, devices: Path) -> None:
    words = words_of(recipe)
    assert words.startswith(f"{sys.executable} -m accelerate.commands.launch --quiet ")
    assert words.endswith(" -m rlhf.stages.sft run/sft-1")
    assert " --num_processes 1 " in words
    assert "--multi_gpu" not in words
    assert " --num_processes 2 --multi_gpu " in words_of(recipe, num_processes=2)


def test_without_a_number_there_is_a_process_per_visible_gpu(
    recipe: Recipe, devices: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (devices / name).touch()
    assert launch.visible_gpus() == 3
    assert " --num_processes 3 --multi_gpu " in words_of(recipe)
    assert " --num_processes 2 --multi_gpu " in words_of(recipe, num_processes=2)
    for listed, number in (("", 0), ("-1", 0), ("2", 1), ("0, 1", 2), ("0,-1,1", 1), ("0,1,2,3", 3)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        assert launch.visible_gpus() == number
    assert not launch.stays_in_process(recipe, "sft")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert launch.stays_in_process(recipe, "sft")
    environment = launch.command("sft", Path("f"), recipe.model_copy(update={"num_processes": 2}))[1]
    assert environment["ACCELERATE_USE_CPU"] == "true"


def test_other_makers_gpus_are_seen_too(recipe: Recipe, devices: Path) -> None:
    assert launch.visible_gpus() == 0
    (devices / "dxg").touch()
    assert launch.visible_gpus() == 1
    (devices / "dxg").unlink()
    (devices / "kfd").touch()
    assert launch.visible_gpus() == 1
    (devices / "dri").mkdir()
    for number in (128, 129):
        (devices / "dri" / f"renderD{number}").touch()
    assert launch.visible_gpus() == 2


def test_an_accelerate_config_is_left_to_decide(recipe: Recipe, devices: Path) -> None:
    Path("ddp.yaml").write_text("num_machines: 1\nnum_processes: 4\n")
    words = words_of(recipe, accelerate_config="ddp.yaml")
    assert " --config_file ddp.yaml --main_process_port 0 " in words
    assert "--num_processes" not in words
    assert " --num_processes 2 " in words_of(recipe, accelerate_config="ddp.yaml", num_processes=2)


def test_the_port_is_any_free_one_unless_someone_named_it(recipe: Recipe, devices: Path) -> None:
    assert " --main_process_port 0 " in words_of(recipe, num_processes=2)
    for text in ("num_machines: 2\nnum_processes: 2\n", "main_process_port: 29501\n"):
        Path("config.yaml").write_text(text)
        assert "--main_process_port" not in words_of(recipe, accelerate_config="config.yaml")


def test_only_a_lone_cpu_process_stays_in_this_one(recipe: Recipe, devices: Path) -> None:
    assert launch.stays_in_process(recipe, "sft")
    assert not launch.stays_in_process(recipe.model_copy(update={"num_processes": 2}), "sft")
    assert not launch.stays_in_process(recipe.model_copy(update={"accelerate_config": "ddp.yaml"}), "sft")
    some = recipe.model_copy(update={"num_processes": {"pretrain": 2}})
    assert launch.stays_in_process(some, "sft")
    assert not launch.stays_in_process(some, "pretrain")


def test_the_status_file_decides_and_not_the_code(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    run_script(monkeypatch, recipe, "tell('done'); sys.exit(1)")
    with pytest.raises(RunFailed, match="out of pairs"):
        run_script(monkeypatch, recipe, "tell('failed', 'out of pairs')")
    with pytest.raises(RefusedError, match="row 3"):
        run_script(monkeypatch, recipe, "tell('refused', 'row 3'); sys.exit(2)")
    with pytest.raises(RunFailed, match="ended with code -9 and left no message"):
        run_script(monkeypatch, recipe, "os.kill(os.getpid(), signal.SIGKILL)")


# What launchers of others tell their workers, and what people set for a stage.
FOREIGN = {
    "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "ROLE_RANK": "1",
    "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True", "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4", "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_FSDP": "true",
    "ACCELERATE_MIXED_PRECISION": "fp16", "FSDP_VERSION": "1", "OMPI_COMM_WORLD_SIZE": "2", "PMI_SIZE": "2",
}  # fmt: skip
OF_PEOPLE = {
    "NCCL_DEBUG": "INFO", "TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_FR_BUFFER_SIZE": "9", "CUDA_VISIBLE_DEVICES": "",
    "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "RLHF_PROFILE": "1", "HF_HUB_OFFLINE": "1",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9",
}  # fmt: skip


@pytest.fixture
def surrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is a worker of another launcher."""
    for name, value in (FOREIGN | OF_PEOPLE).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("fails", [False, True])
def test_a_stage_in_this_process_is_no_worker_of_another_launcher(
    surrounded: None, world: Path, stages: FakeStages, rlhf: Callable[..., tuple[int, str, str]], fails: bool
) -> None:
    """And the process is what it was, afterwards."""
    seen: dict[str, str] = {}

    def look(_: Path) -> None:
        seen.update(os.environ)
        if fails:
            raise OSError("no room")

    stages.in_stage["pretrain"] = look
    before = dict(os.environ)
    assert rlhf("run", "recipe.yaml", "--run-dir", "run")[0] == int(fails)
    assert not FOREIGN.keys() & seen.keys()
    assert OF_PEOPLE.items() <= seen.items()
    assert dict(os.environ) == before


def test_a_launcher_is_told_nothing_of_another_one(
    surrounded: None, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    tell = "json.dump(dict(os.environ), open('seen', 'w')); tell('done')"
    monkeypatch.setattr(launch, "stays_in_process", lambda *_: False)
    monkeypatch.setattr(
        launch, "command", lambda *_: ([sys.executable, "-c", STAGE + tell], {"ACCELERATE_USE_CPU": "ours"})
    )
    with held(RUN, 0) as lock:
        launch.run_stage("sft", Path(), recipe, lock)
    seen = json.loads(Path("seen").read_text())
    assert not FOREIGN.keys() & seen.keys()
    assert (OF_PEOPLE | {"ACCELERATE_USE_CPU": "ours"}).items() <= seen.items()


@contextmanager
def another_trains_in(folder: Path) -> Iterator[None]:
    """A folder as it is while another process trains in it."""
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield
    finally:
        os.close(descriptor)


def refusal(folder: Path) -> str:
    return f"{folder}: another process is training in it; wait until it is done, or use another folder"


def test_a_stage_by_hand_is_refused_beside_a_run_that_trains_it_in_its_own_process(
    world: Path, stages: FakeStages, rlhf: Callable[..., tuple[int, str, str]]
) -> None:
    """And a folder is free again when its stage is done, for the next attempt too, while the run goes on."""
    folders: list[Path] = []

    def start_by_hand(folder: Path) -> None:
        folders.append(folder)
        words = [sys.executable, "-m", "rlhf.stages.sft", str(folder)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (2, f"error: {refusal(folder)}\n")
        if len(folders) == 1:
            raise OSError("no room")

    def look_back(_: Path) -> None:
        with another_trains_in(folders[0]):
            pass

    stages.in_stage = {"sft": start_by_hand, "reward": look_back}
    assert rlhf("run", "recipe.yaml", "--run-dir", "run")[0] == 1
    assert rlhf("run", "recipe.yaml", "--run-dir", "run")[0] == 0
    assert folders[0] == folders[1]
    assert stages.trained == ["pretrain", "sft", "sft", "reward", "ppo"]


@pytest.mark.parametrize("in_process", [True, False])
def test_a_run_is_refused_beside_a_stage_by_hand_and_takes_nothing_of_it_away(
    world: Path,
    stages: FakeStages,
    rlhf: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    in_process: bool,
) -> None:
    """Whether it would train the stage in its own process or not."""

    def fail(_: Path) -> None:
        raise OSError("no room")

    stages.in_stage["sft"] = fail
    assert rlhf("run", "recipe.yaml", "--run-dir", "run")[0] == 1
    (folder,) = RUN.glob("sft-*")
    stages.in_stage.clear()
    (folder / "settings.yaml").write_text("# as it was started\n")
    files = {name: (folder / name).read_text() for name in ("status.json", "error.log", "settings.yaml")}
    with monkeypatch.context() as patch:
        patch.setattr(launch, "stays_in_process", lambda *_: in_process)
        patch.setattr(launch, "command", lambda *_: pytest.fail("it was started"))
        with another_trains_in(folder):
            code, _out, err = rlhf("run", "recipe.yaml", "--run-dir", "run")
    assert (code, err) == (2, f"error: {refusal(folder)}\n")
    assert {name: (folder / name).read_text() for name in files} == files
    assert rlhf("run", "recipe.yaml", "--run-dir", "run")[0] == 0


@pytest.mark.parametrize("debug", [False, True])
def test_a_run_is_refused_where_a_stage_by_hand_came_while_its_launcher_started(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, debug: bool
) -> None:
    """What the files there tell is of that one."""
    monkeypatch.setattr(launch, "SECONDS_TO_DIE", 0.0)
    if debug:  # what the launcher says is shown then, not kept
        monkeypatch.setenv(DEBUG, "1")
    (folder := RUN / "sft-1").mkdir()
    words = [sys.executable, "-m", "rlhf.stages.sft", str(folder)]
    with ExitStack() as stack:

        def come_first(*_: Any) -> tuple[list[str], dict[str, str]]:
            stack.enter_context(another_trains_in(folder))
            (folder / "status.json").write_text('{"state": "running"}')
            return words, {}

        monkeypatch.setattr(launch, "stays_in_process", lambda *_: False)
        monkeypatch.setattr(launch, "command", come_first)
        with held(RUN, 0) as lock, pytest.raises(RefusedError) as refused:
            launch.run_stage("sft", folder, recipe, lock)
    assert str(refused.value) == refusal(folder)
    assert [path.name for path in folder.iterdir()] == ["status.json"]


def test_a_stage_whose_launcher_was_killed_is_not_taken_for_another_one_while_it_dies(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the folder until it is gone."""

    def slowly(*arguments: Any) -> None:
        Timer(0.5, signal_all, arguments).start()

    signal_all = launch.signal_all
    monkeypatch.setattr(launch, "signal_all", slowly)
    trains = """
    import fcntl
    if not os.fork():
        fcntl.flock(os.open(".", os.O_RDONLY), fcntl.LOCK_EX)
        os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
    """
    with pytest.raises(RunFailed, match=r"^its process ended with code -9 and left no message"):
        run_script(monkeypatch, recipe, trains)
    with another_trains_in(Path()):
        pass


def test_a_status_of_an_earlier_attempt_is_not_believed(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("status.json").write_text('{"state": "done"}')
    monkeypatch.setattr(sys.modules[__name__], "STAGE", "import sys\n")
    with pytest.raises(RunFailed, match="ended with code 3"):
        run_script(monkeypatch, recipe, "sys.exit(3)")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_passed_on_and_the_saving_waited_for(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    # The launcher dies of the signal at once while its child, in the same group, still saves.
    die = f"signal.signal({number}, signal.SIG_DFL), time.sleep(0.2), os.kill(os.getppid(), {number})"
    with pytest.raises(SystemExit) as stopped:
        run_script(monkeypatch, recipe, f"os.fork() and ({die}); time.sleep(600)")
    assert stopped.value.code == 128 + number
    assert json.loads(Path("status.json").read_text())["state"] == "stopped"
    assert handlers == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_that_came_too_late_still_ends_the_run(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    seal = "signal.signal({0}, lambda *_: (tell('done'), sys.exit(128 + {0}))); os.kill(os.getppid(), {0})"
    with pytest.raises(SystemExit) as stopped:
        run_script(monkeypatch, recipe, seal.format(int(number)) + "; time.sleep(600)")
    assert stopped.value.code == 128 + number
    assert json.loads(Path("status.json").read_text())["state"] == "done"


def test_what_a_failed_launch_said_is_kept_and_not_shown(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunFailed):
        run_script(monkeypatch, recipe, "raise OSError('no port')")
    assert "OSError: no port" in Path("error.log").read_text()
    with pytest.raises(RefusedError):
        run_script(monkeypatch, recipe, "tell('refused', 'row 3'); raise OSError")
    assert capfd.readouterr().err == ""
    run_script(monkeypatch, recipe, "tell('done'); print('deprecated', file=sys.stderr)")
    assert capfd.readouterr().err == "deprecated\n"
    run_script(monkeypatch, recipe, "tell('done'); raise OSError('a process was killed when all was done')")
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("RLHF_DEBUG", "1")
    with pytest.raises(RunFailed):
        run_script(monkeypatch, recipe, "raise OSError('no port')")
    assert "Traceback" in capfd.readouterr().err


# Two workers that save for a second after SIGTERM, both waiting for each other, as a stage does.
WORKER = """
import json, os, signal, sys, time
import torch.distributed as dist
rank = os.environ["RANK"]
def tell(state):
    if rank == "0":
        content = {"state": state, "step": 1, "steps": 9, "message": ""}
        open("status.tmp", "w").write(json.dumps(content)); os.replace("status.tmp", "status.json")
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
dist.init_process_group("gloo")
print(dist.get_world_size(), os.environ["MASTER_PORT"], os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"],
      file=open(f"worker-{rank}", "w"))
open(f"{os.getpid()}.pid", "w")
dist.barrier()
tell("running")
while not asked:
    time.sleep(0.02)
time.sleep(1)
dist.barrier()
open(f"saved-{rank}", "w")
tell("stopped")
"""


@pytest.mark.parametrize("kill_launcher", [False, True])
def test_workers_of_a_group_save_and_are_gone(world: Path, kill_launcher: bool) -> None:
    """Workers live in sessions of their own; the default port is taken meanwhile."""
    Path("fake_stage.py").write_text(WORKER)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with suppress(OSError):  # taken already is as good
            taken.bind(("", 29500))
            taken.listen()
        process = fork(run_group, world, kill_launcher)
        process.join(120)
    assert process.exitcode == 0
    told = [Path(f"worker-{rank}").read_text().split() for rank in (0, 1)]
    assert told[0] == told[1]
    assert (told[0][0], told[0][2]) == ("2", "35")  # stop_within and a little more
    assert told[0][1] != "29500"
    assert all(Path(f"saved-{rank}").exists() for rank in (0, 1)) != kill_launcher
    until = monotonic() + 60
    pids = [int(path.stem) for path in Path().glob("*.pid")]
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and monotonic() < until:
        sleep(0.05)
    assert len(pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def run_group(world: Path, kill_launcher: bool) -> None:
    """A run's part: a stage of two processes, and what ends it."""
    os.chdir(world)
    start_by_forking()
    RUN.mkdir()
    two = load_recipe("recipe.yaml", ["num_processes=2"])
    words, environment = launch.command("sft", Path(), two)
    launch.command = lambda *_: ([*words[:-3], "-m", "fake_stage"], environment)
    groups: list[int] = []
    watched = launch._watched

    def watch(mark: str, group: int, *others: Any) -> AbstractContextManager[None]:
        groups.append(group)
        return watched(mark, group, *others)

    launch._watched = watch

    def end() -> None:
        assert appears(Path("status.json"), seconds=100)
        os.kill(groups[0], signal.SIGKILL) if kill_launcher else os.kill(os.getpid(), signal.SIGTERM)

    Thread(target=end, daemon=True).start()
    with held(RUN, 0) as lock, pytest.raises(RunFailed if kill_launcher else SystemExit):
        launch.run_stage("sft", Path(), two, lock)


def test_kill_9_of_the_run_stops_its_stage_and_frees_the_folder_when_it_is_gone(recipe: Recipe) -> None:
    run = f"""
    from contextlib import contextmanager
    from pathlib import Path
    from rlhf.pipeline import launch
    from rlhf.pipeline.recipe import load_recipe
    from rlhf.pipeline.lock import held
    import sys
    launch.stays_in_process = lambda *_: False
    launch.command = lambda *_: ([sys.executable, "-c", {(STAGE + "time.sleep(600)")!r}], {{}})
    watched = launch._watched
    @contextmanager
    def told(*arguments):
        with watched(*arguments):
            Path("watched").touch()
            yield
    launch._watched = told
    with held(Path("run"), 0) as lock:
        launch.run_stage("sft", Path(), load_recipe("recipe.yaml"), lock)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(run)])
    assert appears(Path("status.json"))
    assert appears(Path("watched"))
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with held(RUN, patience=120):
        assert json.loads(Path("status.json").read_text())["state"] == "stopped"
