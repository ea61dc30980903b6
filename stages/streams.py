"""Standard output and error of a process whose reader may leave, as `head -1` soon does. No torch."""

import io
import os
import sys
from typing import Any


class _Unread(io.FileIO):
    """Once nobody reads it, what is written goes nowhere: a run is not to die of it."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)


def go_on_unread() -> None:
    """Let nothing fail because nobody reads standard output or error any more; once per process."""
    sys.stdout, sys.stderr = _going_on(sys.stdout), _going_on(sys.stderr)


def _going_on(stream: Any) -> Any:
    try:
        number = stream.fileno()
    except (AttributeError, OSError, ValueError):  # somebody's own, which writes to no file
        return stream
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    raw = _Unread(number, "w", closefd=False)
    return io.TextIOWrapper(
        raw if stream.write_through else io.BufferedWriter(raw),
        stream.encoding,
        stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
