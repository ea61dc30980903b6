"""Reading files (JSON Lines, JSON, CSV, Parquet and plain text, each also packed), and writing new ones.

JSON and CSV are read by the standard library, not by Arrow, so that an error can name file and row.
"""

import csv
import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rlhf.data.errors import DataError, SettingsError, is_utf8

KNOWN_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".md")
DOCUMENTS = (".txt", ".md", "")  # each file is one text
TABLES = (".csv", ".tsv")  # the names of their columns are their first line
PACKED = (".gz", ".zst")
WORKBOOKS = (".xlsx", ".xls", ".ods")
SEPARATORS = (",", ";", "\t")  # of tables: a semicolon where a comma is part of numbers
UTF16 = (b"\xff\xfe", b"\xfe\xff")
BOM = b"\xef\xbb\xbf"  # spreadsheets write it first; unseen, it becomes part of the first column's name


@dataclass(frozen=True)
class Unreadable:
    """Stands in for a row that could not be read at all, so that it can be counted like any other bad row."""

    reason: str
    detail: str = ""


Row = dict[str, Any] | str | Unreadable


def suffixes(file: Path) -> tuple[str, str]:
    """(format suffix, ".gz", ".zst" or ""); an unknown suffix counts as none, which is plain text."""
    packed = file.suffix.lower() if file.suffix.lower() in PACKED else ""
    suffix = (Path(file.stem) if packed else file).suffix.lower()
    return (suffix if suffix in KNOWN_SUFFIXES else ""), packed


def folder_files(folder: Path) -> list[Path]:
    """Files of known formats, at any depth, hidden ones left out."""
    return sorted(
        file
        for file in folder.rglob("*")
        if file.is_file()
        and suffixes(file)[0]
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
    )


def hash_file(sha: "hashlib._Hash", file: Path, name: str) -> None:
    """Add a file's name, size and bytes to a hash. Raises DataError for one that cannot be read."""
    if not is_utf8(str(file)):
        raise DataError(f"{str(file)!r}: the name is not UTF-8, in which settings are written; rename the file")
    try:
        sha.update(f"file:{name}:{file.stat().st_size}\n".encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                sha.update(block)
    except OSError as error:
        raise DataError(f"{file}: cannot be read: {error.strerror}") from error


def read_file(file: Path, column: str) -> Iterator[tuple[int, Row]]:
    """Yield (row number from 1, row): lines in JSONL, records elsewhere; plain text is one row under `column`.

    Raises DataError, with the place, for a file that is broken as a whole.
    """
    suffix, packed = suffixes(file)
    if file.suffix.lower() in WORKBOOKS:
        raise DataError(f"{file}: a spreadsheet's own file; save the sheet as CSV (UTF-8)")
    try:
        with _open(file, packed) as opened:
            is_utf16 = opened.peek(2).startswith(UTF16)
            stream = io.BytesIO(_as_utf8(file, opened.read())) if is_utf16 else opened
            if suffix == ".parquet":
                yield from _parquet_rows(file, stream)
            elif suffix == ".jsonl":
                yield from _json_lines(stream)
            elif suffix == ".json":
                yield from _json_rows(file, stream.read())
            elif suffix in (".csv", ".tsv"):
                yield from _table_rows(file, stream.read(), SEPARATORS if suffix == ".csv" else ("\t",))
            elif text := _decode(file, stream.read()):
                yield 1, {column: text}  # plain text is one document, and no prompt by accident
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file}: cannot be read: {error}") from error


def _open(file: Path, packed: str) -> io.BufferedReader:
    if packed == ".gz":
        return io.BufferedReader(gzip.open(file))
    if packed == ".zst":
        import pyarrow  # the standard library has no zstd before Python 3.14

        return io.BufferedReader(pyarrow.input_stream(str(file), compression="zstd"))
    return file.open("rb")


def _as_utf8(file: Path, content: bytes) -> bytes:
    try:
        return content.decode("utf-16").encode()
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: byte {error.start} is not UTF-16, as its first two are; save it as UTF-8") from error


def _decode(file: Path, content: bytes) -> str:
    if b"\0" in content:
        known = f"{', '.join(KNOWN_SUFFIXES)}, each also with {' or '.join(PACKED)}"
        raise DataError(f"{file}: it is not text (byte {content.index(0)} is zero); known are {known}")
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
        return as_row(DECODER.decode(content.removeprefix(BOM).decode("utf-8", "surrogatepass")))
    except RecursionError:
        return Unreadable("JSON nested too deeply")
    except json.JSONDecodeError as error:
        return Unreadable("broken JSON", json_detail(error))
    except UnicodeDecodeError as error:
        return Unreadable("not UTF-8", f", byte {error.start + 1} of the line")


def _whole_number(digits: str) -> float:
    """An int that a float can hold, else infinity: Python refuses to read thousands of digits."""
    return int(digits) if len(digits) < 300 else float(digits)


DECODER = json.JSONDecoder(parse_int=_whole_number)  # json.loads would make one anew for each row


def json_detail(error: json.JSONDecodeError) -> str:
    """Where and why a text is no JSON, as errors tell it."""
    return f", column {error.colno}: {error.msg.removesuffix(' at')}"


def as_row(value: Any) -> Row:
    """What may be a row: an object, a text, or a bare list of messages, which gets a column of that name."""
    if isinstance(value, (dict, str)):
        return value
    if isinstance(value, list) and value and all(isinstance(v, dict) and {"role", "from"} & v.keys() for v in value):
        return {"messages": value}
    return Unreadable(f"the row is {describe(value)}, not an object")


def _json_rows(file: Path, content: bytes) -> Iterator[tuple[int, Row]]:
    """A list of rows, one row over several lines, or one row per line under a .json name."""
    text = _decode(file, content)
    first = text.lstrip().partition("\n")[0].rstrip()
    if first.startswith("[") or first.endswith(("{", "[", ",", ":")):  # goes on in the next line
        value = _json_value(file, text)
        alone = not isinstance(value, list)
        rows: Iterator[tuple[int, Row]] = enumerate(map(as_row, [value] if alone else value), 1)
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
        raise DataError(f"{file} line {error.lineno}: broken JSON{json_detail(error)}") from error
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


def _table_rows(file: Path, content: bytes, separators: Sequence[str]) -> Iterator[tuple[int, Row]]:
    csv.field_size_limit(2**31 - 1)  # a document in a cell is longer than the default of 131,072
    lines = io.StringIO(_decode(file, content), newline="")
    separator = _separator(lines, separators)
    table = csv.reader(lines, delimiter=separator, strict=True)
    number = 0
    try:
        header = next(table, [])
        names = header[: max((place for place, name in enumerate(header, 1) if name.strip()), default=0)]
        if len(set(names)) < len(names):
            raise DataError(f"{file}: a column name occurs twice in the header: {', '.join(names)}")
        for number, cells in enumerate(filter(None, table), 1):  # a blank line is no record
            if len(cells) > 1 and not any(map(str.strip, cells)):
                continue  # what spreadsheets write for rows that were used once
            if len(cells) == len(header) and not any(map(str.strip, cells[len(names) :])):
                yield number, dict(zip(names, cells, strict=False))
            else:
                told = f", separated by {separator!r}" * (separator != separators[0])
                detail = f": {len(cells)} cells under {len(names)} column names{told} (ends on line {table.line_num})"
                yield number, Unreadable("wrong number of cells", detail)
    except csv.Error as error:
        raise DataError(f"{file} row {number + 1} (line {table.line_num}): broken table: {error}") from error


def _separator(lines: IO[str], separators: Sequence[str]) -> str:
    """The first one that parts the header into several columns; the first of all where there is one column."""
    for separator in separators:
        lines.seek(0)
        with suppress(csv.Error):  # quotes that another separator follows
            if len(next(csv.reader(lines, delimiter=separator, strict=True), [])) > 1:
                break
    else:
        separator = separators[0]
    lines.seek(0)
    return separator


def _parquet_rows(file: Path, stream: IO[bytes]) -> Iterator[tuple[int, Row]]:
    import pyarrow
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(stream).iter_batches()
        yield from enumerate((row for batch in batches for row in _batch_rows(batch)), 1)
    except pyarrow.ArrowException as error:
        raise DataError(f"{file}: not a readable Parquet file: {error}") from error


def _batch_rows(batch: Any) -> list[Row]:
    """The rows of an Arrow batch; where a text is no UTF-8, which Arrow does not check, its row alone is lost."""
    try:
        rows: list[Row] = batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [Unreadable("not UTF-8", f", byte {error.start + 1} of a text")]
        return [row for place in range(batch.num_rows) for row in _batch_rows(batch.slice(place, 1))]
    return rows


@contextmanager
def new_file(path: Path, force: bool = False) -> Iterator[IO[bytes]]:
    """A file to write into, which is at `path` once the block has ended, and nowhere if it raised.

    Raises SettingsError where it cannot be written, and where something is there already: a file is replaced if `force`
    is given.
    """
    if path.exists() and not (force and path.is_file()):
        raise SettingsError(f"{path}: already there; give another name" + (", or --force" if path.is_file() else ""))
    if not path.parent.is_dir():
        raise SettingsError(f"{path}: no folder {path.parent}; make it first")
    writing = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with writing.open("wb") as file:
            yield file
        os.replace(writing, path)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be written: {error.strerror or error}; name another place") from error
    finally:
        writing.unlink(missing_ok=True)


def describe(value: object) -> str:
    """What a value is, in words for people."""
    if value is None:
        return "missing"
    if isinstance(value, bool):
        return "true or false"
    names = {int: "a number", float: "a number", str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), f"a {type(value).__name__}")
