"""Running one stage: in this process on a lone CPU, else by `accelerate launch` in a session of its own."""

import importlib
import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import Any

from rlhf.data.errors import RefusedError, Stopped
from rlhf.pipeline import foreign, processes
from rlhf.pipeline.accelerate_config import config_path, num_processes, on_cpu, read_config
from rlhf.pipeline.errors import DEBUG, RunFailed
from rlhf.pipeline.processes import MARK, is_left, signal_all, signal_group
from rlhf.pipeline.recipe import Recipe
from rlhf.pipeline.summary import stage_status
from rlhf.stages import stopping
from rlhf.stages.alone import alone_in
from rlhf.stages.disk import replace_text
from rlhf.stages.secrets import mask
from rlhf.stages.signals import SECONDS_TO_REPORT, exit_code, handled, is_echo

ERROR_LOG = "error.log"
"""In a stage's folder: the traceback of a failure, or what its processes last said."""
NO_TRACEBACK = "No error of the stage's code; its processes and their launcher said:"
"""How the log begins in the second case."""
DEVICES = Path("/dev")
ORDER = Path("checkpoints", "launch.json")
"""In a stage's folder while it runs on several machines: what the others have to start."""
LOST = Path("checkpoints", "lost.json")
"""There as well: which machine's part of it ended before the others', with which code."""
SECONDS_TO_DIE = 10.0
"""How long a killed process may take to let go of its folder: it gives back its memory and its GPUs first."""
NUM_PROCESSES = "RLHF_NUM_PROCESSES"
"""Environment variable of a stage: how many processes it was to have. It refuses to start with others."""


def visible_gpus() -> int:
    """How many GPUs a stage will see; asked of the device files, since torch takes seconds to import."""
    found = len(list(DEVICES.glob("nvidia[0-9]*")))
    if (DEVICES / "kfd").exists():  # AMD
        found += max(len(list(DEVICES.glob("dri/renderD*"))), 1)
    found += (DEVICES / "dxg").exists()  # Windows' subsystem for Linux
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return found
    names = takewhile(lambda name: name not in ("", "-1"), map(str.strip, listed.split(",")))  # as CUDA reads it
    return min(found, len(list(names)))


def stays_in_process(recipe: Recipe, stage: str) -> bool:
    """One process and no GPU: a process of its own would only cost the imports once more."""
    return recipe.processes_of(stage) in (None, 1) and recipe.config_of(stage) is None and not visible_gpus()


def run_stage(stage: str, folder: Path, recipe: Recipe, lock: int) -> None:
    """Run a stage in its folder to the end. Raises RefusedError, RunFailed or SystemExit(128 + signal)."""
    with alone_in(folder):
        for name in ("status.json", ERROR_LOG):  # of an earlier attempt
            (folder / name).unlink(missing_ok=True)
        if stays_in_process(recipe, stage):
            _run_here(stage, folder)
            return
    _launch(stage, folder, recipe, lock)  # its first process takes the folder


def command(stage: str, folder: Path, recipe: Recipe) -> tuple[list[str], dict[str, str]]:
    """What a person would type to run the stage by hand, and what to add to the environment."""
    words = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
    # Workers in sessions of their own get the signal from their launcher, which kills them when this is over.
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(_seconds_to_stop(stage, recipe)))}
    gpus, name = visible_gpus(), recipe.config_of(stage)
    config, number = read_config(name), num_processes(recipe, stage, gpus)
    if name is not None:
        words += ["--config_file", str(config_path(name))]
        if recipe.processes_of(stage) or config.get("num_processes") is None:
            words += ["--num_processes", str(number)]
    else:  # the defaults, said aloud, or the launcher warns of each; the stage chooses its precision itself
        words += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        words += ["--num_processes", str(number)]
        if number > 1:
            words.append("--multi_gpu")
    if on_cpu(recipe, stage, gpus):  # `launch --cpu` would start one process; this makes a gloo group of several
        environment["ACCELERATE_USE_CPU"] = "true"
    environment[NUM_PROCESSES] = str(number)
    if config.get("main_process_port") is None and config.get("num_machines") in (None, 1):
        words += ["--main_process_port", "0"]  # any free one: two runs on one machine must not meet
    return [*words, "-m", f"rlhf.stages.{stage}", str(folder)], environment


def _run_here(stage: str, folder: Path) -> None:
    try:
        with handled(), foreign.put_away():
            importlib.import_module(f"rlhf.stages.{stage}.train").train(folder)
    except Exception as error:
        refused = isinstance(error, RefusedError)
        told = stage_status(folder) | {"state": "refused" if refused else "failed", "message": mask(str(error))}
        replace_text(folder / "status.json", json.dumps(told))
        if not refused:
            replace_text(folder / ERROR_LOG, mask(traceback.format_exc()))
        raise
    finally:
        stopping.close()


def _launch(stage: str, folder: Path, recipe: Recipe, lock: int) -> None:
    words, environment = command(stage, folder, recipe)
    seconds = _seconds_to_stop(stage, recipe)
    with told_to_others(words, environment, seconds, folder, read_config(recipe.config_of(stage))) as lost:
        ended = to_its_end(words, environment, seconds, lock, lambda: lost() is not None)
        machine = lost()
    refusal = None
    try:
        with alone_in(folder, SECONDS_TO_DIE):  # which its first process has to its end
            pass
    except RefusedError as error:  # another one came while the launcher started, of which the files there tell
        refusal = error
    told = stage_status(folder)
    state, message = told.get("state"), told.get("message") or ""
    if state in ("done", "waiting") and not ended.received:
        if not ended.code:  # else the launcher complains of a process that was killed when all was done
            sys.stderr.write(ended.said)  # warnings
    elif refusal is not None and not ended.received:
        raise refusal
    is_kept = state in ("done", "waiting", "refused", "stopped") or (folder / ERROR_LOG).exists()
    if ended.said and not ended.received and not is_kept:
        replace_text(folder / ERROR_LOG, f"{NO_TRACEBACK}\n\n{ended.said}")
    # The status file decides, not the code: with several processes the launcher always returns 1.
    if state == "refused":
        raise RefusedError(message)
    if state == "failed":
        raise RunFailed(message)
    if machine is not None and state not in ("done", "waiting") and not ended.received:
        raise RunFailed(f"machine {machine}: its part ended and left no message; out of memory, or killed?")
    if state == "stopped" or ended.received:  # even if it is done: the run must not start another stage
        number = ended.received[0] if ended.received else None
        raise Stopped(exit_code(number) if number else told.get("code") or exit_code(signal.SIGTERM))
    if state not in ("done", "waiting"):
        raise RunFailed(f"its process ended with code {ended.code} and left no message; out of memory, or killed?")


@dataclass(frozen=True)
class Ended:
    """How a launcher ended."""

    code: int
    received: list[int]
    """The signals that came meanwhile."""
    said: str
    """What it and its processes wrote to stderr."""


def to_its_end(
    words: list[str],
    environment: dict[str, str],
    seconds: float,
    lock: int | None,
    is_over: Callable[[], bool] = lambda: False,
) -> Ended:
    """Run a launcher until it and its processes are gone; signals are passed on, and it has `seconds` to end of them.

    The lock of the run folder, if given, is held until then even if this process dies. Ended when `is_over`, too.
    """
    mark = secrets.token_hex(8)  # also tells the stage that its errors are shown here
    received: list[int] = []
    groups: list[int] = []
    until = math.inf

    def end(number: int) -> None:
        for group in groups:
            signal_group(group, _known_to_launchers(number))

    def forward(number: int, _frame: FrameType | None) -> None:
        nonlocal until
        if is_echo():
            return
        received.append(number)
        until = monotonic() + (seconds if len(received) == 1 else 0.0)  # a second one ends all at once
        end(number)

    # The launcher wraps every error and signal in a traceback of its own: kept back, unless asked for.
    with tempfile.TemporaryFile() as errors, handled(forward):
        stderr = None if os.environ.get(DEBUG) else errors
        variables = foreign.without(os.environ) | environment | {MARK: mark}
        process = subprocess.Popen(words, env=variables, start_new_session=True, stderr=stderr)
        groups.append(process.pid)
        if received:  # while it was started
            end(received[-1])
        with _watched(mark, process.pid, lock, seconds):
            # The launcher of one process dies of the signal at once, its child saves first.
            while process.poll() is None or (received and is_left(mark, process.pid)):
                if until == math.inf and is_over():
                    until = monotonic() + seconds
                    end(signal.SIGTERM)
                if monotonic() > until:
                    break
                sleep(0.1)
            signal_all(mark, process.pid, signal.SIGKILL)
            code = process.wait()
        errors.seek(0)
        return Ended(code, received, mask(errors.read().decode(errors="replace")))


@contextmanager
def told_to_others(
    words: list[str], environment: dict[str, str], seconds: float, folder: Path, config: Mapping[str, Any]
) -> Iterator[Callable[[], int | None]]:
    """Let the other machines of a stage, if it has some, know what to start (`follow`).

    Yields what tells the number of one whose part of it has ended before its time.
    """
    if config.get("num_machines") in (None, 1):
        yield lambda: None
        return
    mark = secrets.token_hex(8)
    content = {"words": words[1:], "environment": environment, "seconds": seconds, "cwd": str(Path.cwd())}
    content |= {"mark": mark, "host": socket.gethostname(), "pid": os.getpid()}
    (folder / ORDER).parent.mkdir(parents=True, exist_ok=True)
    replace_text(folder / ORDER, json.dumps(content), sync=False)

    def lost() -> int | None:
        try:
            found = json.loads((folder / LOST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return int(found["machine"]) if found["mark"] == mark else None

    try:
        yield lost
    finally:
        for path in (ORDER, LOST):
            (folder / path).unlink(missing_ok=True)


def _seconds_to_stop(stage: str, recipe: Recipe) -> float:
    """How long after a signal the processes of a stage may take to be gone."""
    settings = recipe.section(stage)
    assert settings is not None
    return settings.stop_within + SECONDS_TO_REPORT


def _known_to_launchers(number: int) -> int:
    """torch's passes SIGTERM and SIGINT on, and dies of SIGUSR1."""
    return signal.SIGTERM if number == signal.SIGUSR1 else number


@contextmanager
def _watched(mark: str, group: int, lock: int | None, seconds: float) -> Iterator[None]:
    words = [sys.executable, "-I", processes.__file__, mark, str(group), str(seconds)]
    locks = () if lock is None else (lock,)
    watcher = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True, pass_fds=locks)
    try:
        yield
    finally:
        watcher.kill()
        watcher.wait()
        assert watcher.stdin is not None
        watcher.stdin.close()
