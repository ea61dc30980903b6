"""Running one stage: in this process on a lone CPU, else by `accelerate launch` in a session of its own."""

import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from types import FrameType

from rlhf.data.errors import RefusedError
from rlhf.pipeline.errors import RunFailed
from rlhf.pipeline.recipe import Recipe
from rlhf.pipeline.summary import stage_status
from rlhf.stages.artifact import replace_text

ERROR_LOG = "error.log"
"""In a stage's folder: the traceback of a failure inside this process (another process prints its own)."""
SECONDS_TO_SAVE = 300.0
"""How long a stage may take to save its state after a signal."""

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
except ProcessLookupError:
    pass
"""


def stays_in_process(recipe: Recipe) -> bool:
    """One process and no GPU: a process of its own would only cost the imports once more."""
    gpus = [*Path("/dev").glob("nvidia[0-9]*"), *Path("/dev").glob("kfd"), *Path("/dev").glob("dxg")]
    return recipe.num_processes in (None, 1) and recipe.accelerate_config is None and not gpus


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
    environment = {}
    if recipe.accelerate_config:
        words += ["--config_file", recipe.accelerate_config]
    else:  # the defaults, said aloud, or the launcher warns of each; the stage chooses its precision itself
        words += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    if recipe.num_processes:
        words += ["--num_processes", str(recipe.num_processes)]
        if recipe.num_processes > 1 and not recipe.accelerate_config:
            words.append("--multi_gpu")
            if not list(Path("/dev").glob("nvidia[0-9]*")):
                # `accelerate launch --cpu` would start one process; this starts a gloo group
                environment["ACCELERATE_USE_CPU"] = "true"
    return [*words, "-m", f"rlhf.stages.{stage}", str(folder)], environment


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
    received: list[int] = []
    process = subprocess.Popen(words, env=os.environ | environment, start_new_session=True)

    def forward(number: int, _frame: FrameType | None) -> None:
        received.append(number)
        _signal_group(process.pid, number)

    with _watched(process.pid, lock), handle_signals(forward):
        code = process.wait()
        # The launcher dies of the signal at once, its child saves first.
        until = monotonic() + SECONDS_TO_SAVE
        while received and stage_status(folder).get("state") == "running" and monotonic() < until:
            if not _signal_group(process.pid, 0):
                break
            sleep(0.1)
        _signal_group(process.pid, signal.SIGKILL)
    told = stage_status(folder)
    state, message = told.get("state"), told.get("message") or ""
    # The status file decides, not the code: with several processes the launcher always returns 1.
    if state == "refused":
        raise RefusedError(message)
    if state == "failed":
        raise RunFailed(message)
    if state == "stopped" or (received and state != "done"):
        raise SystemExit(128 + (received[-1] if received else signal.SIGTERM))
    if state != "done":
        raise RunFailed(f"its process ended with code {code} and left no message; out of memory, or killed?")


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
