"""Stages in processes of their own: the command, how the result is read, and what a signal does."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from time import monotonic, sleep

import pytest

from rlhf.data.errors import RefusedError
from rlhf.pipeline import launch
from rlhf.pipeline.errors import RunFailed
from rlhf.pipeline.recipe import Recipe, load_recipe
from rlhf.pipeline.summary import held

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


@pytest.fixture
def recipe(world: Path) -> Recipe:
    return load_recipe("recipe.yaml")


def run_script(monkeypatch: pytest.MonkeyPatch, recipe: Recipe, ending: str) -> None:
    """Run a stage whose process does `ending`."""
    monkeypatch.setattr(launch, "stays_in_process", lambda recipe: False)
    monkeypatch.setattr(launch, "command", lambda *_: ([sys.executable, "-c", STAGE + textwrap.dedent(ending)], {}))
    with held(Path(), 0) as lock:
        launch.run_stage("sft", Path(), recipe, lock)


def test_the_command_is_what_a_person_would_type(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    words, _ = launch.command("sft", Path("run/sft-1"), recipe)
    assert words[1:4] == ["-m", "accelerate.commands.launch", "--quiet"]
    assert words[-3:] == ["-m", "rlhf.stages.sft", "run/sft-1"]
    assert "--num_processes" not in words
    two = recipe.model_copy(update={"num_processes": 2})
    assert launch.command("sft", Path("f"), two)[0][-6:-3] == ["--num_processes", "2", "--multi_gpu"]
    configured = recipe.model_copy(update={"accelerate_config": "fsdp.yaml"})
    assert launch.command("sft", Path("f"), configured)[0][4:6] == ["--config_file", "fsdp.yaml"]


def test_only_a_lone_cpu_process_stays_in_this_one(recipe: Recipe) -> None:
    assert not launch.stays_in_process(recipe.model_copy(update={"num_processes": 2}))
    assert not launch.stays_in_process(recipe.model_copy(update={"accelerate_config": "ddp.yaml"}))


def test_the_status_file_decides_and_not_the_code(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    run_script(monkeypatch, recipe, "tell('done'); sys.exit(1)")
    with pytest.raises(RunFailed, match="out of pairs"):
        run_script(monkeypatch, recipe, "tell('failed', 'out of pairs')")
    with pytest.raises(RefusedError, match="row 3"):
        run_script(monkeypatch, recipe, "tell('refused', 'row 3'); sys.exit(2)")
    with pytest.raises(RunFailed, match="ended with code -9 and left no message"):
        run_script(monkeypatch, recipe, "os.kill(os.getpid(), signal.SIGKILL)")


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
        run_script(monkeypatch, recipe, f"os.fork() and ({die}); time.sleep(60)")
    assert stopped.value.code == 128 + number
    assert json.loads(Path("status.json").read_text())["state"] == "stopped"
    assert handlers == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))


def test_kill_9_of_the_run_stops_its_stage_and_frees_the_folder_when_it_is_gone(recipe: Recipe) -> None:
    run = f"""
    from pathlib import Path
    from rlhf.pipeline import launch
    from rlhf.pipeline.recipe import load_recipe
    from rlhf.pipeline.summary import held
    import sys
    launch.stays_in_process = lambda recipe: False
    launch.command = lambda *_: ([sys.executable, "-c", {(STAGE + "time.sleep(60)")!r}], {{}})
    with held(Path(), 0) as lock:
        launch.run_stage("sft", Path(), load_recipe("recipe.yaml"), lock)
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(run)])
    until = monotonic() + 20
    while not Path("status.json").exists() and monotonic() < until:
        sleep(0.05)
    sleep(0.3)  # for the watcher to be there
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with held(Path(), patience=20):
        assert json.loads(Path("status.json").read_text())["state"] == "stopped"
