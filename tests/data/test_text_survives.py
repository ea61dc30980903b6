"""Whatever people write reaches the tokens as it was written, from every kind of file."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.data.rows import load, read_demonstrations, read_text
from rlhf.data.sources import Source
from rlhf.data.tokens import encode_documents, encode_example, encode_prompt

STRANGE = {
    "line and paragraph separators": "a\u2028b\u2029c\x85d",
    "marks of direction": "\u200fשלום\u200e (\u202eabc\u202c)",
    "byte order mark inside": "a\ufeffb",
    "joined emoji": "👩‍👩‍👧 e\u0301",
    "carriage returns": "a\rb",
    "tabs, quotes, commas": "a\t\"b\", 'c'\\n",
    "control characters": "a\x07b\x1bc\x7f",
    "spelt control tokens": "<|endoftext|>a<s>b<|user|>c<|assistant|>",
    "whitespace around": " \n a \u00a0",
}
NUL = "a\0b"


def write(folder: Path, suffix: str, row: dict[str, str]) -> Source:
    """One row in a file of this kind, as common writers leave it."""
    file = folder / f"rows{suffix}"
    if suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), file)
    elif suffix in (".csv", ".tsv"):
        delimiter = "\t" if suffix == ".tsv" else ","
        with file.open("w", encoding="utf-8-sig", newline="") as stream:
            writer = csv.writer(stream, delimiter=delimiter, quoting=csv.QUOTE_ALL)
            writer.writerows([row.keys(), row.values()])
    else:
        text = json.dumps([row] if suffix == ".json" else row, ensure_ascii=False)
        file.write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\r\n")
    return Source(path=str(file))


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".parquet"])
@pytest.mark.parametrize("text", STRANGE.values(), ids=STRANGE)
def test_text_survives(tmp_path: Path, tokenizer: Any, suffix: str, text: str) -> None:
    [row] = read_demonstrations(write(tmp_path, suffix, {"prompt": text, "response": text})).rows
    assert (row.prompt, row.response) == ([{"role": "user", "content": text}], text)
    assert read_text(write(tmp_path, suffix, {"text": text})).rows == [text]
    example = encode_example(tokenizer, row.prompt, row.response, 1000)
    assert example is not None
    assert tokenizer.decode(example.input_ids[example.prompt_length :]) == text + "<|endoftext|>"
    assert tokenizer.decode(encode_prompt(tokenizer, row.prompt)) == f"<s><|user|>{text}<|assistant|>"


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
def test_a_nul_survives_where_a_file_can_hold_it(tmp_path: Path, tokenizer: Any, suffix: str) -> None:
    [text] = read_text(write(tmp_path, suffix, {"text": NUL})).rows
    assert text == NUL
    assert tokenizer.decode(*encode_documents(tokenizer, [text])) == NUL + "<|endoftext|>"


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_tokens_that_rows_spell_out_end_nothing(tmp_path: Path, tokenizer: Any, suffix: str) -> None:
    spelt = "<|endoftext|>x<s>"
    [row] = read_demonstrations(write(tmp_path, suffix, {"prompt": spelt, "response": spelt})).rows
    special = {tokenizer.eos_token_id, tokenizer.bos_token_id}
    example = encode_example(tokenizer, row.prompt, row.response, 1000)
    assert example is not None
    assert [id for id in example.input_ids if id in special] == [tokenizer.bos_token_id, tokenizer.eos_token_id]
    assert next(encode_documents(tokenizer, [spelt])).count(tokenizer.eos_token_id) == 1


def test_line_breaks_of_a_table_are_line_feeds(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfprompt,response\r\n"a\r\nb","c\r\n"\r\n')
    [row] = read_demonstrations(Source(path=str(tmp_path / "a.csv"))).rows
    assert (row.prompt[0]["content"], row.response) == ("a\nb", "c\n")


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
@pytest.mark.parametrize("half", ['"\\ud83d"', '"\\udc4b\\ud83d"'])
def test_half_a_character_is_refused_with_its_row(tmp_path: Path, name: str, half: str) -> None:
    good, bad = '{"prompt": "p", "response": "\\ud83d\\udc4b"}', f'{{"prompt": "p", "response": {half}}}'
    (tmp_path / name).write_text(f"{good}\n{bad}\n" if name == "a.jsonl" else f"[{good},\n{bad}]")
    loaded = load(Source(path=str(tmp_path / name)), "demonstrations")
    assert [row.response for row in loaded.rows] == ["👋"]
    assert {why: drop.rows for why, drop in loaded.report.dropped.items()} == {
        "response holds half a character (a lone surrogate)": [2]
    }


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b'{"prompt": "p", "response": "r"}\n{"prompt": "p", "resp', "broken JSON"),
        ("a.jsonl", b'{"prompt": "p", "response": "r"}\n{"prompt": "p", "response": "caf\xc3', "not UTF-8"),
        ("a.csv", b"prompt,response\np,r\np", "wrong number of cells"),
    ],
)
def test_a_last_line_half_written_is_counted_with_its_row(
    tmp_path: Path, name: str, content: bytes, reason: str
) -> None:
    (tmp_path / name).write_bytes(content)
    loaded = load(Source(path=str(tmp_path / name)), "demonstrations")
    assert loaded.report.kept == 1
    assert {why: drop.rows for why, drop in loaded.report.dropped.items()} == {reason: [2]}
