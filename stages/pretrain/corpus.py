"""From documents to blocks of tokens, which lie in files beside the stage's folder and are made once.

`tokens/text-KEY/` holds what a survey of the text found, and copies of what is streamed; `tokens/tokenizer-KEY/` a
tokenizer that was trained on the text; `tokens/KEY/` the ids: `tokens.bin` to train on, source after source,
`held_out.bin`, and `meta.json`. A key stands for the text, the tokenizer and all settings that decide the content.
Each folder is filled by all processes that see it (`together`), in parts that outlive a kill. They are read through a
file's map: no process has more of a corpus in memory than what it is at.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig, PreTrainedTokenizerBase

from rlhf.data.collate import Blocks
from rlhf.data.documents import SURVEY, Documents, summary
from rlhf.data.errors import RefusedError
from rlhf.data.mixture import Mixture
from rlhf.data.sources import TextSource, digest
from rlhf.data.streams import copied, copy_share, shares
from rlhf.data.tokens import encode_documents
from rlhf.stages.artifact import Artifact
from rlhf.stages.checkpoints import saying_what_cannot_be_written
from rlhf.stages.disk import replace_text, swap_folder
from rlhf.stages.models import check_positions, load_tokenizer, num_positions, why_not_loaded
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.pretrain.ids import EVAL_FILE, TRAIN_FILE, has_tokens, join_parts, write_parts
from rlhf.stages.pretrain.together import claimed, fill
from rlhf.stages.pretrain.tokenizer import existing_tokenizer, is_trained_here, train_tokenizer
from rlhf.stages.runtime import Runtime

_LAYOUT = 1
"""Counted up when the same text, tokenizer and settings would give other files than before."""


@dataclass(frozen=True)
class Corpus:
    """What the stage trains on."""

    tokenizer: PreTrainedTokenizerBase
    rows: Blocks | Mixture
    eval_rows: Blocks
    block_size: int


def prepare(run: Runtime[PretrainSettings]) -> Corpus:
    """Tokenizer and blocks, from the cache or made by all processes; says what was left out, writes corpus.json.

    Raises RefusedError for a text that cannot be trained on.
    """
    settings = run.settings
    length = block_size(settings)
    documents = Documents(settings, settings.stage)
    cache = run.folder.absolute().parent / "tokens"
    text_key = _text_key(settings, run.identity.data, documents)
    text = cache / f"text-{_short_hash([_LAYOUT, text_key])}"
    with saying_what_cannot_be_written(run.folder, cache.name):
        if is_trained_here(settings):
            kind = [settings.tokenizer, settings.vocab_size, settings.special_tokens, settings.context_length]
            trained = cache / f"tokenizer-{_short_hash([_LAYOUT, text_key, kind])}"
            if not _has_tokenizer(trained):
                run.say("making a tokenizer from the text")
                survey(text, documents)
                fill(trained, _has_tokenizer, lambda folder: _make_tokenizer(folder, documents, settings))
            tokenizer = load_tokenizer(str(trained))
        else:
            tokenizer = existing_tokenizer(settings)
        folder = _tokens(cache, text_key, tokenizer)
        if not has_tokens(folder):
            survey(text, documents)
            fill(
                folder,
                has_tokens,
                lambda folder: join_parts(folder, documents, tokenizer),
                lambda folder: write_parts(folder, documents, tokenizer, run.say),
            )
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    _tell(run, meta)
    run.on_main(lambda: _write_record(run.folder, meta, documents))
    return Corpus(tokenizer, *_rows(folder, meta, documents, length, settings.stage), length)


def held_out_blocks(
    folder: Path, settings: PretrainSettings, tokenizer: PreTrainedTokenizerBase, make: bool
) -> Blocks | None:
    """What a finished stage was evaluated on, from the cache that it was trained from.

    Where that is gone the text is read again, if it is to be made, else there is None.
    """
    documents, length = Documents(settings, settings.stage), block_size(settings)
    text_key = _text_key(settings, Artifact(folder).manifest["data"], documents)
    cached = _tokens(folder.absolute().parent / "tokens", text_key, tokenizer)
    if has_tokens(cached):
        meta = json.loads((cached / "meta.json").read_text(encoding="utf-8"))
        ids: np.ndarray = np.memmap(cached / EVAL_FILE, meta["dtype"], "r")
    elif make:
        texts = (text for _, is_held_out, text in documents if is_held_out)
        ids = np.fromiter(chain.from_iterable(encode_documents(tokenizer, texts)), dtype=np.int64)
    else:
        return None
    return _held_out_rows(ids, length, settings.stage)


def block_size(settings: PretrainSettings) -> int:
    """Tokens that the model sees of a row; refuses more than a model that is trained further has positions for."""
    if settings.model is None:
        return settings.block_size or settings.context_length
    try:
        config = AutoConfig.from_pretrained(settings.model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise RefusedError(
            f"no causal language model in '{settings.model}': {why_not_loaded(settings.model, error)}"
        ) from error
    if settings.block_size is None:
        return min(settings.context_length, num_positions(config))
    check_positions("pretrain.block_size", settings.block_size, config)
    return settings.block_size


def survey(folder: Path, documents: Documents) -> None:
    """Let documents know what there is; streams among them are first copied into `folder`, in which it is kept."""
    if documents.found:
        return
    sources = documents.sources | documents.eval_sources
    streams = {name: source for name, source in sources.items() if source.streaming}
    documents.copies = {name: copied(source, folder / name) for name, source in streams.items()}

    def copy(folder: Path) -> None:
        for name, source in streams.items():
            (folder / name).mkdir(exist_ok=True)
            for number, file in enumerate(shares(source, folder / name)):
                with claimed(file) as is_ours:
                    if is_ours:
                        copy_share(source, number, file)

    def read(folder: Path) -> None:
        documents.survey()
        documents.save(folder)

    fill(folder, lambda folder: (folder / SURVEY).is_file(), read, copy)
    documents.load(folder)


def _make_tokenizer(folder: Path, documents: Documents, settings: PretrainSettings) -> None:
    tokenizer = train_tokenizer(documents.training(), settings)
    writing = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    tokenizer.save_pretrained(writing)
    swap_folder(writing, folder)


def _text_key(settings: PretrainSettings, digests_of: Mapping[str, str], documents: Documents) -> list[Any]:
    """What decides which documents there are; weights do not, since they only say how often each is seen."""
    digests = [
        [name, source.path, _digest(digests_of[name], source)]
        for name, source in (documents.sources | documents.eval_sources).items()
    ]
    rules = [settings.eval_share, settings.deduplicate, settings.min_document_length, settings.max_document_length]
    return [*digests, *rules]


def _digest(known: str, source: TextSource) -> str:
    """Digest of a source as if it had no weight; `known` is that of the source as it is."""
    return known if source.weight is None else digest(source.model_copy(update={"weight": None}))


def _short_hash(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _tokens(cache: Path, text_key: list[Any], tokenizer: PreTrainedTokenizerBase) -> Path:
    """Where the ids of a text lie."""
    writes = [tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id]
    return cache / _short_hash([_LAYOUT, text_key, writes])


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file()


def _rows(
    folder: Path, meta: dict[str, Any], documents: Documents, length: int, stage: str
) -> tuple[Blocks | Mixture, Blocks]:
    """Blocks to train on, and those held out; a small held-out text makes one block of its own length."""
    tokens = np.memmap(folder / TRAIN_FILE, meta["dtype"], "r")
    held_out = np.memmap(folder / EVAL_FILE, meta["dtype"], "r")
    eval_rows = _held_out_rows(held_out, length, stage)
    weights = [source.weight for source in documents.sources.values() if source.weight is not None]
    if not weights:
        return Blocks(tokens, length, f"{stage}.data"), eval_rows
    ends = np.cumsum([part["tokens"] for part in meta["sources"]])
    parts = zip(documents.sources, np.split(tokens, ends), strict=False)  # the last ones are of eval_data, and empty
    return Mixture([Blocks(part, length, f"{stage}.{name}") for name, part in parts], weights), eval_rows


def _held_out_rows(ids: np.ndarray, length: int, stage: str) -> Blocks:
    return Blocks(ids, max(min(length, len(ids) - 1), 1), f"{stage}.eval_data")


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
