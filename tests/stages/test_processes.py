"""How many processes a stage has is said, and one that was to be several does not train alone."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env
from processes_world import in_two_processes

from rlhf.data.errors import RefusedError
from rlhf.stages import sharding
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.processes import Processes
from rlhf.stages.runtime import Runtime
from rlhf.stages.sft.config import SFTSettings

SETTINGS = SFTSettings.load({"data": "unread.jsonl", "report_to": []}, "sft")


@pytest.fixture
def unlaunched(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment in which no launcher has left anything."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RLHF_NUM_PROCESSES"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, unlaunched: None) -> Iterator[Callable[..., None]]:
    """Start this process as `accelerate launch` starts one, which is itself given words and variables."""
    launchers: list[Any] = []

    def begin(*words: str, by: str = "accelerate", **variables: str) -> None:
        for name in ("MASTER_ADDR", "MASTER_PORT"):  # of the one before
            monkeypatch.delenv(name, raising=False)
        with monkeypatch.context() as of_launcher:
            for name, value in variables.items():
                of_launcher.setenv(name, value)
            options = launch_command_parser().parse_args([*words, "--mixed_precision", "no", "-m", "rlhf.stages.sft"])
            options, *_ = _validate_launch_command(options)
            environment = prepare_simple_launcher_cmd_env(options)[1]
            waiting = [sys.executable, "-c", "print(flush=True); input()", by, "launch", *words]
            launchers.append(subprocess.Popen(waiting, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            launchers[-1].stdout.readline()  # its words can be read
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(os, "getppid", lambda: launchers[-1].pid)

    yield begin
    for launcher in launchers:
        launcher.communicate(b"\n")


def test_one_process_that_was_to_be_two_refuses_to_train_alone(
    monkeypatch: pytest.MonkeyPatch, start: Callable[..., None]
) -> None:
    alone = Processes(Accelerator(cpu=True))
    start("--cpu", "--num_processes", "2")
    with pytest.raises(RefusedError, match=r"^sft: .* asked for several processes and started one.* or take torchrun"):
        alone.check(SETTINGS)
    monkeypatch.setenv("RLHF_NUM_PROCESSES", "1")  # a run knows what it wants
    alone.check(SETTINGS)


def test_one_process_that_was_to_be_one_trains_wherever_it_was_started(
    monkeypatch: pytest.MonkeyPatch, start: Callable[..., None]
) -> None:
    alone = Processes(Accelerator(cpu=True))
    start("--cpu", "--num_processes", "1")
    alone.check(SETTINGS)
    for place in ("node-7", "127.0.0.1"):  # of a cluster's job, or set in a shell
        start("--num_processes", "1", MASTER_ADDR=place, MASTER_PORT="29500")
        alone.check(SETTINGS)
    start("--cpu", "--num_processes", "2", by="bash")  # in which a launcher's variables were left
    alone.check(SETTINGS)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)  # the launcher's number where `--cpu` is given none
    start("--cpu")
    alone.check(SETTINGS)


@pytest.mark.usefixtures("unlaunched")
def test_a_process_that_others_should_be_beside_refuses_to_train_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = Processes(Accelerator(cpu=True))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RefusedError, match=r"^2 processes were asked for and WORLD_SIZE is 2, but Accelerate sees 1"):
        alone.check(SETTINGS)


def words(rank: int) -> list[str]:
    found = [Processes(Accelerator()).in_words]
    os.environ["FSDP_VERSION"] = "2"
    for reshards in ("true", "false"):
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_RESHARD_AFTER_FORWARD": reshards}
        sharding.asked_for.cache_clear()
        sharding.asked_for()  # which takes it out of the environment
        found.append(Processes(Accelerator()).in_words)
    return found


def test_the_number_of_processes_is_said_and_how_they_share_the_models(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("text")
    fields = {"data": str(tmp_path / "text.txt"), "precision": "fp32", "report_to": []}
    run = Runtime(PretrainSettings.load(fields, "pretrain"), tmp_path)
    run.close()
    assert capsys.readouterr().out == f"pretrain: 1 process; fp32 on {run.device_name}\n"
    assert in_two_processes(tmp_path, words) == [["2 processes, ddp", "2 processes, fsdp2", "2 processes, zero2"]] * 2
