"""Who is where: each process of a stage writes it down, so that the others can name the one that died or hangs.

`checkpoints/ranks/0.json` in the stage's folder is process 0's: host and pid, its phase, the steps behind it, its last
collective, since when it has been there, and when it wrote that. A process moves when it begins a phase, goes into a
collective or comes out of one, or ends a step. A stage stands still when none of its processes has moved for
`stop_hung_after` seconds: one that is slow but moves is waited for, and before there is a training state, while texts
are made tokens say, nobody looks.

The one to blame is one that does not even write any more: it is stopped, or its disk hangs. Else it is one that went
into the fewest collectives, for all go into the same ones in the same order, and of those one that does not wait.

Where its file cannot be written a process says so once, and why: to the others it looks like one that does not write
any more. Where a file of another cannot be read, nobody is blamed. No torch.
"""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rlhf.data.errors import named_error, of_file
from rlhf.stages.secrets import mask
from rlhf.stages.signals import is_alive

SECONDS_BETWEEN_WORDS = 2.0
"""How often a process writes down where it is: many share a file system."""
_MANY = 8
"""With more processes than this, only those that may be to blame are listed, and no more of them than this."""


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
    """Whether it is still in it, and has nothing to do there by itself."""
    num_collectives: int = 0
    """How many it went into since the last step ended."""
    seen: float = 0.0
    """When it wrote this; seconds since the epoch."""

    def __str__(self) -> str:
        where, collective = f"{self.phase} after step {self.step}", f"collective {self.collective}"
        if self.num_collectives:
            collective += f", no. {self.num_collectives}"
        if self.waits:
            return f"in the {collective}, in {where}"
        return f"in {where}" + (f", last {collective}" if self.collective else "")

    @property
    def name(self) -> str:
        return f"rank {self.rank} (pid {self.pid} on {self.host})"

    @property
    def seen_ago(self) -> str:
        return f"{_duration(time.time() - self.seen)} ago"


class Watchdog:
    """Where this process is, and what it knows of the others of its stage."""

    def __init__(self, folder: Path, rank: int, num_processes: int, stop_hung_after: float) -> None:
        self.folder, self.num_processes, self.limit = folder / "checkpoints" / "ranks", num_processes, stop_hung_after
        self.interval = min(SECONDS_BETWEEN_WORDS, stop_hung_after / 4)
        """Seconds between two calls of `look`."""
        self._place = Place(rank, socket.gethostname(), os.getpid(), time.time())
        self._written: Place | None = None
        self._moved = time.monotonic()  # which a machine that sleeps does not count
        self._has_warned = False

    @property
    def name(self) -> str:
        return f"rank {self._place.rank} of {self.num_processes}, {self._place}"

    def start(self) -> None:
        """Say that this process is there."""
        global _current
        _current = self
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._warn_of_writing(error)
        self._write()

    def move(self, phase: str | None = None, step: int | None = None) -> None:
        """This process begins a phase, or has so many steps behind it."""
        place = replace(self._place, since=time.time(), phase=phase or self._place.phase, waits=False)
        self._place = place if step is None else replace(place, step=step, num_collectives=0)

    def go_into(self, collective: str) -> None:
        """This process goes into a collective; whether it then waits there is not said."""
        number = self._place.num_collectives + 1
        self._place = replace(self._place, since=time.time(), collective=collective, num_collectives=number)

    @contextmanager
    def waiting(self, waits: bool) -> Iterator[None]:
        """Inside, this process waits for all others, or does what they wait for."""
        before = self._place.waits
        self._place = replace(self._place, since=time.time(), waits=waits)
        yield  # an error that comes out of here is of here: what it says of this place is to be true
        self._place = replace(self._place, since=time.time(), waits=before)

    @contextmanager
    def collective(self, name: str) -> Iterator[None]:
        """Inside, this process waits for all others."""
        self.go_into(name)
        with self.waiting(True):
            yield

    def stood(self, seconds: float) -> None:
        """This process was stopped for so long, as with its whole job, and could not have moved."""
        self._moved += seconds

    def look(self, training: bool) -> str | None:
        """Write down where this process is, and look at the others if in training it has not moved for too long.

        What to say where the stage stands still; None where it does not. For a thread that outlives a hang.
        """
        now = time.monotonic()
        if not training or self._place is not self._written:
            self._moved = now
        self._write()
        # The launcher ends all as soon as one has told: that is to be one that can say where in its code it hangs.
        if now - self._moved < self.limit + (self.interval if self._place.waits else 0.0):
            return None
        places, unread = self._read()
        if any(time.time() - place.since < self.limit for place in places if place.rank != self._place.rank):
            return None
        if not unread:
            return self._of_a_standstill(places)
        stands = f"{self._place.name} has not moved for {_duration(now - self._moved)}"
        self._warn(f"{stands}, and which process hangs cannot be told: {unread[0]}; it goes on waiting")
        return None

    def places(self) -> list[Place]:
        """Where all processes were when they last wrote it down, as far as their files can be read."""
        return self._read()[0]

    def _read(self) -> tuple[list[Place], list[str]]:
        """The same, and why other files cannot be read."""
        found, unread = [], []
        for path in (self.folder / f"{rank}.json" for rank in range(self.num_processes)):
            try:
                found.append(Place(**json.loads(path.read_text(encoding="utf-8"))))
            except OSError as error:
                unread.append(of_file(error))
            except (ValueError, TypeError) as error:
                unread.append(f"{path}: {named_error(error)}")
        return found, unread

    def dead(self) -> Place | None:
        """A process of this machine that has ended without coming to the end of the stage."""
        here = [place for place in self.places() if place.host == self._place.host]
        return next((place for place in here if not is_alive(place.pid)), None)

    def silent_here(self) -> list[int]:
        """Ids of the processes of this machine that do not write any more, where the stage stands still."""
        return [place.pid for place in self._silent(self.places()) if place.host == self._place.host]

    def _silent(self, places: list[Place]) -> list[Place]:
        """Those whose last word is this much older than the newest; clocks may differ by a minute.

        Each writes every `limit / 4` at the latest: a process that lives has never been silent for so long.
        """
        last = max((place.seen for place in places), default=0.0)
        return [place for place in places if last - place.seen >= 0.75 * self.limit]

    def _of_a_standstill(self, places: list[Place]) -> str:
        """Who is to blame, as far as that can be told, and where each of the others is."""
        if blamed := self._silent(places):
            first = min(blamed, key=lambda place: place.seen)
            said = f"{first.name} gave its last sign of life {first.seen_ago}; it was {first}"
        else:
            blamed = _behind(places)
            first = min(blamed, key=lambda place: place.since)
            said = f"{first.name} has not moved for {_duration(time.time() - first.since)}; it is {first}"
            if len(blamed) > 1:
                said = f"which process is waited for cannot be told, for some came equally far: {said}"
        others = [place for place in (blamed[:_MANY] if len(places) > _MANY else places) if place is not first]
        listed = "; ".join(f"rank {place.rank} is {place}" for place in others) or "the others wait"
        return (
            f"it stands still: {said} ({listed}); if it was at work, raise stop_hung_after, which is {self.limit:g} "
            "seconds"
        )

    def _write(self) -> None:
        """Replace our file whole. Where that fails nothing is lost but what the others know of us."""
        place = self._place
        path = self.folder / f"{place.rank}.json"
        text = json.dumps(asdict(replace(place, seen=time.time())))
        try:
            path.with_suffix(".new").write_text(text, encoding="utf-8")
            os.replace(path.with_suffix(".new"), path)
        except OSError as error:
            error.filename = str(path)  # the name that people know
            self._warn_of_writing(error)
        else:
            self._written = place

    def _warn_of_writing(self, error: OSError) -> None:
        until = "until it can, those that wait for it longer than stop_hung_after take it for one that hangs"
        self._warn(f"{self._place.name} cannot write where it is: {of_file(error)}; {until}")

    def _warn(self, text: str) -> None:
        """Say the first of such words. Not at the end of a stage, which removes these files."""
        if self._has_warned or os.path.exists(self.folder.parents[1] / "manifest.json"):
            return
        self._has_warned = True
        with suppress(OSError, ValueError):  # standard output may be closed
            print(mask(f"warning: {text}"), flush=True)


def _behind(places: list[Place]) -> list[Place]:
    """Those that the others wait for: they have come least far, and do not wait themselves unless all of them do."""
    least = min((place.step, place.num_collectives) for place in places)
    found = [place for place in places if (place.step, place.num_collectives) == least]
    return [place for place in found if not place.waits] or found


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


def went_into(collective: str) -> None:
    """This process goes into a collective that cannot be told from the work around it."""
    if _current is not None:
        _current.go_into(collective)


@contextmanager
def collective(name: str) -> Iterator[None]:
    """Inside, this process waits for all others of its stage."""
    if _current is None:
        yield
    else:
        with _current.collective(name):
            yield


@contextmanager
def at_work() -> Iterator[None]:
    """Inside, within a collective, this process does what the others wait for."""
    if _current is None:
        yield
    else:
        with _current.waiting(False):
            yield
