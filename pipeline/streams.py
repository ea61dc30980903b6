"""What a command is started with, made fit for it: the encoding of names, the standard streams."""

import io
import logging
import os
import sys

from rlhf.stages.streams import go_on_unread


def prepare() -> None:
    """Once per process, before anything is read or written."""
    speak_utf8()
    open_streams()
    go_on_unread()
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # else it tells of a home that it cannot write into


def speak_utf8() -> None:
    """Start anew in Python's UTF-8 mode where the locale would not let names of files be written as they are."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"  # for the stages too
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def open_streams() -> None:
    """Have all three standard streams, which some schedulers start us without; else files would get their numbers."""
    number = os.open(os.devnull, os.O_RDWR)
    while number < 3:
        os.set_inheritable(number, True)
        number = os.open(os.devnull, os.O_RDWR)
    os.close(number)
    sys.stdin = sys.stdin or os.fdopen(0)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def show_all_signs() -> None:
    """Write an escape where the terminal cannot show a sign of somebody's data."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
