"""Running one stage: in this process on a lone CPU, else by `accelerate launch` in a session of its own."""

import importlib
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from time import monotonic, sleep
from types import FrameType

from omegaconf import OmegaConf

from rlhf.data.errors import RefusedError, Stopped
from rlhf.pipeline import processes
from rlhf.pipeline.errors import DEBUG, RunFailed
from rlhf.pipeline.processes import MARK, is_left, signal_all, signal_group
from rlhf.pipeline.recipe import Recipe
from rlhf.pipeline.summary import stage_status
from rlhf.stages import stopping
from rlhf.stages.disk import replace_text
from rlhf.stages.secrets import mask
from rlhf.stages.signals import SECONDS_TO_REPORT, exit_code, handled, is_echo

ERROR_LOG = "error.log"
"""In a stage's folder: the traceback of a failure, or what its processes last said."""
DEVICES = Path("/dev")


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
    # Workers in sessions of their own get the signal from their launcher, which kills them when this is over.
    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(math.ceil(_seconds_to_stop(stage, recipe)))}
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
        with handled():
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
    mark = environment[MARK] = secrets.token_hex(8)  # also tells the stage that its errors are shown here
    seconds = _seconds_to_stop(stage, recipe)
    received: list[int] = []
    groups: list[int] = []
    until = math.inf

    def forward(number: int, _frame: FrameType | None) -> None:
        nonlocal until
        if is_echo():
            return
        received.append(number)
        until = monotonic() + (seconds if len(received) == 1 else 0.0)  # a second one ends all at once
        for group in groups:
            signal_group(group, _known_to_launchers(number))

    # The launcher wraps every error and signal in a traceback of its own: kept back, unless asked for.
    with tempfile.TemporaryFile() as errors, handled(forward):
        stderr = None if os.environ.get(DEBUG) else errors
        process = subprocess.Popen(words, env=os.environ | environment, start_new_session=True, stderr=stderr)
        groups.append(process.pid)
        if received:  # while it was started
            signal_group(process.pid, _known_to_launchers(received[-1]))
        with _watched(mark, process.pid, lock, seconds):
            # The launcher of one process dies of the signal at once, its child saves first.
            while process.poll() is None or (received and is_left(mark, process.pid)):
                if monotonic() > until:
                    break
                sleep(0.1)
            signal_all(mark, process.pid, signal.SIGKILL)
            code = process.wait()
        told = stage_status(folder)
        state, message = told.get("state"), told.get("message") or ""
        errors.seek(0)
        said = mask(errors.read().decode(errors="replace"))
        if state == "done" and not received:
            sys.stderr.write(said)  # warnings
        elif (
            said and not received and state not in ("done", "refused", "stopped") and not (folder / ERROR_LOG).exists()
        ):
            replace_text(folder / ERROR_LOG, said)
    # The status file decides, not the code: with several processes the launcher always returns 1.
    if state == "refused":
        raise RefusedError(message)
    if state == "failed":
        raise RunFailed(message)
    if state == "stopped" or received:  # even if it is done: the run must not start another stage
        raise Stopped(exit_code(received[0]) if received else told.get("code") or exit_code(signal.SIGTERM))
    if state != "done":
        raise RunFailed(f"its process ended with code {code} and left no message; out of memory, or killed?")


def _seconds_to_stop(stage: str, recipe: Recipe) -> float:
    """How long after a signal the processes of a stage may take to be gone."""
    settings = recipe.section(stage)
    assert settings is not None
    return settings.stop_within + SECONDS_TO_REPORT


def _known_to_launchers(number: int) -> int:
    """torch's passes SIGTERM and SIGINT on, and dies of SIGUSR1."""
    return signal.SIGTERM if number == signal.SIGUSR1 else number


@contextmanager
def _watched(mark: str, group: int, lock: int, seconds: float) -> Iterator[None]:
    words = [sys.executable, "-I", processes.__file__, mark, str(group), str(seconds)]
    watcher = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True, pass_fds=(lock,))
    try:
        yield
    finally:
        watcher.kill()
        watcher.wait()
        assert watcher.stdin is not None
        watcher.stdin.close()
