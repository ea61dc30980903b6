"""Recipes and data files that are wrong in every way a seeded fuzzer thinks of, and what the command line must do.

A case ends with 0, or with 2 and a message that names the place; never in a traceback, never in nothing for ever, and
without a file that nobody asked for.
"""

import contextlib
import io
import os
import re
import shutil
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from faults_world import Server
from points import STAGES, Point

from rlhf.pipeline.recipe import Recipe

SECONDS = 60
"""More than that is no end, on a slow machine too."""


@dataclass(frozen=True)
class Case:
    """A file to write and the words to give to `rlhf`."""

    what: str
    """How the file was changed."""
    name: str
    content: bytes
    words: list[str]
    small: bool = True
    """It can be run: no number in it asks for a large model or a long run."""


@dataclass
class Hang(BaseException):
    """The time is over; not an Exception, so that nobody swallows it."""

    seconds: float = SECONDS


@dataclass
class Result:
    """What became of a case."""

    case: Case
    code: int | None
    message: str
    problems: list[str] = field(default_factory=list)


def call(words: list[str]) -> tuple[int | None, str, str]:
    """`rlhf` in this process: exit code (None: it hung), stdout, stderr."""
    from rlhf.pipeline.cli import main

    def over(_number: int, _frame: FrameType | None) -> None:
        raise Hang

    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(SECONDS)
    code: int | None = 0
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("always")
            main(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except Hang:
        code = None
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode("utf-8", "replace"))  # type: ignore[attr-defined]
    return code, texts[0], texts[1]


def forked(server: Server, case: Case) -> tuple[int | None, str, str]:
    """`rlhf run` in a process of its own; for data it ends where training would begin."""
    point = Point("pretrain", "write", 1, "before") if case.name != "recipe.yaml" else None
    ended = server.rlhf(*case.words, kill_after=SECONDS, point=point)
    if ended.killed:
        return (0 if point is not None and ended.stage == point.stage else None), ended.said, ""
    return ended.code, "", ended.said


def run_case(case: Case, home: Path, server: Server) -> Result:
    """Write the case's file into `home`, the working directory, call `rlhf`, and look at what it said and did."""
    path = home / case.name
    write(path, case.content)
    before = tree(home)
    code, out, err = forked(server, case) if case.words[0] == "run" else call(case.words)
    after = tree(home)
    changed = {name for name in {**before, **after} if before.get(name) != after.get(name)}
    shutil.rmtree(home / "run", ignore_errors=True)
    result = Result(case, code, err.strip() or out.strip())
    say = result.problems.append
    if code is None:
        say(f"hangs for more than {SECONDS} s")
    elif code not in (0, 2):
        say(f"ends with {code}")
    if "Traceback" in err or "Traceback" in out:
        say("shows a traceback")
    told = err if case.words[0] != "data" else out + err  # what no row of can be used is told on stdout
    if code == 2 and not names_place(case, told):
        say("names no place")
    if code == 2 and len(told) > 20_000:
        say(f"says {len(told)} characters")
    if stray := sorted(name for name in changed if case.words[0] != "run" or not re.match(r"run(/|$)", name)):
        say(f"touches {', '.join(stray)}")
    return result


def names_place(case: Case, told: str) -> bool:
    """Whether a message names the file, a row of it, or a section or setting."""
    if case.words[0] == "data":
        return case.name in told or re.search(r"\brow \d", told) is not None
    return any(place in told for place in (case.name, *STAGES, *Recipe.model_fields))


def tree(folder: Path) -> dict[str, tuple[int, int]]:
    """Files with sizes and times of change; links are not followed."""
    found = {}
    for parent, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            about = os.lstat(os.path.join(parent, name))
            found[os.path.relpath(os.path.join(parent, name), folder)] = (about.st_size, about.st_mtime_ns)
    return {name: (0, 0) if os.path.isdir(folder / name) else about for name, about in found.items()}


def write(path: Path, content: bytes) -> None:
    """A file, or where the content is the name of an oddity, that."""
    oddity = ODDITIES.get(content)
    if path.is_dir() and not path.is_symlink():
        for file in sorted(path.rglob("*"), reverse=True):
            file.unlink() if file.is_symlink() or not file.is_dir() else file.rmdir()
        path.rmdir()
    elif os.path.lexists(path):
        path.unlink()
    if oddity is None:
        path.write_bytes(content)
    else:
        oddity(path)


def _link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def _folder_that_holds_itself(path: Path) -> None:
    path.mkdir()
    (path / "again").symlink_to("..")
    (path / "self").symlink_to(".")
    (path / "rows.jsonl").write_text('{"text": "a", "prompt": "a", "response": "b", "chosen": "c", "rejected": "d"}\n')


def _folder_of_a_folder(path: Path) -> None:
    (path / "rows.jsonl").mkdir(parents=True)


ODDITIES: dict[bytes, Callable[[Path], None]] = {
    b"<folder>": Path.mkdir,
    b"<folder of a folder>": _folder_of_a_folder,
    b"<folder that holds itself>": _folder_that_holds_itself,
    b"<link to itself>": _link_to_itself,
    b"<link to nothing>": lambda path: path.symlink_to("nothing"),
    b"<link to a device>": lambda path: path.symlink_to("/dev/null"),
    b"<pipe>": os.mkfifo,
}
