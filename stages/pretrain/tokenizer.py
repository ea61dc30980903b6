"""The tokenizer of a new model: made from its training text, or one that is there already."""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlhf.data.tokens import ROLE_TOKENS, ensure_chat_template
from rlhf.stages.models import load_tokenizer
from rlhf.stages.pretrain.config import TRAINED_TOKENIZERS, PretrainSettings
from rlhf.stages.token_files import num_ids

END_OF_TEXT, PAD, UNKNOWN = "<|endoftext|>", "<|pad|>", "<|unk|>"


def is_trained_here(settings: PretrainSettings) -> bool:
    """Whether the stage makes a tokenizer from its text."""
    return settings.model is None and settings.tokenizer in TRAINED_TOKENIZERS


def existing_tokenizer(settings: PretrainSettings) -> PreTrainedTokenizerBase:
    """The tokenizer of the model to train further, as it is; or the one that `tokenizer` names."""
    if settings.model is not None:
        return load_tokenizer(settings.model)
    tokenizer = load_tokenizer(settings.tokenizer)
    tokenizer.model_max_length = settings.context_length
    return tokenizer


def train_tokenizer(texts: Iterable[str], settings: PretrainSettings) -> PreTrainedTokenizerFast:
    """A tokenizer of the kind that `tokenizer` names, over the training texts.

    bpe: byte-level BPE with one token per chat role; every text can be written in it. characters: a token for each
    character of the texts in the order of their code points, after the special tokens, which pad with eos.
    """
    if settings.tokenizer == "characters":
        special = [END_OF_TEXT, UNKNOWN, *settings.special_tokens]
        found: set[str] = set()
        for text in texts:  # one at a time: a text that streams does not fit into memory
            found.update(text)
        tokens = [*special, *sorted(found)]
        # Without merges BPE is one token per character, and what it does not know is unknown character by character.
        backend = Tokenizer(
            BPE({token: place for place, token in enumerate(dict.fromkeys(tokens))}, [], unk_token=UNKNOWN)
        )
        backend.decoder = decoders.Fuse()
        names = {"pad_token": END_OF_TEXT, "unk_token": UNKNOWN}
        others = settings.special_tokens
    else:
        others = [*ROLE_TOKENS, *settings.special_tokens]
        backend = Tokenizer(BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        trainer = BpeTrainer(
            vocab_size=settings.vocab_size,
            special_tokens=[END_OF_TEXT, PAD, *others],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        backend.train_from_iterator(texts, trainer)
        names = {"pad_token": PAD}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END_OF_TEXT,
        additional_special_tokens=others,
        model_max_length=settings.context_length,
        clean_up_tokenization_spaces=False,
        **names,
    )
    ensure_chat_template(tokenizer)
    return tokenizer


def padded_vocab_size(tokenizer: PreTrainedTokenizerBase, multiple: int) -> int:
    """Embeddings for all tokens, rounded up to a multiple."""
    return -(-num_ids(tokenizer) // multiple) * multiple
