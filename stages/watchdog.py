"""Who is where: each process of a stage writes it down, so that the others can name the one that died or hangs.

`checkpoints/ranks/0.json` in the stage's folder is process 0's: host and pid, its phase, the steps behind it, its last
collective, and since when it has been there. A process moves when it begins a phase, goes into a collective or comes
out of one, or ends a step. A stage stands still when none of its processes has moved for `stop_hung_after` seconds: one
that is slow but moves is waited for, and before there is a training state, while texts are made tokens say, nobody
looks. No torch.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rlhf.stages.signals import is_alive

SECONDS_BETWEEN_WORDS = 2.0
"""How often a process that moved writes down where it is: many share a file system."""
_MANY = 8
"""With more processes than this, those that only wait are not listed one by one."""


@dataclass(frozen=True)
class Place:
    """Where a process is."""

    rank: int
    host: str
    pid: int
    since: float
    """Seconds since the epoch."""
    phase: str = "loading"
    step: int = 0
    """Steps that are behind it."""
    collective: str = ""
    """The last one that it went into."""
    waits: bool = False
    """Whether it is still in it."""

    def __str__(self) -> str:
        where = f"{self.phase} after step {self.step}"
        if self.waits:
            return f"in the collective {self.collective}, {where}"
        return f"in {where}" + (f", last collective {self.collective}" if self.collective else "")

    @property
    def name(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"


class Watchdog:
    """Where this process is, and what it knows of the others of its stage."""

    def __init__(self, folder: Path, rank: int, num_processes: int, stop_hung_after: float) -> None:
        self.folder, self.num_processes, self.limit = folder / "checkpoints" / "ranks", num_processes, stop_hung_after
        self.interval = min(SECONDS_BETWEEN_WORDS, stop_hung_after / 4)
        """Seconds between two calls of `look`."""
        self._place = Place(rank, socket.gethostname(), os.getpid(), time.time())
        self._written: Place | None = None
        self._moved = time.monotonic()  # which a machine that sleeps does not count

    @property
    def name(self) -> str:
        return f"rank {self._place.rank} of {self.num_processes}, {self._place}"

    def start(self) -> None:
        """Say that this process is there."""
        global _current
        _current = self
        with suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
        self._write()

    def move(self, phase: str | None = None, step: int | None = None) -> None:
        """This process begins a phase, or has so many steps behind it."""
        place = self._place
        self._place = replace(
            place, since=time.time(), phase=phase or place.phase, step=place.step if step is None else step
        )

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Inside, this process waits for all others."""
        self._place = replace(self._place, since=time.time(), collective=name, waits=True)
        yield
        self._place = replace(self._place, since=time.time(), waits=False)

    def look(self, training: bool) -> str | None:
        """Write down where this process is, and look at the others if in training it has not moved for too long.

        What to say where the stage stands still; None where it does not. For a thread that outlives a hang.
        """
        now = time.monotonic()
        if self._place is not self._written:
            self._moved = now
            self._write()
        if not training:
            self._moved = now
        # The launcher ends all as soon as one has told: that is to be one that can say where in its code it hangs.
        if now - self._moved < self.limit + (self.interval if self._place.waits else 0.0):
            return None
        places = self.places()
        all_stand = all(time.time() - place.since >= self.limit for place in places if place.rank != self._place.rank)
        return self._of_a_standstill(places) if all_stand and len(places) == self.num_processes else None

    def places(self) -> list[Place]:
        """Where all processes were when they last wrote it down, as far as their files can be read."""
        found = []
        for rank in range(self.num_processes):
            with suppress(OSError, ValueError, TypeError):
                found.append(Place(**json.loads((self.folder / f"{rank}.json").read_text(encoding="utf-8"))))
        return found

    def dead(self) -> Place | None:
        """A process of this machine that has ended without coming to the end of the stage."""
        here = [place for place in self.places() if place.host == self._place.host]
        return next((place for place in here if not is_alive(place.pid)), None)

    def _of_a_standstill(self, places: list[Place]) -> str:
        """The one that has not moved for longest among those that wait for nobody; where each of the others is."""
        at_work = [place for place in places if not place.waits] or places
        first = min(at_work, key=lambda place: place.since)
        others = [place for place in places if place is not first and (len(places) <= _MANY or not place.waits)]
        listed = "; ".join(f"rank {place.rank} is {place}" for place in others) or "the others wait"
        return (
            f"it stands still: {first.name} has not moved for {_duration(time.time() - first.since)}; it is {first} "
            f"({listed}); if it was at work, raise stop_hung_after, which is {self.limit:g} seconds"
        )

    def _write(self) -> None:
        """Replace our file whole; a full disk does not matter here, and is told of where something is lost by it."""
        place = self._place
        path = self.folder / f"{place.rank}.json"
        with suppress(OSError):
            path.with_suffix(".new").write_text(json.dumps(asdict(place)), encoding="utf-8")
            os.replace(path.with_suffix(".new"), path)
            self._written = place


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"


_current: Watchdog | None = None


def here() -> str:
    """Where this process is, as the end of an error's message; nothing where it is alone."""
    return "" if _current is None else f" ({_current.name})"


def moved(phase: str | None = None, step: int | None = None) -> None:
    """This process begins a phase, or has so many steps behind it; for code that knows of no watchdog."""
    if _current is not None:
        _current.move(phase, step)


@contextmanager
def collective(name: str) -> Iterator[None]:
    """Inside, this process waits for all others of its stage."""
    if _current is None:
        yield
    else:
        with _current.collective(name):
            yield
