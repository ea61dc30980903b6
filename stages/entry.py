"""What `-m rlhf.stages.STAGE FOLDER` does, which is how `accelerate launch` starts a stage."""

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate.state import PartialState

from rlhf.data.errors import RefusedError, Stopped
from rlhf.stages import logs, stopping, watchdog
from rlhf.stages.secrets import mask
from rlhf.stages.streams import go_on_unread


def run_stage(train: Callable[[str], Any]) -> None:
    """Train in the folder, and say in status.json and the exit code how it went."""
    if len(sys.argv) != 2:
        print("usage: -m rlhf.stages.STAGE FOLDER (a folder with a settings.yaml)", file=sys.stderr)
        raise SystemExit(2)
    go_on_unread()
    folder = Path(sys.argv[1])
    try:
        train(sys.argv[1])
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
