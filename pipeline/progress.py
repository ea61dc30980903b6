"""What a command that lets one wait says on a terminal: after two seconds, for what, how far it is and since when."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, Timer
from typing import Any

PATIENCE = 2.0
"""Seconds of silence."""


@contextmanager
def waiting(what: str, elsewhere: Callable[[str], None] = lambda text: None) -> Iterator[Callable[[str], None]]:
    """Show that `what` is going on, once it has taken PATIENCE; the line is gone at the end.

    Yields a function that says how far it is in the place of `what`; it may be called as often as one likes. Where
    there is no terminal, it is the one that is given for `elsewhere`.
    """
    if not sys.stderr.isatty():
        yield elsewhere
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
