"""A run that gets a signal, whatever it is doing, is gone in time with the right code, and goes on when run again.

Processes of their own: `rlhf` with its stage in it, and with a stage of two.
"""

import json
import os
import re
import shutil
import signal
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from forking import Begun, begin
from launching import ranks
from signals_world import DOCUMENTS, FOR_EVER, RECIPE, SECONDS, Run, Server, wait_for

from rlhf.stages.artifact import Artifact

TERM, INT, USR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    home = tmp_path_factory.mktemp("signals")
    (home / "recipe.yaml").write_text(RECIPE)
    (home / "slow.py").write_text(DOCUMENTS)
    return Server(home)


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> dict[str, str]:
    """Hashes of the model of a run that got no signal."""
    return finished(server, "undisturbed")


def start(server: Server, name: str, phase: str = "", stop_within: float = FOR_EVER, **how: Any) -> Run:
    return server.start("run", "recipe.yaml", "--run-dir", name, f"stop_within={stop_within}", phase=phase, **how)


def finished(server: Server, name: str) -> dict[str, str]:
    """Run it to its end; the hashes of the model."""
    run = start(server, name)
    assert server.wait() == 0, run.said
    return model_files(server.home / name)


def model_files(run_dir: Path) -> dict[str, str]:
    files = Artifact(next(run_dir.glob("pretrain-*"))).manifest["files"]
    return {name: digest for name, digest in files.items() if name.startswith("model/")}


def status(server: Server, name: str) -> dict[str, Any]:
    server.start("status", name, "--json")
    assert server.wait() == 0
    entry: dict[str, Any] = json.loads((server.home / "said").read_text())["stages"]["pretrain"]
    return entry


@pytest.mark.parametrize(("number", "code"), [(TERM, 143), (INT, 130), (USR1, 143)])
def test_while_rows_are_checked_it_is_gone_at_once_and_has_written_nothing(
    server: Server, number: int, code: int
) -> None:
    run = start(server, "preflight", "preflight")
    run.send(number)
    ended = server.wait()
    assert (ended, run.said) == (code, "stopped; run again to go on\n")
    assert not (server.home / "preflight").exists()


def test_while_the_stage_reads_its_data_it_is_gone_at_once(server: Server, undisturbed: dict[str, str]) -> None:
    run = start(server, "data", "data")
    run.send(INT)
    ended = server.wait()
    assert ended == 130, run.said
    assert "no checkpoint yet; run again" in run.said
    assert status(server, "data")["status"] == "stopped"
    assert finished(server, "data") == undisturbed


@pytest.mark.parametrize(("number", "code"), [(TERM, 143), (INT, 130), (USR1, 143)])
def test_in_a_step_the_state_is_saved_at_its_end(
    server: Server, undisturbed: dict[str, str], number: int, code: int
) -> None:
    name = f"step-{number}"
    run = start(server, name, "step", number=3)
    run.send(number)
    run.go_on()
    ended = server.wait()
    assert ended == code, run.said
    assert "stopped at step 3 of 6; state is kept" in run.said
    assert (status(server, name)["status"], status(server, name)["step"]) == ("stopped", 3)
    assert finished(server, name) == undisturbed
    assert "resuming from step 3 of 6" in (server.home / "said").read_text()


def test_one_signal_to_all_processes_that_pass_it_on_is_one_signal(server: Server) -> None:
    run = start(server, "echo", "step", number=3, echo=FOR_EVER)
    for number in (TERM, TERM, USR1):
        run.send(number)
    run.go_on()
    assert server.wait() == 143
    assert "stopped at step 3 of 6" in run.said


@pytest.mark.parametrize(("phase", "number"), [("step", 4), ("evaluation", 1), ("generation", 1)])
def test_what_takes_too_long_is_left_and_the_last_checkpoint_stands(
    server: Server, undisturbed: dict[str, str], phase: str, number: int
) -> None:
    run = start(server, phase, phase, number=number, stop_within=0.5)
    run.send(TERM)
    ended = server.wait()
    assert ended == 143, run.said
    assert monotonic() - run.sent > 0.35
    assert "stopped without saving anew; it goes on from step 2" in run.said
    told = status(server, phase)
    assert (told["status"], told["step"]) == ("stopped", 2)
    assert finished(server, phase) == undisturbed


def test_a_save_that_has_begun_comes_to_its_end(server: Server) -> None:
    run = start(server, "save", "save", number=2, stop_within=60, share=0.002)
    run.send(TERM)
    wait_for((server.home / "late").exists)
    run.go_on()
    assert server.wait() == 143
    kept = "stopped at step [45] of 6; state is kept in|stopped without saving anew; it goes on from step [45]"
    assert len(re.findall(kept, run.said)) == 1, run.said  # not from 2; a quick step may come before the end


def test_a_library_that_does_not_come_back_is_ended_in_time(server: Server, undisturbed: dict[str, str]) -> None:
    run = start(server, "stuck", "step", number=4, stuck=True, stop_within=0.5)
    run.send(INT)
    ended = server.wait()
    assert ended == 130, run.said
    assert monotonic() - run.sent > 0.45
    assert "it goes on from step 2" in run.said
    told = status(server, "stuck")
    assert (told["status"], told["step"]) == ("stopped", 2)
    assert finished(server, "stuck") == undisturbed


@pytest.mark.parametrize("stuck", [False, True])
def test_a_second_signal_ends_it_at_once(server: Server, stuck: bool) -> None:
    name = f"second-{stuck}"
    run = start(server, name, "step", number=4, stuck=stuck, echo=0.0)
    run.send(TERM)
    wait_for(lambda: stuck or "signal received" in run.said)
    run.send(TERM)
    ended = server.wait()
    assert ended == 143, run.said
    assert status(server, name)["status"] == "stopped"


def test_after_the_last_step_it_may_finish_if_it_is_in_time(server: Server, undisturbed: dict[str, str]) -> None:
    run = start(server, "seal", "seal")
    run.send(TERM)
    run.go_on()
    assert server.wait() == 143
    assert "pretrain: done; stopped after it" in run.said
    assert status(server, "seal")["status"] == "done"
    assert model_files(server.home / "seal") == undisturbed


def test_while_the_report_is_drawn_the_run_ends_and_draws_it_when_run_again(server: Server) -> None:
    run = start(server, "report", "report")
    (server.home / "report" / "report.html").write_text("an old one")
    os.utime(server.home / "report" / "report.html", (0, 0))
    run.send(TERM)
    ended = server.wait()
    assert ended == 143, run.said
    assert "Traceback" not in run.said
    finished(server, "report")
    assert (server.home / "report" / "report.html").stat().st_mtime > 0


def test_looking_at_data_ends_without_a_traceback(server: Server) -> None:
    (server.home / "slow_data.py").write_text(
        "import time\nfrom pathlib import Path\n"
        "def rows():\n    Path('begun').touch()\n    time.sleep(60)\n    yield {'text': 'a'}\n"
    )
    run = server.start("data", "check", "slow_data:rows", "--as", "text")
    server.has_begun(run)
    run.send(INT)
    assert (server.wait(), run.said) == (130, "stopped; run again to go on\n")


def test_two_processes_stop_together_and_do_not_outlive_one_that_is_killed(
    server: Server, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    """A rank that gets a signal alone; then, when the stage was resumed, one that is killed; then the end."""
    for name in ("slow.py", "recipe.yaml"):
        shutil.copy(server.home / name, tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(recipe.read_text().replace("num_steps: 6", "num_steps: 4000"))

    run = launched(tmp_path, at_least=3)
    os.kill(ranks(tmp_path)["RANK=1"], INT)
    ended = run.end(SECONDS)
    assert ended.returncode == 130, ended
    assert "stopped at step" in ended.stdout
    assert not ranks(tmp_path)
    [told] = tmp_path.glob("run/pretrain-*/status.json")
    assert json.loads(told.read_text())["state"] == "stopped"
    step = json.loads(told.read_text())["step"]

    run = launched(tmp_path, at_least=step + 3)
    os.kill(ranks(tmp_path)["RANK=1"], signal.SIGKILL)
    ended = run.end(SECONDS)
    assert ended.returncode == 1, ended
    assert f"resuming from step {step} of 4000" in ended.stdout
    said = ended.stderr
    assert "error: pretrain: one of its processes ended and left no message; out of memory, or killed?" in said
    assert "It was rank 1 (pid " in said
    assert not ranks(tmp_path)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["stages"]["pretrain"]["status"] == "failed"


def launched(home: Path, at_least: int) -> Begun:
    """A run whose stage has two processes, when it has written so many rows of metrics."""
    run = begin("run", "recipe.yaml", "--run-dir", "run", "num_processes=2", cwd=home, charts=False)
    until = monotonic() + 120
    while sum(len(path.read_text().splitlines()) for path in home.glob("run/pretrain-*/metrics.jsonl")) < at_least:
        assert monotonic() < until
        assert run.process.exitcode is None
        sleep(0.02)
    return run
