"""Data files that are wrong in every way a seeded fuzzer thinks of: as rows, as text, as bytes."""

import copy
import csv
import gzip
import io
import json
import random
from collections.abc import Iterator
from typing import Any

from fuzzing import ODDITIES, Case

from rlhf.recipes import demo_world

KINDS = ("text", "demonstrations", "preferences", "prompts")
CELLS: tuple[Any, ...] = (
    None, True, "", " ", "\n", 0, -1, 1.5, 10**400, 1e308, float("nan"), float("inf"), [], {}, [None], [[]], [1, "a"],
    {"a": 1}, {"content": 1, "role": "user"}, [{"role": "user", "content": "x"}],
    [{"role": "assistant", "content": "y"}], [{"role": 1, "content": None}], [{"from": "human", "value": 3}], [{}],
    "\0", "\x1b[31m", "\ud800", "\udfff\ud800", "\ufeff", "\u2028", "é" * 3, "\U0001f40d", "a" * 200_000,
    "<|endoftext|>", "{{ x }}", "${seed}", "Human: a\n\nAssistant: b", "\n\nHuman: a\n\nAssistant: ", ["a", "b"],
    [1, 2], [1, 1], [2, 1, 3], ["1", "2"], [float("nan"), 1], 2**70, "1", "true",
)  # fmt: skip
COLUMNS = (
    "prompt", "response", "responses", "chosen", "rejected", "ranks", "text", "messages", "completion", "completions",
    "label", "score", "question", "answer", "conversations", "instruction", "output", "system", "tools", "images",
    "strengths", "", " ", "PROMPT", "prompt ", "\ufeffprompt", "id", "source", "rank",
)  # fmt: skip
WHOLE: tuple[bytes, ...] = (
    b"", b"\n", b"\n\n\n", b" ", b"\xef\xbb\xbf", b"\xff\xfe", b"\0\0\0", b"null", b"[]", b"{}", b"[[]]", b"[{}]",
    b"1", b'"x"', b"{", b"[", b'{"text": ', b"[" * 100_000, b'{"a":' * 100_000, b'{"text": "' + b"1" * 10_000,
    b"NaN\nInfinity\n-Infinity\n", b'{"text": ' + b"9" * 10_000 + b"}\n", b'{"text": "a", "text": "b"}\n',
    b"a,b\n1\n", b"a,a\n1,2\n", b'"a\n', b"prompt;response\n1;2\n", b"prompt,response\n\"a\"b,c\n",
    b"text\n" + b"x" * 300_000 + b"\n", b"\r", b"\r\n\r\n", b"PAR1", b"PAR1" * 10, b"\x1f\x8b",
    b"\x1f\x8b\x08\0\0\0\0\0", b"\x28\xb5\x2f\xfd", b"PK\x03\x04", b"\x80\x04\x95", b'{"data": [{"text": "a"}]}',
    b'{"train": [{"prompt": "a", "response": "b"}], "test": []}', b"#!/bin/sh\ntouch hacked\n", b"<html></html>",
)  # fmt: skip
SUFFIXES = (
    ".jsonl", ".jsonl", ".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt", ".jsonl.gz", ".csv.gz", ".parquet.gz",
    ".jsonl.zst", ".md", ".JSONL",
)  # fmt: skip


def rows_of(kind: str) -> list[dict[str, Any]]:
    """Six good rows."""
    if kind == "text":
        return [{"text": text} for text in demo_world.documents(num=6)]
    if kind == "demonstrations":
        return [dict(row) for row in demo_world.demonstrations(num=6)]
    if kind == "preferences":
        ranked = list(demo_world.rankings(num=3, answers=3))
        return ranked + [{"prompt": f"p{n}", "chosen": "good", "rejected": "bad"} for n in range(3)]
    return [{"prompt": f"Write about a fox and a kite {n}."} for n in range(6)]


def data_files(seed: int, number: int, run_share: float = 0.0) -> Iterator[Case]:
    """Mutated files for `rlhf data check`; a share takes its place in the recipe, for what `rlhf run` reads first."""
    rng = random.Random(f"data {seed}")
    sections = {"text": "pretrain", "demonstrations": "sft", "preferences": "reward", "prompts": "ppo"}
    for _ in range(number):
        kind, suffix = rng.choice(KINDS), rng.choice(SUFFIXES)
        rows: list[Any] = rows_of(kind)
        told = []
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            told.append(_change_rows(rng, rows))
        content = packed(rows, suffix)
        if content is None:  # what this format cannot hold
            suffix = ".jsonl"
            content = packed(rows, suffix)
            assert content is not None
        for _ in range(rng.choice((0, 1, 1, 2))):
            what, content = _change_bytes(rng, content)
            told.append(what)
        if rng.random() < 0.04:
            content = rng.choice(sorted(ODDITIES))
            told = [content.decode()]
        name = f"rows{suffix}"
        words = ["data", "check", name, "--as", kind]
        if rng.random() < run_share:
            section = sections[kind]
            words = ["run", "good.yaml", f"{section}.data={name}", f"{section}.max_dropped=0.9", "--run-dir", "run"]
        elif rng.random() < 0.2:
            words += rng.choice(
                (["--json"], ["--map", "prompt=question"], ["--format", "alpaca"], ["--map", "text=output"])
            )
        yield Case(f"{kind}, " + ", ".join(told), name, content, words)


def packed(rows: list[Any], suffix: str) -> bytes | None:
    """Rows in the format of a suffix; None where it cannot hold them."""
    if suffix.endswith(".gz"):
        inner = packed(rows, suffix.removesuffix(".gz"))
        return inner and gzip.compress(inner, mtime=0)
    if suffix.endswith(".zst"):
        import pyarrow

        inner = packed(rows, suffix.removesuffix(".zst"))
        return inner and pyarrow.compress(inner, codec="zstd", asbytes=True)
    if suffix in (".csv", ".tsv"):
        return _table(rows, "," if suffix == ".csv" else "\t")
    if suffix == ".parquet":
        return _parquet(rows)
    if suffix in (".txt", ".md"):
        return "\n".join(map(str, rows)).encode("utf-8", "surrogatepass")
    if suffix == ".json":
        return json.dumps(rows, ensure_ascii=False).encode("utf-8", "surrogatepass")
    return "".join(json.dumps(row, ensure_ascii=len(rows) % 2 == 0) + "\n" for row in rows).encode(
        "utf-8", "surrogatepass"
    )


def _table(rows: list[Any], delimiter: str) -> bytes | None:
    if not all(isinstance(row, dict) for row in rows):
        return None
    columns = list(dict.fromkeys(str(column) for row in rows for column in row))
    text = io.StringIO(newline="")
    table = csv.writer(text, delimiter=delimiter)
    try:
        table.writerow(columns)
        table.writerows([[row.get(column) for column in columns] for row in rows])
    except (csv.Error, ValueError):
        return None
    return text.getvalue().encode("utf-8", "surrogatepass")


def _parquet(rows: list[Any]) -> bytes | None:
    import pyarrow
    import pyarrow.parquet

    out = io.BytesIO()
    try:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), out)
    except Exception:  # Arrow raises a dozen kinds for rows that are no table
        return None
    return out.getvalue()


def _change_rows(rng: random.Random, rows: list[Any]) -> str:
    if not rows:
        rows.append({})
    place = rng.randrange(len(rows))
    what = rng.choice(("cell", "cell", "cell", "drop", "rename", "add", "row", "twice", "gone", "deep", "column"))
    row = rows[place]
    if what == "row" or not isinstance(row, dict) or not row:
        rows[place] = rng.choice((None, [], {}, 1, "text", [1], True, [{"role": "user", "content": "x"}], {"": ""}))
        return f"row {place + 1} is {rows[place]!r}"
    key = rng.choice(list(row))
    if what == "cell":
        row[key] = copy.deepcopy(rng.choice(CELLS))
        return f"{key} of row {place + 1} is {str(row[key])[:40]!r}"
    if what == "drop":
        del row[key]
    elif what == "rename":
        row[rng.choice(COLUMNS)] = row.pop(key)
    elif what == "add":
        row[rng.choice(COLUMNS)] = copy.deepcopy(rng.choice(CELLS))
    elif what == "twice":
        rows.insert(place, copy.deepcopy(row))
    elif what == "gone":
        del rows[place]
    elif what == "column":
        value = rng.choice(CELLS)
        for other in rows:
            if isinstance(other, dict):
                other[key] = copy.deepcopy(value)
    else:
        for _ in range(rng.choice((1, 5, 60))):
            row[key] = rng.choice(([row[key]], {"a": row[key]}))
    return f"{what} {key} of row {place + 1}"


def _change_bytes(rng: random.Random, content: bytes) -> tuple[str, bytes]:
    place = rng.randrange(len(content) + 1)
    what = rng.choice(("cut", "insert", "flip", "line", "encoding", "whole", "twice"))
    if what == "cut":
        return f"cut at byte {place}", content[:place]
    if what == "insert":
        junk = rng.choice((
            b"\0", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xef\xbb\xbf", b",", b'"', b"\n", b"\r", b"\t", b"}", b"{",
            b"[", b"\\", b"\\u", b"\\ud800", b"\x1b", b"'", rng.randbytes(20),
        ))  # fmt: skip
        return f"{junk!r} at byte {place}", content[:place] + junk + content[place:]
    if what == "flip" and content:
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 20))):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        return "bytes flipped", bytes(changed)
    if what == "line":
        lines = content.split(b"\n")
        number = rng.randrange(len(lines))
        lines[number] = rng.choice((b"", b"{}", b"junk", b"null", lines[number][: len(lines[number]) // 2], b"[1]"))
        return f"line {number + 1} is {lines[number][:20]!r}", b"\n".join(lines)
    if what == "encoding":
        how = rng.choice(("utf-16", "utf-32", "latin-1", "utf-7", "crlf"))
        if how == "crlf":
            return how, content.replace(b"\n", b"\r\n")
        return how, content.decode("utf-8", "replace").encode(how, "replace")
    if what == "whole":
        made = rng.choice((*WHOLE, rng.randbytes(500)))
        return f"{made[:20]!r} alone", made
    return "twice over", content + content
