"""The errors people see: what was found, where, and what would work; and what a signal raises."""

import errno
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class RefusedError(ValueError):
    """Bad input found before anything was trained; the command line exits with code 2."""


class DataError(RefusedError):
    """A file, row or column that cannot be used; the message names it and the cure."""


class TooManyUnusable(DataError):
    """More rows cannot be used than `max_dropped` allows; `stage` is whose setting that is, where it is a stage's."""

    def __init__(self, found: str, share: float, stage: str = "") -> None:
        self.found, self.share = found, share
        cure = f"set {stage}.max_dropped={share:g}" if stage else f"set max_dropped={share:g} (--max-dropped)"
        super().__init__(f"{found}. Repair them, or {cure} to go on without them")


class SettingsError(RefusedError):
    """A recipe or setting that cannot be used; the message names the key and the cure."""


class ToldHowToGoOn(RuntimeError):
    """Something broke while running, and the message says all: what, why, and how to go on. Exit code 1."""


class ConnectionLost(ToldHowToGoOn):
    """The hub was there and is gone; the same command may succeed later."""


class Diverged(ToldHowToGoOn):
    """A training whose losses or gradients are no numbers any more, or far from those before."""


class Stopped(SystemExit):
    """A signal ended what was being done, which can be resumed; `code` is the exit code that goes with it."""


def _is_stop(error: BaseException) -> bool:
    """Whether a signal raised it. A function of somebody's may raise SystemExit or KeyboardInterrupt of its own, which
    then is an error like any other: Ctrl-C raises the latter only where nobody handles the signal in another way."""
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return isinstance(error, Stopped) or (isinstance(error, KeyboardInterrupt) and is_default)


CURES = {
    errno.ENOSPC: "make room there",
    errno.EDQUOT: "free some of the quota there, or have it raised",
    errno.EFBIG: "raise the limit on the size of a file (`ulimit -f`; some file systems have one of their own)",
    errno.EACCES: "change its mode, or that of its folder, or name another place",
    errno.EPERM: "change its mode, or that of its folder, or name another place",
    errno.EROFS: "name another place",
    errno.ENAMETOOLONG: "name something shorter",
    errno.ENOENT: "look whether its folder is there",
    errno.ENOTDIR: "name a place in a folder",
    errno.EISDIR: "name a file",
    errno.ELOOP: "its link leads to itself; name another place",
}
"""What would work, by the system's number of an error."""


def of_file(error: OSError) -> str:
    """What the system says of a file, of which, and what would work; of what is no file's, its kind and text."""
    is_missing = error.errno == errno.ENOENT
    if error.filename is None and (error.errno not in CURES or (is_missing and _is_somewhere())):
        return named_error(error)  # such as a connection's
    name = str(error.filename or ("the folder that you are in" if is_missing else "standard output, or a file"))
    shown = name if len(name) <= 200 else f"{name[:100]} … {name[-100:]}"
    cure = CURES.get(error.errno or 0)
    return f"{shown}: {error.strerror or error}" + (f"; {cure}" if cure else "")


def plain_words(details: Mapping[str, Any]) -> str:
    """What pydantic says of an error, one of `ValidationError.errors()`, without names of our classes."""
    message: str = details["msg"]
    if details["type"] == "value_error":  # one of ours
        return message.removeprefix("Value error, ")
    return re.sub(r" or (an )?instance of \w+$", "", message)


def printable(text: str) -> str:
    """Without signs that would do something to a terminal, such as colour it; lines stay."""
    return "".join(sign if sign.isprintable() or sign in "\n\t" else " " for sign in text)


def is_utf8(name: str) -> bool:
    """Whether a name, of a file perhaps, can be written as UTF-8; bytes that are none are in it as surrogates."""
    return not any("\ud800" <= sign <= "\udfff" for sign in name)


def _is_somewhere() -> bool:
    """Whether the folder that the process is in is still there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def named_error(error: BaseException) -> str:
    """Kind and text of an error of somebody's code, on one line."""
    text = printable(" ".join(str(error).split()))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


@contextmanager
def told_as(told: Callable[[BaseException], Exception]) -> Iterator[None]:
    """What somebody's code raises, SystemExit too, is raised as what `told` makes of it; a signal's stays as it is."""
    try:
        yield
    except BaseException as error:
        if _is_stop(error):
            raise
        raise told(error) from error


def first_line(error: Exception) -> str:
    """What an error says first; libraries go on for pages."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
