"""The file of a feedback store while it is open: one thread at a time, all or nothing, and SQLite's errors as ours."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import Self

from rlhf.data.errors import DataError, first_line
from rlhf.data.feedback import schema

PAUSE = 0.05  # seconds at most after a batch: who waits for SQLite looks again only every few hundredths of a second


class StoreFile:
    """What `rlhf.data.feedback.store.Store` reads and writes through."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._db = connection
        self._lock = RLock()
        self._file = path.absolute()
        self._identity = schema.identity(self._file)

    @classmethod
    def create(cls, path: str | Path) -> Self:
        """A new store. Raises SettingsError if the file is there already (what a killed `create` left is not)."""
        return cls(Path(path), schema.create(Path(path)))

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """A store that is there, brought up to date if an older release wrote it; a newer one's is refused."""
        return cls(Path(path), schema.open_(Path(path)))

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check_writable(self) -> None:
        """Raises DataError if the file may be read alone."""
        with self._write():
            self._db.execute("UPDATE leases SET until = until WHERE 0")

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Several calls as one transaction, all or none: adding thousands of prompts one by one waits for the disk
        thousands of times. Other writers wait meanwhile, so keep it to a few hundred prompts; they are let in after it,
        or one batch after another would keep them out."""
        with self._lock:
            is_part, began = self._db.in_transaction, time.monotonic()
            with self._write():
                yield
        if not is_part:
            time.sleep(min((time.monotonic() - began) / 3, PAUSE))

    @contextmanager
    def _read(self) -> Iterator[None]:
        with self._lock, self._told():
            yield

    @contextmanager
    def _write(self) -> Iterator[None]:
        """A transaction, or within one a part of it that fails alone."""
        with self._lock, self._told():
            begin, commit, back = (
                ("SAVEPOINT part", "RELEASE part", "ROLLBACK TO part")
                if self._db.in_transaction
                else ("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK")
            )
            self._db.execute(begin)
            try:
                # SQLite would write on into a file that nobody finds again. Not before: waiting may have been long.
                if schema.identity(self._file) != self._identity:
                    raise sqlite3.OperationalError("the file was moved, replaced or deleted while it was open")
                yield
                self._db.execute(commit)
            except BaseException:
                if self._db.in_transaction:  # SQLite ends it by itself where the disk is full
                    self._db.execute(back)
                raise

    @contextmanager
    def _snapshot(self) -> Iterator[sqlite3.Connection]:
        """A connection of its own that sees the store as it is now."""
        with self._told():
            db = schema.open_(self.path, write=False)
            try:
                db.execute("BEGIN")
                yield db
            finally:
                db.close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        """SQLite's errors as ours."""
        try:
            yield
        except sqlite3.Error as error:
            raise DataError(f"{self.path}: {first_line(error)}") from error
