"""People rank at once while the server of the page is killed again and again: what is lost, and what is there twice."""

import http.client
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import randrange
from time import monotonic, sleep
from typing import TypeVar

from rank_world import Person, make_store, ranking

RANK = "from rlhf.pipeline.cli import main; main()"
SECONDS = 60.0  # how long a rater tries to be heard
T = TypeVar("T")


@dataclass
class Outcome:
    """What a campaign brought."""

    acknowledged: dict[str, int]
    """The act's id by the request's, as the server said."""
    stored: dict[str, int]
    """The same, as the store has it."""
    again: int
    """Requests that had to be sent more than once."""
    seconds: float
    code: int
    """With which the last server ended on SIGTERM."""
    said: str
    """By the servers, on stderr."""

    @property
    def lost(self) -> int:
        return sum(self.stored.get(request) != act for request, act in self.acknowledged.items())


class Server:
    """`rlhf rank` in a process of its own, on one port however often it is started."""

    def __init__(self, store: Path) -> None:
        self._store = store
        self._said = store.with_name("said")
        # Of one from 32768 on Linux could make the near end of a rater's connection while the server is down.
        self.port = randrange(20_000, 32_000)
        while not self._opens():
            assert "--port 0 takes a free one" in self.said, self.said
            self._said.unlink()
            self.port = randrange(20_000, 32_000)

    def start(self) -> None:
        assert self._opens(), self.said

    def _opens(self) -> bool:
        """Start it; whether it has its port."""
        words = [sys.executable, "-c", RANK, "rank", str(self._store), "--port", str(self.port)]
        with self._said.open("ab") as said:
            self._process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=said, text=True)
        assert self._process.stdout is not None
        is_open = "is open" in self._process.stdout.readline()
        if not is_open:
            self._process.communicate()
        return is_open

    def end(self, number: int) -> int:
        self._process.send_signal(number)
        self._process.communicate()
        return self._process.returncode

    @property
    def said(self) -> str:
        return self._said.read_text()


def campaign(folder: Path, num_raters: int, num_rankings: int, num_kills: int) -> Outcome:
    """Each rater ranks as many prompts; the server is killed at even distances on the way."""
    path = folder / "f.sqlite"
    make_store(path, num=num_rankings).close()
    acknowledged: dict[str, int] = {}
    sent: list[int] = []  # how often, for each ranking
    failed: list[BaseException] = []
    server = Server(path)
    began = monotonic()

    def rate(name: str) -> None:
        try:
            person = Person(server.port)
            insist(lambda: person.enter(name))
            for _ in range(num_rankings):
                said = ranking(insist(person.form)[0], 2, 1, 2)
                reply, times = insist(lambda said=said: person.post("/rank", said))  # type: ignore[misc]
                assert reply.status == 200, reply.text
                sent.append(times)
                acknowledged[said["request"]] = int(reply.text)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=rate, args=(f"rater {number}",)) for number in range(num_raters)]
    for thread in threads:
        thread.start()
    for kill in range(num_kills):
        while len(acknowledged) < num_raters * num_rankings * (kill + 1) // (num_kills + 1) and not failed:
            sleep(0.001)
        server.end(signal.SIGKILL)
        server.start()
    for thread in threads:
        thread.join()
    seconds = monotonic() - began
    code = server.end(signal.SIGTERM)
    if failed:
        raise failed[0]
    return Outcome(acknowledged, acts(path), sum(times > 1 for times in sent), seconds, code, server.said)


def insist(ask: Callable[[], T]) -> tuple[T, int]:
    """What is answered at last, and how often it was asked."""
    end = monotonic() + SECONDS
    times = 0
    while True:
        times += 1
        try:
            return ask(), times
        except (OSError, http.client.HTTPException):
            if monotonic() > end:
                raise
            sleep(0.02)


def acts(path: Path) -> dict[str, int]:
    """Rankings that count: the act's id by the request's."""
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        found = dict(db.execute("SELECT request_id, id FROM acts WHERE kind = 'ranking' AND undone_at IS NULL"))
    db.close()
    return found
