"""Where `rlhf` begins: the commands take a quarter of a second to import, in which Ctrl-C may come."""

import os
import signal
from collections.abc import Sequence
from types import FrameType


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 refused, 3 waiting for people, 130/143 stopped by a signal.

    Without `arguments` it has the process, and its words, to itself.
    """
    if arguments is None:
        signal.signal(signal.SIGINT, _leave)
    from rlhf.pipeline.commands import carry_out

    carry_out(arguments)


def _leave(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)  # nothing has begun, and an exception might be lost in somebody's import
