"""What `-m rlhf.stages.STAGE FOLDER` does, which is how `accelerate launch` starts a stage."""

import importlib
import os
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path

from rlhf.data.errors import RefusedError, Stopped
from rlhf.stages.alone import alone_in
from rlhf.stages.artifact import Artifact, refuse_finished
from rlhf.stages.disk import refuse_other_than_utf8
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
            refuse_other_than_utf8(folder)
            refuse_finished(folder, stage)
            if os.environ.get("RANK", "0") == "0":  # its other processes train with this one
                stack.enter_context(alone_in(folder))
        except RefusedError as error:  # before torch is imported, which takes seconds
            print(f"error: {mask(str(error))}", file=sys.stderr)
            raise SystemExit(2) from None
        _train(stage, folder)


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
