"""The tables of a feedback store, and how its file is made, opened and brought up to date.

WAL: readers and one writer work at once, in any number of processes of one machine (it needs shared memory, so not on
a network file system). `synchronous=FULL`: a commit returns when the disk says that the write-ahead log is on it. A
kill of the process loses nothing that was committed; neither does a loss of power, if the disk keeps its word.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlhf.data.errors import DataError, SettingsError, first_line

APPLICATION = 0x524C4846  # "RLHF", what tells a store from other SQLite files
BUSY_SECONDS = 30.0  # how long a writer waits for the others

_FIRST = """
CREATE TABLE prompts (
    id INTEGER PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE,              -- of the messages, outer whitespace left out
    messages TEXT NOT NULL,                   -- JSON
    gold TEXT,                                -- JSON {answer's text: rank}, where the right ranks are known
    overlap INTEGER NOT NULL DEFAULT 0,       -- 1: all raters rate it
    meta TEXT NOT NULL DEFAULT '{}',          -- JSON, the caller's own
    round INTEGER NOT NULL DEFAULT 0,         -- the newest one among its answers, which is the one to rate
    num_answers INTEGER NOT NULL DEFAULT 0,   -- of that round, and so are the next two
    num_people INTEGER NOT NULL DEFAULT 0,    -- rankings by people that count
    num_judges INTEGER NOT NULL DEFAULT 0,    -- rankings by judges and endpoints that count
    ready INTEGER NOT NULL DEFAULT 0          -- 1: it has two answers or more, so that there is something to rank
) STRICT;
CREATE INDEX prompts_by_people ON prompts (ready, overlap, num_people, id, round);
CREATE INDEX prompts_by_judges ON prompts (ready, overlap, num_judges, id, round);

CREATE TABLE counts (                         -- how many ready prompts there are of each sort
    overlap INTEGER NOT NULL,
    num_people INTEGER NOT NULL,
    num_judges INTEGER NOT NULL,
    num INTEGER NOT NULL,
    PRIMARY KEY (overlap, num_people, num_judges)
) STRICT, WITHOUT ROWID;
CREATE TRIGGER prompt_changed AFTER UPDATE OF overlap, num_people, num_judges, ready ON prompts
WHEN OLD.ready = 1 OR NEW.ready = 1 BEGIN
    UPDATE counts SET num = num - OLD.ready
        WHERE overlap = OLD.overlap AND num_people = OLD.num_people AND num_judges = OLD.num_judges;
    INSERT INTO counts VALUES (NEW.overlap, NEW.num_people, NEW.num_judges, NEW.ready)
        ON CONFLICT DO UPDATE SET num = num + excluded.num;
END;

CREATE TABLE answers (
    id INTEGER PRIMARY KEY,
    prompt_id INTEGER NOT NULL REFERENCES prompts (id),
    round INTEGER NOT NULL CHECK (round >= 1),
    digest BLOB NOT NULL,                     -- of the text, outer whitespace left out
    text TEXT NOT NULL,
    model TEXT NOT NULL,                      -- what it came from; never shown to raters
    temperature REAL,
    UNIQUE (prompt_id, round, digest)
) STRICT;
CREATE TRIGGER answer_added AFTER INSERT ON answers BEGIN
    UPDATE prompts SET round = NEW.round, num_answers = 0, num_people = 0, num_judges = 0, ready = 0
        WHERE id = NEW.prompt_id AND round < NEW.round;
    UPDATE prompts SET num_answers = num_answers + 1, ready = num_answers >= 1   -- the number before this one
        WHERE id = NEW.prompt_id AND round = NEW.round;
END;

CREATE TABLE raters (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL CHECK (kind IN ('person', 'judge', 'endpoint')),
    token_hash BLOB UNIQUE
) STRICT;

CREATE TABLE acts (                           -- what raters did: rankings, skips and flags, in that order
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    request_id TEXT NOT NULL UNIQUE,          -- made by the client, so that what is sent twice is stored once
    kind TEXT NOT NULL CHECK (kind IN ('ranking', 'skip', 'flag')),
    prompt_id INTEGER NOT NULL REFERENCES prompts (id),
    round INTEGER NOT NULL,
    rater_id INTEGER NOT NULL REFERENCES raters (id),
    ranks TEXT CHECK ((ranks IS NOT NULL) = (kind = 'ranking')),   -- JSON {answer id: rank}; 1 is best, equal is a tie
    scores TEXT,                              -- JSON {answer id: number}, higher is better
    all_bad INTEGER NOT NULL DEFAULT 0,
    strength INTEGER CHECK (strength BETWEEN 1 AND 7),
    text TEXT NOT NULL DEFAULT '',            -- a ranking's note, a flag's reason
    seconds REAL,
    shown TEXT,                               -- JSON [answer id], the order in which the answers were shown
    created_at TEXT NOT NULL,
    undone_at TEXT                            -- taken back, or replaced by a later act of the same rater
) STRICT;
CREATE UNIQUE INDEX acts_that_count ON acts (prompt_id, round, rater_id) WHERE undone_at IS NULL;
CREATE INDEX acts_of_rater ON acts (rater_id, id) WHERE undone_at IS NULL;
CREATE INDEX acts_by_kind ON acts (rater_id, undone_at, kind, prompt_id, round, seconds);
CREATE INDEX acts_taken_back ON acts (rater_id, prompt_id, id) WHERE undone_at IS NOT NULL;
CREATE TRIGGER ranking_added AFTER INSERT ON acts WHEN NEW.kind = 'ranking' BEGIN
    UPDATE prompts SET
        num_people = num_people + ((SELECT kind FROM raters WHERE id = NEW.rater_id) = 'person'),
        num_judges = num_judges + ((SELECT kind FROM raters WHERE id = NEW.rater_id) <> 'person')
        WHERE id = NEW.prompt_id AND round = NEW.round;
END;
CREATE TRIGGER ranking_taken_back AFTER UPDATE OF undone_at ON acts
WHEN NEW.kind = 'ranking' AND OLD.undone_at IS NULL AND NEW.undone_at IS NOT NULL BEGIN
    UPDATE prompts SET
        num_people = num_people - ((SELECT kind FROM raters WHERE id = NEW.rater_id) = 'person'),
        num_judges = num_judges - ((SELECT kind FROM raters WHERE id = NEW.rater_id) <> 'person')
        WHERE id = NEW.prompt_id AND round = NEW.round;
END;

CREATE TABLE leases (                         -- the prompt that a rater has in hand
    rater_id INTEGER PRIMARY KEY REFERENCES raters (id),
    prompt_id INTEGER NOT NULL REFERENCES prompts (id),
    until REAL NOT NULL                       -- seconds since 1970
) STRICT;
CREATE INDEX leases_of_prompt ON leases (prompt_id);
"""

# Prompts of the newest round come first, and how far it is stands by itself. What each rater has dealt with is counted
# as it happens: counting it for each page took as long as the rater had ranked much.
_BY_ROUND = """
DROP INDEX prompts_by_people;
DROP INDEX prompts_by_judges;
DROP INDEX acts_by_kind;
DROP TRIGGER prompt_changed;
DROP TRIGGER ranking_added;
DROP TRIGGER ranking_taken_back;
DROP TABLE counts;

CREATE INDEX prompts_by_people ON prompts (ready, round, overlap, num_people, id);
CREATE INDEX prompts_by_judges ON prompts (ready, round, overlap, num_judges, id);

CREATE TABLE counts (                         -- how many ready prompts there are of each sort
    round INTEGER NOT NULL,                   -- the prompt's newest
    overlap INTEGER NOT NULL,
    num_people INTEGER NOT NULL,
    num_judges INTEGER NOT NULL,
    num INTEGER NOT NULL,
    PRIMARY KEY (round, overlap, num_people, num_judges)
) STRICT, WITHOUT ROWID;
INSERT INTO counts SELECT round, overlap, num_people, num_judges, count(*) FROM prompts WHERE ready = 1
    GROUP BY round, overlap, num_people, num_judges;

CREATE TABLE dealt (                          -- of how many of them each rater has a ranking, skip or flag that counts
    rater_id INTEGER NOT NULL REFERENCES raters (id),
    kind TEXT NOT NULL,
    round INTEGER NOT NULL,
    overlap INTEGER NOT NULL,
    num_people INTEGER NOT NULL,
    num_judges INTEGER NOT NULL,
    num INTEGER NOT NULL,
    PRIMARY KEY (rater_id, kind, round, overlap, num_people, num_judges)
) STRICT, WITHOUT ROWID;
INSERT INTO dealt SELECT a.rater_id, a.kind, p.round, p.overlap, p.num_people, p.num_judges, count(*)
    FROM acts a JOIN prompts p ON p.id = a.prompt_id AND p.round = a.round WHERE a.undone_at IS NULL AND p.ready = 1
    GROUP BY a.rater_id, a.kind, p.round, p.overlap, p.num_people, p.num_judges;

CREATE TRIGGER prompt_changed AFTER UPDATE OF round, overlap, num_people, num_judges, ready ON prompts
WHEN OLD.ready = 1 OR NEW.ready = 1 BEGIN
    UPDATE counts SET num = num - OLD.ready WHERE round = OLD.round AND overlap = OLD.overlap
        AND num_people = OLD.num_people AND num_judges = OLD.num_judges;
    INSERT INTO counts VALUES (NEW.round, NEW.overlap, NEW.num_people, NEW.num_judges, NEW.ready)
        ON CONFLICT DO UPDATE SET num = num + excluded.num;
    UPDATE dealt SET num = num - OLD.ready WHERE round = OLD.round AND overlap = OLD.overlap
        AND num_people = OLD.num_people AND num_judges = OLD.num_judges AND (rater_id, kind) IN
        (SELECT rater_id, kind FROM acts WHERE prompt_id = OLD.id AND round = OLD.round AND undone_at IS NULL);
    INSERT INTO dealt SELECT rater_id, kind, NEW.round, NEW.overlap, NEW.num_people, NEW.num_judges, NEW.ready
        FROM acts WHERE prompt_id = NEW.id AND round = NEW.round AND undone_at IS NULL
        ON CONFLICT DO UPDATE SET num = num + excluded.num;
END;

-- In each of the two first the rater's own count, of the prompt as it is; then the prompt's, which moves both.
CREATE TRIGGER act_added AFTER INSERT ON acts BEGIN
    INSERT INTO dealt SELECT NEW.rater_id, NEW.kind, round, overlap, num_people, num_judges, 1
        FROM prompts WHERE id = NEW.prompt_id AND round = NEW.round AND ready = 1
        ON CONFLICT DO UPDATE SET num = num + 1;
    UPDATE prompts SET
        num_people = num_people + ((SELECT kind FROM raters WHERE id = NEW.rater_id) = 'person'),
        num_judges = num_judges + ((SELECT kind FROM raters WHERE id = NEW.rater_id) <> 'person')
        WHERE id = NEW.prompt_id AND round = NEW.round AND NEW.kind = 'ranking';
END;
CREATE TRIGGER act_taken_back AFTER UPDATE OF undone_at ON acts
WHEN OLD.undone_at IS NULL AND NEW.undone_at IS NOT NULL BEGIN
    UPDATE dealt SET num = num - 1 WHERE (rater_id, kind, round, overlap, num_people, num_judges) =
        (SELECT NEW.rater_id, NEW.kind, round, overlap, num_people, num_judges
         FROM prompts WHERE id = NEW.prompt_id AND round = NEW.round AND ready = 1);
    UPDATE prompts SET
        num_people = num_people - ((SELECT kind FROM raters WHERE id = NEW.rater_id) = 'person'),
        num_judges = num_judges - ((SELECT kind FROM raters WHERE id = NEW.rater_id) <> 'person')
        WHERE id = NEW.prompt_id AND round = NEW.round AND NEW.kind = 'ranking';
END;
"""

MIGRATIONS = [_FIRST, _BY_ROUND]
"""Scripts that bring a store from version 0 to 1, from 1 to 2 and so on. Never change one that was released."""


def create(path: Path) -> sqlite3.Connection:
    """A new store's connection. Raises SettingsError where there is something already, or no folder."""
    if not path.parent.is_dir():
        raise SettingsError(f"{path}: no folder {path.parent}; make it first")
    taken = SettingsError(f"{path}: already there; open it, or give another name")
    if path.exists() and not path.is_file():
        raise taken
    with _connected(path, "rwc") as connection:
        # A kill during `create` leaves a file without tables, which may be gone on with.
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            raise taken
        connection.execute("PRAGMA journal_mode = WAL")
        if _migrate(path, connection) != 0:  # another process was quicker
            raise taken
        return connection


def open_(path: Path, write: bool = True) -> sqlite3.Connection:
    """An existing store's connection, brought up to date if it may write. Raises DataError for what is no store."""
    if not path.is_file():
        raise DataError(f"{path}: no such file; a feedback store is wanted")
    with _connected(path, "rw") as connection:
        if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
            raise DataError(f"{path}: not a feedback store but another SQLite file, or an empty one")
        if write:
            _migrate(path, connection)
        return connection


def remove(path: Path) -> None:
    """Delete a store that nobody has open, or what is left of one."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        Path(f"{path}{suffix}").unlink(missing_ok=True)


def identity(path: Path) -> tuple[int, int] | None:
    """What tells a file from another one of the same name; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


@contextmanager
def _connected(path: Path, mode: str) -> Iterator[sqlite3.Connection]:
    """A connection, which is closed only if something goes wrong while it is set up."""
    connection: sqlite3.Connection | None = None
    try:
        connection = sqlite3.connect(
            f"{path.absolute().as_uri()}?mode={mode}",
            uri=True,
            timeout=BUSY_SECONDS,
            isolation_level=None,  # transactions begin where we say so
            check_same_thread=False,  # Store has a lock
        )
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA foreign_keys = ON")
        yield connection
    except BaseException as error:
        if connection is not None:
            connection.close()
        if isinstance(error, sqlite3.Error):
            # An OperationalError is not about what is in the file.
            what = "" if isinstance(error, sqlite3.OperationalError) else "not a feedback store, or a damaged one: "
            cure = "; look at the modes of it and its folder, or name another place"
            closed = getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY)
            raise DataError(f"{path}: {what}{first_line(error)}{cure * closed}") from error
        raise


def _migrate(path: Path, connection: sqlite3.Connection) -> int:
    """Run the scripts that are missing, all or none; the version that was found."""
    found = _version(path, connection)
    if found == len(MIGRATIONS):
        return found
    connection.execute("BEGIN IMMEDIATE")
    found = _version(path, connection)  # another process may have been quicker
    for script in MIGRATIONS[found:]:
        for statement in _statements(script):
            connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
    connection.execute("COMMIT")
    return found


def _version(path: Path, connection: sqlite3.Connection) -> int:
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    if version > len(MIGRATIONS):
        known = f"its version is {version}, known here are up to {len(MIGRATIONS)}"
        raise DataError(f"{path}: this store was written by a newer release ({known}); update rlhf-toolkit")
    return version


def _statements(script: str) -> Iterator[str]:
    """The statements of a script one by one: `executescript` would end the transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
