"""Running one stage: in this process on a lone CPU, else by `accelerate launch` in a session of its own."""

import importlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from time import monotonic, sleep
from types import FrameType

from omegaconf import OmegaConf

from rlhf.data.errors import RefusedError
from rlhf.pipeline.errors import DEBUG, RunFailed
from rlhf.pipeline.recipe import Recipe
from rlhf.pipeline.summary import stage_status
from rlhf.stages.artifact import replace_text

ERROR_LOG = "error.log"
"""In a stage's folder: the traceback of a failure, or what its processes last said."""
SECONDS_TO_SAVE = 300
"""How long a stage may take to save its state after a signal."""
DEVICES = Path("/dev")

# Ends a stage whose rlhf process died, even of kill -9: the pipe on stdin closes then. It holds the lock of
# the run folder until the stage is gone, so that a new run waits for the last checkpoint to be written.
_WATCHER = """
import os, signal, sys, time
group, seconds = int(sys.argv[1]), float(sys.argv[2])
sys.stdin.read()
try:
    os.killpg(group, signal.SIGTERM)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        os.killpg(group, 0)
        time.sleep(0.1)
    os.killpg(group, signal.SIGKILL)
except ProcessLookupError:
    pass
"""


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


def stays_in_process(recipe: Recipe) -> bool:
    """One process and no GPU: a process of its own would only cost the imports once more."""
    return recipe.num_processes in (None, 1) and recipe.accelerate_config is None and not visible_gpus()


def run_stage(stage: str, folder: Path, recipe: Recipe, lock: int) -> None:
    """Run a stage in its folder to the end. Raises RefusedError, RunFailed or SystemExit(128 + signal)."""
    for name in ("status.json", ERROR_LOG):  # of an earlier attempt
        (folder / name).unlink(missing_ok=True)
    if stays_in_process(recipe):
        _run_here(stage, folder)
    else:
        _launch(stage, folder, recipe, lock)


def command(stage: str, folder: Path, recipe: Recipe) -> tuple[list[str], dict[str, str]]:
    """What a person would type to run the stage by hand, and what to add to the environment."""
    words = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
    # Workers in sessions of their own get the signal from their launcher, which else kills them after 30 s.
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SECONDS_TO_SAVE)}
    if recipe.accelerate_config:
        words += ["--config_file", recipe.accelerate_config]
        if recipe.num_processes:
            words += ["--num_processes", str(recipe.num_processes)]
    else:  # the defaults, said aloud, or the launcher warns of each; the stage chooses its precision itself
        gpus = visible_gpus()
        number = recipe.num_processes or max(gpus, 1)
        words += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
        words += ["--num_processes", str(number)]
        if number > 1:
            words.append("--multi_gpu")
            if not gpus:  # `accelerate launch --cpu` would start one process; this starts a gloo group
                environment["ACCELERATE_USE_CPU"] = "true"
    if _port_is_free_to_choose(recipe.accelerate_config):
        words += ["--main_process_port", "0"]  # any free one: two runs on one machine must not meet
    return [*words, "-m", f"rlhf.stages.{stage}", str(folder)], environment


def _port_is_free_to_choose(accelerate_config: str | None) -> bool:
    """Several machines must agree on a port, and who names one wants it."""
    if accelerate_config is None:
        return True
    config = OmegaConf.to_container(OmegaConf.load(accelerate_config))
    return (
        isinstance(config, dict) and config.get("main_process_port") is None and config.get("num_machines") in (None, 1)
    )


def _run_here(stage: str, folder: Path) -> None:
    try:
        with handle_signals():
            importlib.import_module(f"rlhf.stages.{stage}.train").train(folder)
    except Exception as error:
        refused = isinstance(error, RefusedError)
        told = stage_status(folder) | {"state": "refused" if refused else "failed", "message": str(error)}
        replace_text(folder / "status.json", json.dumps(told))
        if not refused:
            replace_text(folder / ERROR_LOG, traceback.format_exc())
        raise


def _launch(stage: str, folder: Path, recipe: Recipe, lock: int) -> None:
    words, environment = command(stage, folder, recipe)
    mark = environment["RLHF_RUN"] = secrets.token_hex(8)  # also tells the stage that its errors are shown here
    received: list[int] = []
    groups: list[int] = []

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        for group in groups:
            _signal_group(group, number)

    # The launcher wraps every error and signal in a traceback of its own: kept back, unless asked for.
    with tempfile.TemporaryFile() as errors, handle_signals(forward):
        stderr = None if os.environ.get(DEBUG) else errors
        process = subprocess.Popen(words, env=os.environ | environment, start_new_session=True, stderr=stderr)
        groups.append(process.pid)
        if received:  # while it was started
            _signal_group(process.pid, received[-1])
        with _watched(process.pid, lock):
            code = process.wait()
            # The launcher of one process dies of the signal at once, its child saves first.
            until = monotonic() + SECONDS_TO_SAVE
            while received and stage_status(folder).get("state") == "running" and monotonic() < until:
                if not _signal_group(process.pid, 0):
                    break
                sleep(0.1)
            _signal_group(process.pid, signal.SIGKILL)
            _kill_marked(mark)
        told = stage_status(folder)
        state, message = told.get("state"), told.get("message") or ""
        errors.seek(0)
        said = errors.read().decode(errors="replace")
        if state == "done" and not received:
            sys.stderr.write(said)  # warnings
        elif said and state not in ("done", "refused", "stopped") and not (folder / ERROR_LOG).exists():
            replace_text(folder / ERROR_LOG, said)
    # The status file decides, not the code: with several processes the launcher always returns 1.
    if state == "refused":
        raise RefusedError(message)
    if state == "failed":
        raise RunFailed(message)
    if state == "stopped" or received:  # even if it is done: the run must not start another stage
        raise SystemExit(128 + (received[-1] if received else signal.SIGTERM))
    if state != "done":
        raise RunFailed(f"its process ended with code {code} and left no message; out of memory, or killed?")


def _kill_marked(mark: str) -> None:
    """Kill what is left of a stage: workers are in sessions of their own, and their launcher may have been killed."""
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"RLHF_RUN={mark}".encode() in environ.read_bytes():
                os.kill(int(environ.parent.name), signal.SIGKILL)
        except OSError:  # gone meanwhile, or another user's
            continue


@contextmanager
def _watched(group: int, lock: int) -> Iterator[None]:
    words = [sys.executable, "-c", _WATCHER, str(group), str(SECONDS_TO_SAVE)]
    watcher = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True, pass_fds=(lock,))
    try:
        yield
    finally:
        watcher.kill()
        watcher.wait()
        assert watcher.stdin is not None
        watcher.stdin.close()


@contextmanager
def handle_signals(handler: Callable[[int, FrameType | None], None] | None = None) -> Iterator[None]:
    """Have SIGINT and SIGTERM handled by `handler`; afterwards as before, whatever was set meanwhile."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if handler is not None:
            for number in before:
                signal.signal(number, handler)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def _signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; False if it is gone."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True
