"""The processes of a stage, wherever they are: each has the stage's mark in its environment.

Workers of a group live in sessions of their own, and the launcher that would pass signals on may be gone.

As a program, with the mark, the group and the seconds a stage may take: it waits until its stdin closes, which it does
when rlhf dies, even of kill -9, and ends the stage then. It holds the lock of the run folder until the stage is gone,
so that a new run waits for the last checkpoint to be written.
"""

import os
import signal
import sys
from pathlib import Path
from time import monotonic, sleep

MARK = "RLHF_RUN"


def marked(mark: str) -> list[int]:
    """Ids of the processes with a mark that have not ended. Empty on systems without /proc."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in environ.read_bytes().split(b"\0"):
                found.append(int(environ.parent.name))
        except OSError:  # gone meanwhile, or another user's
            continue
    return found


def signal_all(mark: str, group: int, number: int) -> None:
    """Send a signal to each process of a stage that is left."""
    signal_group(group, number)
    for pid in marked(mark):
        try:
            os.kill(pid, number)
        except OSError:
            continue


def signal_group(group: int, number: int) -> bool:
    """Send a signal to a process group; False if it is gone."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def is_left(mark: str, group: int) -> bool:
    """Whether any process of a stage is still there."""
    if Path("/proc/self/environ").exists():
        return bool(marked(mark))
    return signal_group(group, 0)


def _end_when_orphaned(mark: str, group: int, seconds: float) -> None:
    sys.stdin.read()
    signal_all(mark, group, signal.SIGTERM)
    until = monotonic() + seconds
    while is_left(mark, group) and monotonic() < until:
        sleep(0.1)
    signal_all(mark, group, signal.SIGKILL)


if __name__ == "__main__":
    _end_when_orphaned(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
