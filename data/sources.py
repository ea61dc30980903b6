"""Where rows come from: files, folders, `package.module:function`, saved data sets and hub data sets."""

import hashlib
import importlib
import inspect
import json
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rlhf.data.errors import ConnectionLost, DataError, Stopped, first_line, named_error, told_as
from rlhf.data.files import (
    KNOWN_SUFFIXES,
    Row,
    Unreadable,
    as_row,
    describe,
    folder_files,
    hash_file,
    read_file,
    suffixes,
)

__all__ = [
    "Row",
    "Source",
    "TextSource",
    "Unreadable",
    "describe",
    "digest",
    "is_streamed",
    "kind_of",
    "load_function",
    "local_hint",
    "locate",
    "named",
    "read_rows",
]

# What `save_to_disk` of datasets leaves beside the rows of one data set, or beside the folders of its splits.
SAVED, SAVED_SPLITS = ("state.json", "dataset_info.json"), ("dataset_dict.json",)
ACCEPTED = "give a file, a folder, package.module:function, or a hub id such as owner/name"
_REQUESTS = ("httpx.RequestError", "httpx2.RequestError", "aiohttp.client_exceptions.ClientError")
"""Errors of requests that had no answer."""


class Source(BaseModel):
    """One set of rows. In a recipe a plain string is short for `{path: …}`."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        json_schema_extra={"type": ["string", "object"]},
    )

    path: str
    """A file, a folder (also one that `datasets` saved), `package.module:function`, or a hub id."""
    name: str | None = None
    """Configuration of a hub data set. [datasets]"""
    split: str = "train"
    """Split of a hub data set, or of a saved one that has splits. [datasets]"""
    streaming: bool = False
    """Read a hub data set while it is downloaded, without a copy of its files; it changes nothing for what lies here.
    Pretrain downloads its texts once, in shares of all processes, and keeps them, packed, beside the tokens.
    [datasets]"""
    revision: str | None = None
    """Branch, tag or commit of a hub data set. Without it the id is taken at its word: a repository that changes later
    still counts as the same data. [datasets]"""
    column: str = "text"
    """The column that holds the text, where rows of text are wanted."""
    format: str | None = None
    """Name of the rows' format (`rlhf data check` shows it), where the columns leave a choice."""
    map: dict[str, str] = {}
    """Names of the columns, where they differ from ours: `{prompt: question, response: answer}`."""
    options: dict[str, Any] = {}
    """Keyword arguments of a `package.module:function`."""

    @model_validator(mode="before")
    @classmethod
    def _from_string(cls, value: object) -> object:
        return {"path": value} if isinstance(value, str) else value

    @property
    def local(self) -> Path:
        return Path(self.path).expanduser()


class TextSource(Source):
    """One source of raw text among several."""

    weight: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Its share of the training tokens, beside the weights of the other sources. Without weights each text is seen once
    per pass. [GPT-3, table 2.2]"""


AnySource = TypeVar("AnySource", bound=Source)


def named(field: str, sources: Sequence[AnySource]) -> dict[str, AnySource]:
    """Sources by the name of their setting: `data`, or of several `data[0]`, `data[1]` …"""
    if len(sources) == 1:
        return {field: sources[0]}
    return {f"{field}[{place}]": source for place, source in enumerate(sources)}


def read_rows(source: Source, files: list[Path] | None = None) -> Iterator[tuple[int, Row]]:
    """Yield (row number from 1, row) as written in the source, nothing interpreted.

    Row numbers are lines in JSONL and records elsewhere (a CSV header is not counted); a folder counts on
    through its files in sorted order. Each file is added to `files` before its first row is read.
    Raises DataError when the source is missing, empty or unreadable.
    """
    number = 0
    for number, row in _numbered(source, [] if files is None else files):
        yield number, row
    if number == 0:
        raise DataError(f"{source.path}: it is empty; at least one row is needed")


def locate(source: Source, row: int) -> str:
    """Where a row number of `read_rows` lies, for error messages; in a folder that names the file."""
    if kind_of(source) != "folder":
        return f"{source.path} row {row}"
    before = 0
    for file in folder_files(source.local):
        last = 0
        for last, _ in read_file(file, source.column):
            if before + last == row:
                return f"{file} row {last}"
        before += last
    return f"{source.path} row {row}"


def digest(source: Source) -> str:
    """sha256 of what would be read: contents and the options that select them, never the path itself.

    Of a hub id only what names it (no network): without a revision, a later change there goes unnoticed.
    """
    chosen = f"column:{source.column}\nmap:{json.dumps(source.map, sort_keys=True)}\nformat:{source.format}\n"
    if isinstance(source, TextSource) and source.weight is not None:
        chosen += f"weight:{source.weight}\n"
    sha = hashlib.sha256(chosen.encode())
    kind = kind_of(source)
    if kind == "file":
        hash_file(sha, source.local, name="".join(suffixes(source.local)))
    elif kind == "folder":
        for file in folder_files(source.local):
            hash_file(sha, file, name=file.relative_to(source.local).as_posix())
    elif kind == "saved":
        for file in sorted(_saved_folder(source).glob("*.arrow")):
            hash_file(sha, file, name=file.name)
    elif kind == "function":
        for number, row in _function_rows(source):
            try:
                sha.update(json.dumps(row, sort_keys=True, default=str).encode() + b"\n")
            except (TypeError, ValueError, RecursionError) as error:
                raise DataError(f"{source.path} row {number}: it cannot be written as JSON: {error}") from error
    else:
        sha.update(f"hub:{source.path}@{source.revision}:{source.name}:{source.split}".encode())
    return sha.hexdigest()


def local_hint(path: str) -> str:
    """What to add when an id `owner/name` cannot be loaded while a folder `owner` lies here; else nothing."""
    folder, _, name = path.partition("/")
    if not name or not Path(folder).is_dir():
        return ""
    near = get_close_matches(name, os.listdir(folder), n=1)
    return f"; the folder {folder}/ here has no {name!r}" + (f", did you mean {folder}/{near[0]}?" if near else "")


def load_function(reference: str) -> Callable[..., Any]:
    """The function that `package.module:function` names; the working directory is searched last."""
    module_name, _, function_name = reference.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())  # last, so that a user's own folders never hide an installed package

    def told(error: BaseException) -> DataError:
        if isinstance(error, ImportError | AttributeError):
            return DataError(f"{reference}: {error}; package.module:function must be importable here")
        return DataError(f"{reference}: importing it raised {named_error(error)}")

    with told_as(told):
        function = getattr(importlib.import_module(module_name), function_name)
    if not callable(function):
        raise DataError(f"{reference}: found {type(function).__name__}, not a function")
    return function


def takes_rows(reference: str) -> bool:
    """Whether a reward function wants the rows too: its third parameter is required, or called `rows`.

    Raises DataError where it cannot be imported or takes something else.
    """
    function = load_function(reference)
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-ins have none to show
        return False
    if _fits(signature, 3) and (not _fits(signature, 2) or list(signature.parameters)[2:3] == ["rows"]):
        return True
    if _fits(signature, 2):
        return False
    raise DataError(
        f"{reference}: takes {signature}; a reward function takes (prompts, responses) or (prompts, responses, rows)"
    )


def _fits(signature: inspect.Signature, number: int) -> bool:
    """Whether a function can be called with so many positional arguments."""
    try:
        signature.bind(*range(number))
    except TypeError:
        return False
    return True


# -- kinds ------------------------------------------------------------------------------------------------


def is_streamed(source: Source) -> bool:
    """Whether it is read while it is downloaded: of what lies here, `streaming` changes nothing."""
    return source.streaming and kind_of(source) == "hub"


def kind_of(source: Source) -> str:
    """file, folder, saved, function or hub. Raises DataError for a path that is none of them."""
    path = source.path
    if not path.strip():
        raise DataError("no path given; " + ACCEPTED)
    if source.local.is_file():
        return "file"
    if source.local.is_dir():
        return "saved" if _holds(source.local, SAVED) or _holds(source.local, SAVED_SPLITS) else "folder"
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", path):
        return "function"
    looks_local = (
        path.startswith((".", "~", "/", os.sep))
        or path.replace(os.sep, "/").count("/") > 1
        or re.fullmatch(r"\.[A-Za-z]\w*", Path(path).suffix)
    )
    if looks_local:
        raise DataError(f"{path}: no such file or folder (looked from {os.getcwd()}); {ACCEPTED}")
    return "hub"


def _numbered(source: Source, opened: list[Path]) -> Iterator[tuple[int, Row]]:
    kind = kind_of(source)
    if kind == "file":
        opened.append(source.local)
        yield from read_file(source.local, source.column)
    elif kind == "folder":
        files = folder_files(source.local)
        if not files:
            raise DataError(f"{source.path}: no readable file in this folder; known: {', '.join(KNOWN_SUFFIXES)}")
        before = 0
        for file in files:
            opened.append(file)
            last = 0
            for last, row in read_file(file, source.column):
                yield before + last, row
            before += last
    elif kind == "saved":
        yield from _saved_rows(source)
    elif kind == "function":
        yield from _function_rows(source)
    else:
        yield from _hub_rows(source)


def _function_rows(source: Source) -> Iterator[tuple[int, Row]]:
    function = load_function(source.path)
    try:
        inspect.signature(function).bind(**source.options)
    except (TypeError, ValueError) as error:  # ValueError: a built-in that tells no signature
        raise DataError(f"{source.path}: options {sorted(source.options)} do not fit: {error}") from error
    number = 0
    try:
        rows = function(**source.options)
        if isinstance(rows, (str, bytes, dict)) or not (hasattr(rows, "__iter__") or hasattr(rows, "__getitem__")):
            found = "None" if rows is None else type(rows).__name__
            raise DataError(f"{source.path}: it returned {found}; return a list of rows, or yield them")
        for number, row in enumerate(rows, 1):
            yield number, as_row(row)
    except (DataError, Stopped):
        raise
    except (Exception, SystemExit) as error:  # whatever a user's function does
        raise DataError(f"{source.path} row {number + 1}: it raised {type(error).__name__}: {error}") from error


def _holds(folder: Path, names: tuple[str, ...]) -> bool:
    return all((folder / name).is_file() for name in names)


def _saved_folder(source: Source) -> Path:
    """The folder that holds the rows: the source's own, or that of its split."""
    if _holds(source.local, SAVED):
        return source.local
    splits = sorted(folder.name for folder in source.local.iterdir() if _holds(folder, SAVED))
    if source.split not in splits:
        raise DataError(f"{source.path}: no split {source.split!r}; it has {', '.join(splits) or 'none'}; set split")
    return source.local / source.split


def _saved_rows(source: Source) -> Iterator[tuple[int, Row]]:
    from datasets import load_from_disk  # half a second, and only data sets need it

    try:
        rows = load_from_disk(str(_saved_folder(source))).with_format(None)  # saved, it may give out tensors
        yield from enumerate(rows, 1)
    except DataError:
        raise
    except Exception as error:  # datasets and pyarrow raise a dozen kinds: a file is missing, cut short …
        raise DataError(f"{source.path}: cannot be read as a saved data set: {error}") from error


def _hub_rows(source: Source) -> Iterator[tuple[int, Row]]:
    rows = hub_set(source)
    with from_hub(source, "it"):
        yield from enumerate(rows, 1)


def hub_set(source: Source) -> Any:
    """The data set of a hub id, as `datasets` has it."""
    from datasets import load_dataset

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # each retry of a request
    with from_hub(source):
        return load_dataset(
            source.path, source.name, split=source.split, revision=source.revision, streaming=source.streaming
        )


@contextmanager
def from_hub(source: Source, reading: str | None = None, kept: str = "") -> Iterator[None]:
    """Say what went wrong with a hub data set: DataError where it cannot be loaded, ConnectionLost where it was found
    and the connection then broke.

    `reading` names what is read of a set that was opened before; `kept` is what to say of what was read so far.
    """
    try:
        yield
    except Exception as error:  # datasets raises a dozen kinds: not found, no such split, no network …
        if (reading or _is_of_download(error)) and _is_of_connection(error):
            cause = error
            if isinstance(error, DataError) and isinstance(error.__cause__, Exception):  # of `hub_set`
                cause = error.__cause__
            raise ConnectionLost(
                f"{source.path}: the connection to the hub was lost while {reading or 'it'} was read "
                f"({first_line(cause)}){kept}; run again"
            ) from error
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{source.path}: neither a local file or folder nor loadable from the hub (split {source.split!r})"
            f"{local_hint(source.path)}: {first_line(error)}"
        ) from error


def _is_of_download(error: BaseException) -> bool:
    """Whether `load_dataset`, which opens a set and downloads it in one, had found the set already."""
    return any(frame.name == "download_and_prepare" for frame in traceback.extract_tb(error.__traceback__))


def _is_of_connection(error: BaseException | None) -> bool:
    """Whether an error, or one that it came of, is a connection's or a server's that is too busy: those pass."""
    while error is not None:
        if type(error).__name__ == "OfflineModeIsEnabled":  # a ConnectionError, though HF_HUB_OFFLINE is a wish
            return False
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None and (status in (408, 429) or status >= 500):
            return True
        if status is None and isinstance(error, ConnectionError | TimeoutError):
            return True
        # by name: releases of huggingface_hub differ in which of them they come with
        if any(f"{kind.__module__}.{kind.__name__}" in _REQUESTS for kind in type(error).__mro__):
            return True
        error = error.__cause__ or error.__context__
    return False
