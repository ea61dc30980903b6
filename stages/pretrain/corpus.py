"""From documents to blocks of tokens: what of a run's token cache (`stages/token_cache.py`) is pretrain's alone.

`tokens/tokenizer-KEY/` holds a tokenizer that was trained on the text.
"""

import json
import shutil
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from transformers import AutoConfig, PreTrainedTokenizerBase

from rlhf.data.collate import Blocks
from rlhf.data.documents import Documents
from rlhf.data.errors import RefusedError
from rlhf.data.mixture import Mixture
from rlhf.data.tokens import encode_documents
from rlhf.stages.artifact import Artifact
from rlhf.stages.checkpoints import saying_what_cannot_be_written
from rlhf.stages.disk import replace_text, swap_folder
from rlhf.stages.models import load_tokenizer, why_not_loaded
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.pretrain.tokenizer import existing_tokenizer, is_trained_here, train_tokenizer
from rlhf.stages.runtime import Runtime
from rlhf.stages.text_limits import check_positions, num_positions
from rlhf.stages.together import fill
from rlhf.stages.token_cache import TokenCache, Tokens, tell


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
    cache = TokenCache(run.folder, documents, run.identity.data)
    with saying_what_cannot_be_written(run.folder, cache.root.name):
        if is_trained_here(settings):
            kind = [settings.tokenizer, settings.vocab_size, settings.special_tokens, settings.context_length]
            trained = cache.folder(kind, kind="tokenizer-")
            if not _has_tokenizer(trained):
                run.say("making a tokenizer from the text")
                cache.survey(run.say)
                fill(
                    trained,
                    f"a tokenizer from {documents.where}",
                    run.say,
                    _has_tokenizer,
                    lambda folder: _make_tokenizer(folder, documents, settings),
                )
            tokenizer = load_tokenizer(str(trained))
        else:
            tokenizer = existing_tokenizer(settings)
        tokens = cache.make(tokenizer, run.say)
    tell(run.say, settings.stage, tokens.sources)
    run.on_main(lambda: _write_record(run.folder, tokens, documents))
    return Corpus(tokenizer, *_rows(tokens, documents, length, settings.stage), length)


def held_out_blocks(
    folder: Path, settings: PretrainSettings, tokenizer: PreTrainedTokenizerBase, make: bool
) -> Blocks | None:
    """What a finished stage was evaluated on, from the cache that it was trained from.

    Where that is gone the text is read again, if it is to be made, else there is None.
    """
    documents, length = Documents(settings, settings.stage), block_size(settings)
    found = TokenCache(folder, documents, Artifact(folder).manifest["data"]).find(tokenizer)
    if found is not None:
        ids = found.held_out
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


def _make_tokenizer(folder: Path, documents: Documents, settings: PretrainSettings) -> None:
    tokenizer = train_tokenizer(documents.training(), settings)
    writing = folder.with_name(f".{folder.name}.writing")
    shutil.rmtree(writing, ignore_errors=True)
    tokenizer.save_pretrained(writing)
    swap_folder(writing, folder)


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file()


def _rows(tokens: Tokens, documents: Documents, length: int, stage: str) -> tuple[Blocks | Mixture, Blocks]:
    """Blocks to train on, and those held out; a small held-out text makes one block of its own length."""
    eval_rows = _held_out_rows(tokens.held_out, length, stage)
    weights = [source.weight for source in documents.sources.values() if source.weight is not None]
    if not weights:
        return Blocks(tokens.train, length, f"{stage}.data"), eval_rows
    ends = np.cumsum([part["tokens"] for part in tokens.sources])
    # The last parts are of eval_data, and empty.
    parts = zip(documents.sources, np.split(tokens.train, ends), strict=False)
    return Mixture([Blocks(part, length, f"{stage}.{name}") for name, part in parts], weights), eval_rows


def _held_out_rows(ids: np.ndarray, length: int, stage: str) -> Blocks:
    return Blocks(ids, max(min(length, len(ids) - 1), 1), f"{stage}.eval_data")


def _write_record(folder: Path, tokens: Tokens, documents: Documents) -> None:
    """corpus.json: which files were read, in their order, and what became of their documents."""
    found = documents.sources | documents.eval_sources
    parts = [part | {"weight": found[part["name"]].weight} for part in tokens.sources]
    replace_text(folder / "corpus.json", json.dumps({"sources": parts}, indent=1, ensure_ascii=False))
