"""New tokenizers: every text comes back as it was, and what spells a special token stays text."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

from rlhf.data.errors import RefusedError
from rlhf.data.tokens import ROLE_TOKENS, encode_documents
from rlhf.stages.models import load_tokenizer
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.pretrain.tokenizer import (
    END_OF_TEXT,
    PAD,
    existing_tokenizer,
    padded_vocab_size,
    train_tokenizer,
)
from rlhf.stages.token_files import num_ids

TEXT = "To be, or not to be:\n  that is\tthe question.\n\n"
SPELT = "a<|endoftext|>b<|unk|> <|user|><|x|>"


def tokenizer_of(*texts: str, **fields: Any) -> Any:
    settings = {"data": "unread.txt", "vocab_size": 300, "context_length": 64}
    return train_tokenizer(texts, PretrainSettings.load(settings | fields, "pretrain"))


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return next(encode_documents(tokenizer, [text]))[:-1]


def test_characters_are_a_token_each_after_end_and_unknown() -> None:
    tokenizer = tokenizer_of("ba\n", "c", tokenizer="characters")
    assert tokenizer.get_vocab() == {END_OF_TEXT: 0, "<|unk|>": 1, "\n": 2, "a": 3, "b": 4, "c": 5}
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.unk_token_id) == (0, 0, 1)
    assert list(encode_documents(tokenizer, ["cab\n"])) == [[5, 3, 4, 2, 0]]
    assert tokenizer.model_max_length == 64


@pytest.mark.parametrize("kind", ["characters", "bpe"])
@pytest.mark.parametrize("text", [TEXT, "  two  spaces  ", "\n\n\r\n", " é✓ 日本 👩‍👩‍👧 ", SPELT])
def test_a_text_comes_back_as_it_was(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(text, tokenizer=kind)
    ids = ids_of(tokenizer, text)
    assert tokenizer.decode(ids) == text
    if kind == "characters":
        assert len(ids) == len(text)


def test_characters_that_the_training_text_lacks_are_unknown_one_by_one() -> None:
    tokenizer = tokenizer_of("abc", tokenizer="characters")
    assert ids_of(tokenizer, "aé✓b") == [2, 1, 1, 3]


@pytest.mark.parametrize("kind", ["characters", "bpe"])
def test_special_tokens_spelt_out_stay_text(kind: str) -> None:
    tokenizer = tokenizer_of(SPELT, tokenizer=kind, special_tokens=["<|x|>"])
    special = set(tokenizer.all_special_ids)
    assert len(special) >= 3
    assert not special & set(ids_of(tokenizer, SPELT))
    assert tokenizer.convert_tokens_to_ids("<|x|>") in special
    assert tokenizer("<|x|>", add_special_tokens=False)["input_ids"] == [tokenizer.convert_tokens_to_ids("<|x|>")]


def test_bpe_has_tokens_for_roles_and_no_more_than_it_may() -> None:
    tokenizer = tokenizer_of(TEXT * 3, special_tokens=["<|x|>"])
    assert tokenizer.convert_ids_to_tokens(range(6)) == [END_OF_TEXT, PAD, *ROLE_TOKENS, "<|x|>"]
    assert 262 < len(tokenizer) <= 300
    assert len(ids_of(tokenizer, TEXT)) < len(TEXT)


def test_chat_without_role_tokens_is_plain_text() -> None:
    template = {
        kind: tokenizer_of("User: hi\n\nAssistant:", tokenizer=kind).chat_template for kind in ("characters", "bpe")
    }
    assert "<|assistant|>" in template["bpe"]
    assert "<|assistant|>" not in template["characters"]


@pytest.mark.parametrize("kind", ["characters", "bpe"])
def test_a_saved_tokenizer_writes_the_same_ids(kind: str, tmp_path: Path) -> None:
    tokenizer = tokenizer_of(TEXT, SPELT, tokenizer=kind, special_tokens=["<|x|>"])
    tokenizer.save_pretrained(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    assert saved.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert list(encode_documents(saved, [TEXT, SPELT])) == list(encode_documents(tokenizer, [TEXT, SPELT]))
    for name in (
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
        "all_special_ids",
        "model_max_length",
        "chat_template",
    ):
        assert getattr(saved, name) == getattr(tokenizer, name), name
    assert saved.decode(ids_of(saved, TEXT)) == TEXT


def test_an_existing_tokenizer_is_taken_as_it_is_but_for_the_length(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(TEXT)
    tokenizer.save_pretrained(tmp_path)
    settings = PretrainSettings.load({"data": "x.txt", "tokenizer": str(tmp_path), "context_length": 32}, "pretrain")
    found = existing_tokenizer(settings)
    assert found.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()
    assert found.model_max_length == 32


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    settings = PretrainSettings.load({"data": "x.txt", "tokenizer": str(tmp_path)}, "pretrain")
    with pytest.raises(RefusedError, match="no tokenizer in"):
        existing_tokenizer(settings)


def test_embeddings_are_rounded_up_to_a_multiple() -> None:
    tokenizer = tokenizer_of("ab", tokenizer="characters")
    assert [padded_vocab_size(tokenizer, multiple) for multiple in (1, 2, 3, 64)] == [4, 4, 6, 64]


def test_shakespeare_has_65_characters() -> None:
    path = Path(__file__).parents[2].parent / "shared/data/text/tinyshakespeare.txt"
    if not path.is_file():
        pytest.skip("tinyshakespeare.txt is not here")
    text = path.read_text(encoding="utf-8")
    tokenizer = tokenizer_of(text, tokenizer="characters")
    assert len(tokenizer) == 67
    [ids] = encode_documents(tokenizer, [text])
    assert len(ids) == 1_115_394 + 1
    assert tokenizer.decode(ids[:-1]) == text


def test_there_is_an_embedding_for_the_highest_id_also_where_ids_are_left_out() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE({"a": 0, "b": 9}, [])), eos_token="b")
    assert (len(tokenizer), num_ids(tokenizer)) == (2, 10)
    assert padded_vocab_size(tokenizer, 4) == 12


def test_a_tokenizer_that_is_not_of_the_tokenizers_library_is_refused(tmp_path: Path) -> None:
    ByT5Tokenizer().save_pretrained(tmp_path)
    with pytest.raises(RefusedError, match=r"has a tokenizer without tokenizer.json \(ByT5Tokenizer\)"):
        load_tokenizer(str(tmp_path))
