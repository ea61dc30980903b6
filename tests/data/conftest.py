"""Files of rows, and a tiny byte-level BPE tokenizer, trained in memory."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf.data.sources import Source

CORPUS = [
    "Name a colour blue red green",
    "Question: 2+2\nAnswer: 4",
    "Say hi to the small grey fox by the old bridge.",
    "The answer is yes, the answer is no.",
] * 4
ROLES = ["<|system|>", "<|user|>", "<|assistant|>"]


@pytest.fixture(scope="session")
def build_tokenizer() -> Callable[..., Any]:
    """Call it for a fresh tokenizer; other keyword arguments go to PreTrainedTokenizerFast."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    def build(roles: bool = True, adds_bos: bool = False, **settings: Any) -> Any:
        bpe = Tokenizer(models.BPE())
        bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=330,
            special_tokens=["<|endoftext|>", "<s>", *(ROLES if roles else [])],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator(CORPUS, trainer)
        if adds_bos:
            bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        return PreTrainedTokenizerFast(
            tokenizer_object=bpe, **{"eos_token": "<|endoftext|>", "bos_token": "<s>"} | settings
        )

    return build


@pytest.fixture(scope="session")
def tokenizer(build_tokenizer: Callable[..., Any]) -> Any:
    """One with role tokens, our template, and pad = eos."""
    from rlhf.data.tokens import ensure_chat_template, ensure_pad

    tokenizer = build_tokenizer()
    ensure_chat_template(tokenizer)
    ensure_pad(tokenizer)
    return tokenizer


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Source]:
    """Call it with rows for a JSON Lines file of them; keyword arguments are further fields of the source."""

    def write(*rows: Any, **settings: Any) -> Source:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return Source(path=str(file), **settings)

    return write


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory, as a user would have it."""
    name = f"made_rows_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(
        "def rows(count, start=0):\n    return ({'text': str(start + n)} for n in range(count))\nfew = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    return name


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A data set with two splits, as `datasets` writes it."""
    import datasets

    splits = {name: datasets.Dataset.from_list([{"text": f"{name} {n}"} for n in (1, 2)]) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def store(tmp_path: Path) -> Any:
    """An empty feedback store."""
    from rlhf.data.feedback.store import Store

    with Store.create(tmp_path / "f.sqlite") as store:
        yield store
