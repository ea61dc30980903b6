"""Where rows come from: files, folders, `package.module:function`, and hub data sets.

JSON and CSV are read by the standard library, not by Arrow, so that an error can name file and row.
"""

import csv
import gzip
import hashlib
import importlib
import inspect
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import IO, Any

from pydantic import BaseModel, ConfigDict, model_validator

from rlhf.data.errors import DataError

KNOWN_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md")
ACCEPTED = "give a file, a folder, package.module:function, or a hub id such as owner/name"
UTF16 = (b"\xff\xfe", b"\xfe\xff")
BOM = b"\xef\xbb\xbf"  # spreadsheets write it first; unseen, it becomes part of the first column's name


@dataclass(frozen=True)
class Unreadable:
    """Stands in for a row that could not be read at all, so that it can be counted like any other bad row."""

    reason: str
    detail: str = ""


Row = dict[str, Any] | str | Unreadable


class Source(BaseModel):
    """One set of rows. In a recipe a plain string is short for `{path: …}`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    path: str
    """A file, a folder, `package.module:function`, or a hub id."""
    name: str | None = None
    """Configuration of a hub data set."""
    split: str = "train"
    """Split of a hub data set."""
    revision: str | None = None
    """Branch, tag or commit of a hub data set. Without it the id is taken at its word: a repository that changes
    later still counts as the same data."""
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


def read_rows(source: Source) -> Iterator[tuple[int, Row]]:
    """Yield (row number from 1, row) as written in the source, nothing interpreted.

    Row numbers are lines in JSONL and records elsewhere (a CSV header is not counted); a folder counts on
    through its files in sorted order. Raises DataError when the source is missing, empty or unreadable.
    """
    number = 0
    for number, row in _numbered(source):
        yield number, row
    if number == 0:
        raise DataError(f"{source.path}: it is empty; at least one row is needed")


def locate(source: Source, row: int) -> str:
    """Where a row number of `read_rows` lies, for error messages; in a folder that names the file."""
    if not source.local.is_dir():
        return f"{source.path} row {row}"
    before = 0
    for file in _folder_files(source.local):
        last = 0
        for last, _ in _read_file(file, source.column):
            if before + last == row:
                return f"{file} row {last}"
        before += last
    return f"{source.path} row {row}"


def digest(source: Source) -> str:
    """sha256 of what would be read: contents and the options that select them, never the path itself.

    Of a hub id only what names it (no network): without a revision, a later change there goes unnoticed.
    """
    chosen = f"column:{source.column}\nmap:{json.dumps(source.map, sort_keys=True)}\nformat:{source.format}\n"
    sha = hashlib.sha256(chosen.encode())
    kind = _kind(source)
    if kind == "file":
        _hash_file(sha, source.local, name="".join(_suffixes(source.local)))
    elif kind == "folder":
        for file in _folder_files(source.local):
            _hash_file(sha, file, name=file.relative_to(source.local).as_posix())
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
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise DataError(f"{reference}: {error}; package.module:function must be importable here") from error
    except Exception as error:  # whatever a user's module does while it is imported
        raise DataError(f"{reference}: importing it raised {type(error).__name__}: {error}") from error
    if not callable(function):
        raise DataError(f"{reference}: found {type(function).__name__}, not a function")
    return function


# -- kinds ------------------------------------------------------------------------------------------------


def _kind(source: Source) -> str:
    path = source.path
    if not path.strip():
        raise DataError("no path given; " + ACCEPTED)
    if source.local.is_file():
        return "file"
    if source.local.is_dir():
        return "folder"
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


def _numbered(source: Source) -> Iterator[tuple[int, Row]]:
    kind = _kind(source)
    if kind == "file":
        yield from _read_file(source.local, source.column)
    elif kind == "folder":
        files = _folder_files(source.local)
        if not files:
            raise DataError(f"{source.path}: no readable file in this folder; known: {', '.join(KNOWN_SUFFIXES)}")
        before = 0
        for file in files:
            last = 0
            for last, row in _read_file(file, source.column):
                yield before + last, row
            before += last
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
            yield number, _as_row(row)
    except DataError:
        raise
    except Exception as error:  # whatever a user's function does
        raise DataError(f"{source.path} row {number + 1}: it raised {type(error).__name__}: {error}") from error


def _hub_rows(source: Source) -> Iterator[tuple[int, Row]]:
    from datasets import load_dataset  # half a second, and only hub ids need it

    try:
        rows = load_dataset(source.path, source.name, split=source.split, revision=source.revision)
    except Exception as error:  # datasets raises a dozen kinds: not found, no such split, no network …
        raise DataError(
            f"{source.path}: neither a local file or folder nor loadable from the hub (split {source.split!r})"
            f"{local_hint(source.path)}: {error}"
        ) from error
    yield from enumerate(rows, 1)


# -- files ------------------------------------------------------------------------------------------------


def _suffixes(file: Path) -> tuple[str, str]:
    """(format suffix, ".gz" or ""); an unknown suffix counts as none, which is plain text."""
    packed = ".gz" if file.suffix.lower() == ".gz" else ""
    suffix = (Path(file.stem) if packed else file).suffix.lower()
    return (suffix if suffix in KNOWN_SUFFIXES else ""), packed


def _folder_files(folder: Path) -> list[Path]:
    """Files of known formats, at any depth, hidden ones left out."""
    return sorted(
        file
        for file in folder.rglob("*")
        if file.is_file()
        and _suffixes(file)[0]
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


def _hash_file(sha: "hashlib._Hash", file: Path, name: str) -> None:
    sha.update(f"file:{name}:{file.stat().st_size}\n".encode())
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            sha.update(block)


def _read_file(file: Path, column: str) -> Iterator[tuple[int, Row]]:
    suffix, packed = _suffixes(file)
    try:
        with io.BufferedReader(gzip.open(file)) if packed else file.open("rb") as stream:
            if stream.peek(2).startswith(UTF16):
                raise DataError(f"{file}: it is UTF-16; save the file as UTF-8")
            if suffix == ".parquet":
                yield from _parquet_rows(file, stream)
            elif suffix == ".jsonl":
                yield from _json_lines(stream)
            elif suffix == ".json":
                yield from _json_rows(file, stream.read())
            elif suffix in (".csv", ".tsv"):
                yield from _table_rows(file, stream.read(), delimiter="\t" if suffix == ".tsv" else ",")
            elif text := _decode(file, stream.read()):
                yield 1, {column: text}  # plain text is one document, and no prompt by accident
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error


def _decode(file: Path, content: bytes) -> str:
    if b"\0" in content:
        known = ", ".join(KNOWN_SUFFIXES)
        raise DataError(f"{file}: it is not text (byte {content.index(0)} is zero); known are {known}, each also .gz")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    return text.replace("\r\n", "\n")


def _json_lines(lines: IO[bytes]) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(lines, 1):  # bytes: only \n ends a line, not U+2028 inside a text
        content = line.removeprefix(BOM).strip() if number == 1 else line.strip()
        if content:
            yield number, _json_row(content)


def _json_row(content: bytes) -> Row:
    try:
        return _as_row(json.loads(content, parse_int=_whole_number))
    except RecursionError:
        return Unreadable("JSON nested too deeply")
    except json.JSONDecodeError as error:
        return Unreadable("broken JSON", _json_detail(error))
    except UnicodeDecodeError as error:
        return Unreadable("not UTF-8", f", byte {error.start + 1} of the line")


def _whole_number(digits: str) -> float:
    """An int that a float can hold, else infinity: Python refuses to read thousands of digits."""
    return int(digits) if len(digits) < 300 else float(digits)


def _json_detail(error: json.JSONDecodeError) -> str:
    return f", column {error.colno}: {error.msg.removesuffix(' at')}"


def _as_row(value: Any) -> Row:
    if isinstance(value, (dict, str)):
        return value
    return Unreadable(f"the row is {describe(value)}, not an object")


def _json_rows(file: Path, content: bytes) -> Iterator[tuple[int, Row]]:
    """A list of rows, one row over several lines, or one row per line under a .json name."""
    text = _decode(file, content)
    first = text.lstrip().partition("\n")[0].rstrip()
    if first.startswith("[") or first.endswith(("{", "[", ",", ":")):  # goes on in the next line
        value = _json_value(file, text)
        alone = not isinstance(value, list)
        rows: Iterator[tuple[int, Row]] = enumerate(map(_as_row, [value] if alone else value), 1)
    else:
        alone = first == text.strip()
        rows = _json_lines(io.BytesIO(text.encode()))
    for number, row in rows:
        if alone and isinstance(row, dict):
            _refuse_wrapped(file, row)
        yield number, row


def _json_value(file: Path, text: str) -> Any:
    try:
        return json.loads(text, parse_int=_whole_number)
    except json.JSONDecodeError as error:
        raise DataError(f"{file} line {error.lineno}: broken JSON{_json_detail(error)}") from error
    except RecursionError as error:
        raise DataError(f"{file}: JSON nested too deeply; a row is an object of texts and lists") from error


def _refuse_wrapped(file: Path, row: dict[str, Any]) -> None:
    """Refuse an object like {"train": [row, …]}; a list of messages is no list of rows."""
    lists = [(name, value) for name, value in row.items() if isinstance(value, list)]
    if len(lists) != 1 or "prompt" in row:
        return
    name, values = lists[0]
    if values and all(isinstance(value, dict) and not {"role", "from"} & value.keys() for value in values):
        cure = "write that list alone, or one row a line (JSON Lines)"
        raise DataError(f"{file}: one object that holds its rows under {name!r}; {cure}")


def _table_rows(file: Path, content: bytes, delimiter: str) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(2**31 - 1)  # a document in a cell is longer than the default of 131,072
    table = csv.reader(io.StringIO(_decode(file, content), newline=""), delimiter=delimiter, strict=True)
    number = 0
    try:
        header = next(table, [])
        if len(header) == 1 and ";" in header[0]:
            cure = "save it with commas, or with tabs as .tsv"
            raise DataError(f"{file}: its columns are separated by ';' (the header is {header[0]!r}); {cure}")
        if len(set(header)) < len(header):
            raise DataError(f"{file}: a column name occurs twice in the header: {', '.join(header)}")
        for number, cells in enumerate(filter(None, table), 1):  # a blank line is no record
            if len(cells) == len(header):
                yield number, dict(zip(header, cells, strict=True))
            else:
                detail = f": {len(cells)} cells under {len(header)} column names"
                yield number, Unreadable("wrong number of cells", detail)
    except csv.Error as error:
        raise DataError(f"{file} row {number + 1} (line {table.line_num}): broken table: {error}") from error


def _parquet_rows(file: Path, stream: IO[bytes]) -> Iterator[tuple[int, Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(stream).iter_batches()
        yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)
    except pyarrow.ArrowException as error:
        raise DataError(f"{file}: not a readable Parquet file: {error}") from error


def describe(value: object) -> str:
    """What a value is, in words for people."""
    if value is None:
        return "missing"
    if isinstance(value, bool):
        return "true or false"
    names = {int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")
