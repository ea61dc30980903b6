"""What `-m rlhf.stages.STAGE FOLDER` does, which is how `accelerate launch` starts a stage; and the lock of a stage's
folder, which a run takes as well."""

import fcntl
import importlib
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from rlhf.data.errors import RefusedError, Stopped
from rlhf.stages.artifact import Artifact, refuse_finished
from rlhf.stages.secrets import mask
from rlhf.stages.streams import go_on_unread


def run_stage(stage: str) -> None:
    """Train in the folder, and say in status.json and the exit code how it went."""
    if len(sys.argv) != 2:
        print(f"usage: python -m rlhf.stages.{stage} FOLDER (a folder with a settings.yaml)", file=sys.stderr)
        raise SystemExit(2)
    go_on_unread()
    folder = Path(sys.argv[1])
    with ExitStack() as stack:
        try:
            refuse_finished(folder, stage)
            if os.environ.get("RANK", "0") == "0":  # its other processes train with this one
                stack.enter_context(alone_in(folder))
        except RefusedError as error:  # before torch is imported, which takes seconds
            print(f"error: {mask(str(error))}", file=sys.stderr)
            raise SystemExit(2) from None
        _train(stage, folder)


_ours: set[str] = set()
"""Folders that this process has to itself."""


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Inside, have a stage's folder to this process, and those that it trains with; at most until it ends, however it
    does. What it has already it may enter once more. Raises RefusedError where another process trains there."""
    name = os.path.realpath(folder)
    if name in _ours or (descriptor := _locked(folder)) is None:
        yield
        return
    _ours.add(name)
    try:
        yield
    finally:
        _ours.remove(name)
        with suppress(OSError):  # closing it is not enough where a forked helper has it open, too
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def taken(folder: Path) -> RefusedError:
    """The refusal of a folder in which another process trains."""
    return RefusedError(f"{folder}: another process is training in it; wait until it is done, or use another folder")


def _locked(folder: Path) -> int | None:
    """A descriptor with the lock, which the system drops with the process; None where there is none to be had."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # a folder that is not there, or may not be listed
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise taken(folder) from None
        return None  # a file system without locks
    return descriptor


def _train(stage: str, folder: Path) -> None:
    from accelerate.state import PartialState

    from rlhf.stages import logs, stopping, watchdog

    train = importlib.import_module(f"rlhf.stages.{stage}.train").train
    try:
        train(folder)
        is_main = PartialState().is_main_process
        PartialState().destroy_process_group()
    except Stopped as stop:
        stopping.end_process(stop.code)
    except Exception as error:
        if stopping.is_for_want_of_another(error):
            stopping.end_process(stopping.tell_loss())
        refused = isinstance(error, RefusedError)
        message = str(error) if refused else f"{type(error).__name__}: {error}{watchdog.here()}"
        logs.tell_failure(folder, "refused" if refused else "failed", message)
        if os.environ.get("RLHF_DEBUG"):
            print(mask(traceback.format_exc()), file=sys.stderr)
        raise SystemExit(2 if refused else 1) from None
    if is_main and "RLHF_RUN" not in os.environ and (artifact := Artifact(folder)).sealed:  # a run says it itself
        print(f"{stage}: done, {artifact.model if artifact.model.is_dir() else folder}", flush=True)
