"""From documents to blocks of tokens, which lie in files beside the stage's folder and are made once.

`tokens/tokenizer-KEY/` holds a tokenizer that was trained on the text, `tokens/KEY/` the ids: `tokens.bin` to train
on, source after source, `held_out.bin`, and `meta.json`. A key stands for the text, the tokenizer and all settings
that decide the content; a folder is written beside its place and swapped in, so that a kill leaves none or a whole one.
"""

import hashlib
import json
import os
import shutil
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from transformers import AutoConfig, PreTrainedTokenizerBase

from rlhf.data.collate import Blocks
from rlhf.data.documents import Documents, Found, summary
from rlhf.data.errors import RefusedError, SettingsError
from rlhf.data.mixture import Mixture
from rlhf.data.sources import TextSource, digest
from rlhf.data.tokens import encode_documents
from rlhf.stages.checkpoints import saying_what_cannot_be_written
from rlhf.stages.disk import file_digest, replace_text
from rlhf.stages.models import load_tokenizer, why_not_loaded
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.pretrain.tokenizer import existing_tokenizer, is_trained_here, num_ids, train_tokenizer
from rlhf.stages.runtime import Runtime

_LAYOUT = 1
"""Counted up when the same text, tokenizer and settings would give other files than before."""
TRAIN_FILE, EVAL_FILE = "tokens.bin", "held_out.bin"


@dataclass(frozen=True)
class Corpus:
    """What the stage trains on."""

    tokenizer: PreTrainedTokenizerBase
    rows: Blocks | Mixture
    eval_rows: Blocks
    block_size: int


def prepare(run: Runtime[PretrainSettings]) -> Corpus:
    """Tokenizer and blocks, from the cache or made by the main process; says what was left out, writes corpus.json.

    Raises RefusedError for a text that cannot be trained on.
    """
    settings = run.settings
    length = block_size(settings)
    documents = Documents(settings, settings.stage)
    cache = run.folder.absolute().parent / "tokens"
    text_key = _text_key(run, documents)
    if is_trained_here(settings):
        kind = [settings.tokenizer, settings.vocab_size, settings.special_tokens, settings.context_length]
        trained = cache / f"tokenizer-{_short_hash([_LAYOUT, text_key, kind])}"

        def train(folder: Path) -> None:
            run.say("making a tokenizer from the text")
            train_tokenizer(documents.training(), settings).save_pretrained(folder)

        _make_once(run, trained, _has_tokenizer, train)
        tokenizer = load_tokenizer(str(trained))
    else:
        tokenizer = existing_tokenizer(settings)
    writes = [tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id]
    folder = cache / _short_hash([_LAYOUT, text_key, writes])
    _make_once(run, folder, _has_tokens, lambda path: write_tokens(path, documents, tokenizer, run.say))
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    _tell(run, meta)
    run.on_main(lambda: _write_record(run.folder, meta, documents))
    return Corpus(tokenizer, *_rows(folder, meta, documents, length, settings.stage), length)


def block_size(settings: PretrainSettings) -> int:
    """Tokens that the model sees of a row; refuses more than a model that is trained further has positions for."""
    if settings.model is None:
        return settings.block_size or settings.context_length
    try:
        config = AutoConfig.from_pretrained(settings.model, trust_remote_code=False).get_text_config()
    except (OSError, ValueError) as error:
        raise RefusedError(
            f"no causal language model in '{settings.model}': {why_not_loaded(settings.model, error)}"
        ) from error
    positions = getattr(config, "max_position_embeddings", None) or sys.maxsize
    if settings.block_size and settings.block_size > positions:
        raise SettingsError(
            f"pretrain.block_size is {settings.block_size}, but the model has {positions} positions; lower it"
        )
    return settings.block_size or min(settings.context_length, positions)


def write_tokens(
    folder: Path, documents: Documents, tokenizer: PreTrainedTokenizerBase, say: Callable[..., None]
) -> None:
    """Write the ids of all documents into `folder`, and last meta.json with what they are."""
    found = documents.survey()
    dtype = np.dtype(np.uint16 if num_ids(tokenizer) <= 1 << 16 else np.uint32)
    unknown = tokenizer.unk_token_id if tokenizer.unk_token_id not in (None, tokenizer.eos_token_id) else -1
    counts = [{"tokens": 0, "held_out_tokens": 0, "unknown": 0, "held_out_unknown": 0} for _ in found]
    waiting: deque[tuple[int, bool]] = deque()  # whose the texts are that the tokenizer has not given back yet

    def texts() -> Iterator[str]:
        for number, is_held_out, text in documents:
            waiting.append((number, is_held_out))
            yield text

    with (folder / TRAIN_FILE).open("wb") as train_file, (folder / EVAL_FILE).open("wb") as eval_file:
        for done, ids in enumerate(encode_documents(tokenizer, texts()), start=1):
            number, is_held_out = waiting.popleft()
            (eval_file if is_held_out else train_file).write(np.asarray(ids, dtype).tobytes())
            side = "held_out_" if is_held_out else ""
            counts[number][f"{side}tokens"] += len(ids)
            counts[number][f"{side}unknown"] += ids.count(unknown)
            if done % 1000 == 0:
                say(f"tokenised {done:,} documents", now_and_then=True)
    parts = [_described(part) | count for part, count in zip(found, counts, strict=True)]
    replace_text(folder / "meta.json", json.dumps({"dtype": dtype.name, "sources": parts}, ensure_ascii=False))


def _described(found: Found) -> dict[str, Any]:
    """What corpus.json says of a source."""
    files = []
    for file in found.report.files:
        documents, characters = found.files.get(file, [0, 0])
        counts = {"documents": documents, "characters": characters}
        files.append({"path": str(file), "sha256": file_digest(file), **counts})
    return {
        "name": found.name,
        "path": found.path,
        "documents": found.documents,
        "characters": found.characters,
        "unusable_rows": {reason: drop.count for reason, drop in found.report.dropped.items()},
        "left_out": found.left_out,
        "files": files,
    }


def _text_key(run: Runtime[PretrainSettings], documents: Documents) -> list[Any]:
    """What decides which documents there are; weights do not, since they only say how often each is seen."""
    settings = run.settings
    digests = [
        [name, source.path, _digest(run.identity.data[name], source)]
        for name, source in (documents.sources | documents.eval_sources).items()
    ]
    rules = [settings.eval_share, settings.deduplicate, settings.min_document_length, settings.max_document_length]
    return [*digests, *rules]


def _digest(known: str, source: TextSource) -> str:
    """Digest of a source as if it had no weight; `known` is that of the source as it is."""
    return known if source.weight is None else digest(source.model_copy(update={"weight": None}))


def _short_hash(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _make_once(
    run: Runtime[PretrainSettings], folder: Path, is_whole: Callable[[Path], bool], make: Callable[[Path], None]
) -> None:
    """Let `make` fill a folder beside this one and swap it in, unless the folder is there and whole.

    All processes come here. One makes it; the others, and stages that were started by hand at the same time, wait for
    the lock, which they do as long as it takes. On machines that share no folder, each makes its own.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(f".{folder.name}.lock"))  # its own: the main process is soon at the next folder
    with ExitStack() as first:
        if run.is_main:  # it has the lock before the others, and says how far it is
            first.enter_context(lock)
        run.wait_for_all()
        with lock, saying_what_cannot_be_written(run.folder, folder.name):
            if is_whole(folder):
                return
            writing = folder.with_name(f".{folder.name}.writing")
            shutil.rmtree(writing, ignore_errors=True)
            writing.mkdir()
            make(writing)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(writing, folder)


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file()


def _has_tokens(folder: Path) -> bool:
    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        size = np.dtype(meta["dtype"]).itemsize
        return all(
            (folder / file).stat().st_size == size * sum(part[name] for part in meta["sources"])
            for file, name in ((TRAIN_FILE, "tokens"), (EVAL_FILE, "held_out_tokens"))
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _rows(
    folder: Path, meta: dict[str, Any], documents: Documents, length: int, stage: str
) -> tuple[Blocks | Mixture, Blocks]:
    """Blocks to train on, and those held out; a small held-out text makes one block of its own length."""
    tokens = np.memmap(folder / TRAIN_FILE, meta["dtype"], "r")
    held_out = np.memmap(folder / EVAL_FILE, meta["dtype"], "r")
    eval_rows = Blocks(held_out, max(min(length, len(held_out) - 1), 1), f"{stage}.eval_data")
    weights = [source.weight for source in documents.sources.values() if source.weight is not None]
    if not weights:
        return Blocks(tokens, length, f"{stage}.data"), eval_rows
    ends = np.cumsum([part["tokens"] for part in meta["sources"]])
    parts = zip(documents.sources, np.split(tokens, ends), strict=False)  # the last ones are of eval_data, and empty
    return Mixture([Blocks(part, length, f"{stage}.{name}") for name, part in parts], weights), eval_rows


def _tell(run: Runtime[PretrainSettings], meta: dict[str, Any]) -> None:
    """Say what was left out and what the tokenizer cannot write; the same whether the cache was used or made."""
    for part in meta["sources"]:
        name = f"{run.settings.stage}.{part['name']}"
        if part["left_out"]:
            run.say(f"{name}: {summary(part['documents'], part['left_out'])}")
        for side, words in (("", "training"), ("held_out_", "held-out")):
            if unknown := part[f"{side}unknown"]:
                run.say(f"{name}: {unknown:,} of {part[f'{side}tokens']:,} {words} tokens are unknown to the tokenizer")


def _write_record(folder: Path, meta: dict[str, Any], documents: Documents) -> None:
    """corpus.json: which files were read, in their order, and what became of their documents."""
    found = documents.sources | documents.eval_sources
    parts = [part | {"weight": found[part["name"]].weight} for part in meta["sources"]]
    replace_text(folder / "corpus.json", json.dumps({"sources": parts}, indent=1, ensure_ascii=False))
