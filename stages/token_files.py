"""The ids of a text in two files, those to train on and those held out: written part by part, then joined.

The parts follow from the text alone, so the files are the same whoever wrote which part.
"""

import json
import os
import shutil
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf.data.documents import Documents, Found
from rlhf.data.tokens import encode_documents
from rlhf.stages.disk import file_digest, replace_text, sync, sync_path
from rlhf.stages.together import claimed

TRAIN_FILE, EVAL_FILE = "tokens.bin", "held_out.bin"
_PARTS = "parts"
_COUNTS = ("tokens", "held_out_tokens", "unknown", "held_out_unknown")


def has_tokens(folder: Path) -> bool:
    """Whether the folder holds all ids of a text."""
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        size = np.dtype(meta["dtype"]).itemsize
        return all(
            (folder / file).stat().st_size == size * sum(part[name] for part in meta["sources"])
            for file, name in ((TRAIN_FILE, "tokens"), (EVAL_FILE, "held_out_tokens"))
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_parts(
    folder: Path, documents: Documents, tokenizer: PreTrainedTokenizerBase, say: Callable[..., None]
) -> None:
    """Write the ids of the parts that are not there and that no other process writes."""
    (folder / _PARTS).mkdir(exist_ok=True)
    behind = 0
    for number, found in enumerate(documents.found):
        texts, at = documents.of(number), 0  # is begun to be read where the first part of it is ours
        for (start, end), part in zip(found.ranges, _parts(folder, number, found), strict=True):
            with claimed(part) as is_ours:
                if is_ours:
                    # To the end of the source: it may have become another one, or have two texts of each document.
                    is_last = end == found.documents
                    _write_part(part, islice(texts, start - at, None if is_last else end - at), tokenizer)
                    at = end
            say(f"tokenised {behind + end:,} document{'s' * (behind + end != 1)}", now_and_then=True)
        behind += found.documents


def _parts(folder: Path, number: int, found: Found) -> list[Path]:
    """Files that say of each part of a source that it is written, and how much it holds; its ids lie beside."""
    return [folder / _PARTS / f"{number:05}-{start:012}-{end:012}.json" for start, end in found.ranges]


def _write_part(part: Path, documents: Iterator[tuple[bool, str]], tokenizer: PreTrainedTokenizerBase) -> None:
    dtype = _dtype(tokenizer)
    unknown = tokenizer.unk_token_id if tokenizer.unk_token_id not in (None, tokenizer.eos_token_id) else -1
    counts = dict.fromkeys(_COUNTS, 0)
    waiting: deque[bool] = deque()  # on which side the texts are that the tokenizer has not given back yet

    def texts() -> Iterator[str]:
        for is_held_out, text in documents:
            waiting.append(is_held_out)
            yield text

    files = [part.with_suffix(suffix) for suffix in (".train", ".held_out")]
    with files[0].open("wb") as train_file, files[1].open("wb") as eval_file:
        for ids in encode_documents(tokenizer, texts()):
            is_held_out = waiting.popleft()
            (eval_file if is_held_out else train_file).write(np.asarray(ids, dtype).tobytes())
            side = "held_out_" if is_held_out else ""
            counts[f"{side}tokens"] += len(ids)
            counts[f"{side}unknown"] += ids.count(unknown)
    sync(files)
    replace_text(part, json.dumps(counts))


def join_parts(folder: Path, documents: Documents, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make one file of all parts, in the order of the text, and last meta.json with what is in it.

    One process at a time: what a killed one was writing is removed.
    """
    for left in folder.glob(".*.writing"):
        left.unlink()
    counts = [dict.fromkeys(_COUNTS, 0) for _ in documents.found]
    parts = [(number, part) for number, found in enumerate(documents.found) for part in _parts(folder, number, found)]
    for number, part in parts:
        for name, count in json.loads(part.read_text(encoding="utf-8")).items():
            counts[number][name] += count
    for name, suffix in ((TRAIN_FILE, ".train"), (EVAL_FILE, ".held_out")):
        writing = folder / f".{name}.writing"
        with writing.open("wb") as file:
            for _, part in parts:
                with part.with_suffix(suffix).open("rb") as ids:
                    shutil.copyfileobj(ids, file)
        sync_path(writing)
        os.replace(writing, folder / name)
    sources = [_described(part) | count for part, count in zip(documents.found, counts, strict=True)]
    meta = {"dtype": _dtype(tokenizer).name, "sources": sources}
    replace_text(folder / "meta.json", json.dumps(meta, ensure_ascii=False))
    shutil.rmtree(folder / _PARTS)


def num_ids(tokenizer: PreTrainedTokenizerBase) -> int:
    """One more than the highest id; some tokenizers leave ids out."""
    return max(tokenizer.get_vocab().values()) + 1


def _dtype(tokenizer: PreTrainedTokenizerBase) -> np.dtype[Any]:
    return np.dtype(np.uint16 if num_ids(tokenizer) <= 1 << 16 else np.uint32)


def _described(found: Found) -> dict[str, Any]:
    """What corpus.json says of a source."""
    files = [
        {"path": file, "sha256": file_digest(Path(file)), "documents": documents, "characters": characters}
        for file, (documents, characters) in found.files.items()
    ]
    return {
        "name": found.name,
        "path": found.path,
        "documents": found.documents,
        "characters": found.characters,
        "unusable_rows": found.unusable,
        "left_out": found.left_out,
        "files": files,
    }
