"""The raw text of PPO's pretraining gradients: made into ids once for all processes and stages, read from a file."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ppo_world import model_folders, settings
from processes_world import in_two_processes
from stages_world import block_rows, byte_tokenizer

from rlhf.data import documents
from rlhf.data.collate import Blocks
from rlhf.data.errors import DataError
from rlhf.data.split import split_by_prompt
from rlhf.data.tokens import encode_documents
from rlhf.stages import token_cache, token_files
from rlhf.stages.models import load_tokenizer
from rlhf.stages.ppo.train import ptx_blocks
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.pretrain.corpus import prepare
from rlhf.stages.runtime import Runtime

TEXTS = [f"document {number} of the text\n" for number in range(40)]
TRAINED, HELD_OUT = split_by_prompt(TEXTS, str, 0.1)


@pytest.fixture
def given(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "models").mkdir()
    return model_folders(tmp_path / "models", byte_tokenizer())


def read(folder: Path, given: dict[str, str], text: Path) -> Blocks:
    """As the ppo stage in a folder does."""
    fields = {"ptx_coef": 0.3, "ptx_data": str(text), "ptx_batch_size": 4, "ptx_block_size": 8}
    folder.mkdir(parents=True, exist_ok=True)
    run = Runtime(settings(**given, **fields), folder)
    found = ptx_blocks(run, load_tokenizer(given["model"]))
    run.close()
    assert isinstance(found, Blocks)
    return found


def read_noting(rank: int, root: Path, given: dict[str, str]) -> tuple[bool, Any, int]:
    """Whether what a process reads from is a file's map, all rows, and how many documents it tokenised."""
    documents.PART = 100  # characters: five documents
    encoded = 0
    real = token_files.encode_documents

    def counting(*arguments: Any) -> Any:
        nonlocal encoded
        for ids in real(*arguments):
            encoded += 1
            yield ids

    token_files.encode_documents = counting
    found = read(root / "run" / "ppo", given, root / "text.jsonl")
    return isinstance(found.tokens, np.memmap), found[range(len(found))], encoded


def test_processes_tokenise_the_text_once_between_them_and_read_it_from_a_map(
    tmp_path: Path, given: dict[str, str]
) -> None:
    both = in_two_processes(tmp_path, read_noting, tmp_path, given)
    expected = block_rows(encode_documents(byte_tokenizer(), TRAINED), 8)
    for is_map, rows, _ in both:
        assert is_map
        assert rows.equal(expected)
    assert sum(encoded for *_, encoded in both) == 40


def test_the_tokens_of_pretrain_are_taken_and_what_it_held_out_is_not_learned(
    tmp_path: Path, given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.jsonl"
    fields = {"data": str(text), "tokenizer": given["model"], "context_length": 16, "report_to": []}
    (tmp_path / "run" / "pretrain").mkdir(parents=True)
    run = Runtime(PretrainSettings.load(fields, "pretrain"), tmp_path / "run" / "pretrain")
    corpus = prepare(run)
    run.close()
    monkeypatch.setattr(token_cache, "write_parts", None)
    found = read(tmp_path / "run" / "ppo", given, text)
    assert (found.tokens == corpus.rows.tokens).all()
    assert len(found.tokens) == sum(len(text) + 1 for text in TRAINED)
    assert len(HELD_OUT) == 5


def test_too_little_text_is_refused_by_the_name_of_its_setting(tmp_path: Path, given: dict[str, str]) -> None:
    text = tmp_path / "short.jsonl"
    text.write_text(json.dumps({"text": "abc"}) + "\n")
    with pytest.raises(DataError, match=r"^ppo\.ptx_data: the text gives 3 tokens"):
        read(tmp_path / "run" / "ppo", given, text)


@pytest.mark.parametrize("part", [1000, 20])  # characters: all documents, or two
def test_of_equal_documents_alone_each_is_learned_but_for_its_end(
    tmp_path: Path, given: dict[str, str], part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "PART", part)
    text = tmp_path / "equal.jsonl"
    text.write_text((json.dumps({"text": "0123456789"}) + "\n") * 5)
    found = read(tmp_path / "run" / "ppo", given, text)
    assert list(found.tokens) == list(chain(*encode_documents(byte_tokenizer(), ["012345678"] * 5)))
