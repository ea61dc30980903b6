"""What a command that lets one wait says after two seconds: for what, how far it is and since when."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread, Timer
from time import monotonic
from typing import Any

from rlhf.pipeline.summary import duration

PATIENCE = 2.0
"""Seconds of silence."""
SECONDS_BETWEEN_LINES = 5.0
"""Where there is no terminal, as of the stages."""
SECONDS_TO_END = 1.0
"""For the last line: whoever reads them may have stopped reading."""


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """Show on a terminal that `what` is going on, once it has taken PATIENCE; the line is gone at the end.

    Yields a function that says how far it is in the place of `what`; it may be called as often as one likes.
    """
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    shown: list[Any] = []
    text, lock, over = what, Lock(), False

    def show() -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        bar = Progress(
            SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn(),
            console=Console(stderr=True), transient=True,
        )  # fmt: skip
        with lock:
            if not over:
                bar.add_task(text)
                bar.start()
                shown.append(bar)

    def tell(now: str) -> None:
        nonlocal text
        with lock:
            text = now
            for bar in shown:
                bar.update(bar.task_ids[0], description=now)

    timer = Timer(PATIENCE, show)
    timer.daemon = True
    timer.start()
    try:
        yield tell
    finally:
        timer.cancel()
        with lock:
            over = True
        for bar in shown:
            bar.stop()


@contextmanager
def telling(what: str, say: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """Show that `what` is going on, as `waiting` does; where there is no terminal, `say` it now and then in a line.

    Yields a function that says how far it is in the place of `what`.
    """
    if sys.stderr.isatty():
        with waiting(what) as tell:
            yield tell
        return
    text, began, over = what, monotonic(), Event()

    def tell_now(now: str) -> None:
        nonlocal text
        text = now

    def lines() -> None:
        pause = PATIENCE
        with suppress(OSError, ValueError):  # nobody reads on, the disk is full, the stream is closed
            while not over.wait(pause):
                say(f"{text}, {duration(monotonic() - began)} so far")
                pause = SECONDS_BETWEEN_LINES

    thread = Thread(target=lines, daemon=True)
    thread.start()
    try:
        yield tell_now
    finally:
        over.set()
        thread.join(SECONDS_TO_END)
