"""The ids of a text, which lie in files beside the stage's folder and are made once for all stages that want them.

`tokens/text-KEY/` holds what a survey of the text found, and copies of what is streamed; `tokens/KEY/` the ids:
`tokens.bin` to train on, source after source, `held_out.bin`, and `meta.json`. A key stands for the text, the tokenizer
and all settings that decide the content. Each folder is filled by all processes that see it (`together`), in parts that
outlive a kill. They are read through a file's map: no process has more of a text in memory than what it is at.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf.data.documents import SURVEY, Documents, summary
from rlhf.data.sources import TextSource, digest, is_streamed
from rlhf.data.streams import copied, copy_share, shares
from rlhf.stages.together import claimed, fill
from rlhf.stages.token_files import EVAL_FILE, TRAIN_FILE, has_tokens, join_parts, write_parts

_LAYOUT = 1
"""Counted up when the same text, tokenizer and settings would give other files than before."""


@dataclass(frozen=True)
class Tokens:
    """The ids of a text, mapped into memory."""

    train: np.ndarray
    held_out: np.ndarray
    sources: list[dict[str, Any]]
    """Of each source what it is, how many documents and tokens it has, and what was left out."""


class TokenCache:
    """What is kept of a text beside the folder of a stage; `digests` are those of its sources, by name."""

    def __init__(self, stage_folder: Path, documents: Documents, digests: Mapping[str, str]) -> None:
        self.root, self.documents = stage_folder.absolute().parent / "tokens", documents
        wanted = documents.wanted
        # Weights do not decide which documents there are, since they only say how often each is seen.
        sources = [
            [name, source.path, _digest(digests[name], source)]
            for name, source in (documents.sources | documents.eval_sources).items()
        ]
        rules = [wanted.eval_share, wanted.deduplicate, wanted.min_document_length, wanted.max_document_length]
        self._key = [*sources, *rules]

    def folder(self, *more: Any, kind: str = "") -> Path:
        """Where lies what follows from the text and from `more`."""
        return self.root / (kind + hashlib.sha256(json.dumps([_LAYOUT, self._key, *more]).encode()).hexdigest()[:16])

    def survey(self, say: Callable[..., None]) -> None:
        """Let the documents know what there is; streams among them are first copied beside it."""
        survey(self.folder(kind="text-"), self.documents, say)

    def find(self, tokenizer: PreTrainedTokenizerBase) -> Tokens | None:
        """The ids, if they are there."""
        folder = self._of_ids(tokenizer)
        if not has_tokens(folder):
            return None
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        train, held_out = (np.memmap(folder / file, meta["dtype"], "r") for file in (TRAIN_FILE, EVAL_FILE))
        return Tokens(train, held_out, meta["sources"])

    def make(self, tokenizer: PreTrainedTokenizerBase, say: Callable[..., None]) -> Tokens:
        """The ids, which all processes write that come here while they are not there."""
        folder = self._of_ids(tokenizer)
        if not has_tokens(folder):
            self.survey(say)
            fill(
                folder,
                f"the tokens of {self.documents.where}",
                say,
                has_tokens,
                lambda folder: join_parts(folder, self.documents, tokenizer),
                lambda folder: write_parts(folder, self.documents, tokenizer, say),
            )
        found = self.find(tokenizer)
        assert found is not None
        return found

    def _of_ids(self, tokenizer: PreTrainedTokenizerBase) -> Path:
        return self.folder([tokenizer.backend_tokenizer.to_str(), tokenizer.eos_token_id])


def survey(folder: Path, documents: Documents, say: Callable[..., None]) -> None:
    """Let documents know what there is; streams among them are first copied into `folder`, in which it is kept."""
    if documents.found:
        return
    sources = documents.sources | documents.eval_sources
    streams = {name: source for name, source in sources.items() if is_streamed(source)}
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

    fill(folder, f"a survey of {documents.where}", say, lambda folder: (folder / SURVEY).is_file(), read, copy)
    documents.load(folder)


def tell(say: Callable[[str], None], stage: str, sources: list[dict[str, Any]]) -> None:
    """Say what was left out and what the tokenizer cannot write; the same whether the ids were found or made."""
    for part in sources:
        name = f"{stage}.{part['name']}"
        if part["left_out"]:
            say(f"{name}: {summary(part['documents'], part['left_out'])}")
        for side, words in (("", "training"), ("held_out_", "held-out")):
            if unknown := part[f"{side}unknown"]:
                say(f"{name}: {unknown:,} of {part[f'{side}tokens']:,} {words} tokens are unknown to the tokenizer")


def _digest(known: str, source: TextSource) -> str:
    """Digest of a source as if it had no weight; `known` is that of the source as it is."""
    return known if source.weight is None else digest(source.model_copy(update={"weight": None}))
