"""The one place that turns rows into token ids, cuts what is too long, and turns answers back into text.

Prompt and response are tokenised apart and joined as ids. Joined as text first, a tokenizer would merge
letters across the border, and the same prompt would have other ids in SFT than in PPO.

Text stays text: a special token that rows spell out ("<|endoftext|>") becomes the ids of its letters. Only the
chat template, and this file where an answer or document ends, write special tokens.
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import chain, takewhile
from typing import Any, TypeVar

from jinja2 import TemplateError

from rlhf.data.errors import DataError
from rlhf.data.messages import Messages, prompt_text

Tokenizer = Any  # a Hugging Face tokenizer; importing transformers for the type's sake would take seconds
Row = TypeVar("Row")

_LONG = 1_000_000  # characters
_CUTS = ("\n", ""), ("\n\n", ""), ("\n", "\n")
"""What is before a cut and behind it, where a text may be cut between two lines, or between two paragraphs."""

ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")


@dataclass(frozen=True)
class Encoded:
    """A prompt with its response; `input_ids[prompt_length:]` is the response, eos included."""

    input_ids: list[int]
    prompt_length: int


def ensure_chat_template(tokenizer: Tokenizer) -> str | None:
    """Give a tokenizer without a chat template one of ours; returns its file name, None if it had its own."""
    if tokenizer.chat_template:
        return None
    vocabulary = tokenizer.get_vocab()
    name = "roles.jinja" if all(token in vocabulary for token in ROLE_TOKENS) else "plain.jinja"
    tokenizer.chat_template = (files("rlhf.data") / "templates" / name).read_text(encoding="utf-8")
    return name


def ensure_pad(tokenizer: Tokenizer) -> None:
    """Pad with eos where there is no pad token; none is added, so the vocabulary keeps its size."""
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"tokenizer {tokenizer.name_or_path!r} has no end-of-text token, so no answer could ever end; "
            "set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token


def encode_prompt(tokenizer: Tokenizer, prompt: Messages, max_length: int | None = None) -> list[int]:
    """Prompt ids up to where the answer begins, bos exactly once; the same ids in every stage.

    Longer than `max_length`, it loses tokens on the left, since the question is usually at the end.
    Raises DataError with the text of the row where the chat template refuses it.
    """
    return next(encode_prompts(tokenizer, [prompt], max_length))


def encode_prompts(
    tokenizer: Tokenizer, prompts: Iterable[Messages], max_length: int | None = None
) -> Iterator[list[int]]:
    """The ids of each, as `encode_prompt` has them; many at once, for which a fast tokenizer takes all cores."""
    for some in _batches(prompts, _size):
        for ids in _prompt_ids(tokenizer, _written(tokenizer, some)):
            yield ids if max_length is None else _cut_left(tokenizer, ids, max_length)


def encode_response(tokenizer: Tokenizer, prompt: Messages, response: str) -> list[int]:
    """Response ids as the chat template begins an answer (a space, say), then the text as it is, then eos."""
    [ids] = _response_ids(tokenizer, _written(tokenizer, [prompt]), [response])
    return ids


def answer_texts(tokenizer: Tokenizer, answers: Iterable[list[int]], stops: Container[int]) -> list[str]:
    """What each answer says before the first of `stops`; special tokens and whitespace at either end are left out."""
    said = [list(takewhile(lambda id: id not in stops, ids)) for ids in answers]
    return [text.strip() for text in tokenizer.batch_decode(said, skip_special_tokens=True)]


def encode_example(tokenizer: Tokenizer, prompt: Messages, response: str, max_length: int) -> Encoded | None:
    """Prompt and response in at most `max_length` tokens, the prompt cut from the left, the response never.

    None where the response, its eos and one prompt token do not fit: the caller counts and names such rows.
    """
    return next(encode_examples(tokenizer, [(prompt, response)], max_length))


def encode_examples(
    tokenizer: Tokenizer, pairs: Iterable[tuple[Messages, str]], max_length: int
) -> Iterator[Encoded | None]:
    """Each prompt with its response, as `encode_example` has them; many at once, as in `encode_prompts`."""
    for some in _batches(pairs, lambda pair: _size(pair[0]) + len(pair[1])):
        written = _written(tokenizer, [prompt for prompt, _ in some])
        responses = _response_ids(tokenizer, written, [response for _, response in some])
        for prompt_ids, response_ids in zip(_prompt_ids(tokenizer, written), responses, strict=True):
            room = max_length - len(response_ids)
            if room < 1 + (prompt_ids[:1] == [tokenizer.bos_token_id]):
                yield None
            else:
                prompt_ids = _cut_left(tokenizer, prompt_ids, room)
                yield Encoded(prompt_ids + response_ids, len(prompt_ids))


def encode_documents(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[list[int]]:
    """The ids of each document, eos at their end: joined they are a stream that is ready to be cut into blocks.

    A long document is encoded some lines at a time where the tokenizer does not look across the ends of lines, or of
    paragraphs: while a text is encoded, it takes many times its memory.
    """
    cuts = [cut for cut in _CUTS if _falls_apart(tokenizer, *cut)]
    end_of_line = re.compile("|".join(rf"(?<=\S){before}(?={behind}\w)" for before, behind in cuts))
    for some in _batches(texts, len):
        long = some.pop() if cuts and len(some[-1]) > _LONG else ""
        for ids in _text_ids(tokenizer, some) if some else ():
            yield [*ids, tokenizer.eos_token_id]
        if long:
            pieces = (_text_ids(tokenizer, lines) for lines in _lines(long, end_of_line))
            yield [*chain.from_iterable(pieces), tokenizer.eos_token_id]


def _falls_apart(tokenizer: Tokenizer, before: str, behind: str) -> bool:
    """Whether two lines have the ids together that each has by itself, also with a full stop between them."""
    pairs = [(f"{line}{before}", f"{behind}two") for line in ("one", "one.")]
    return all(
        _text_ids(tokenizer, first + second) == _text_ids(tokenizer, first) + _text_ids(tokenizer, second)
        for first, second in pairs
    )


def _lines(text: str, end_of_line: re.Pattern[str]) -> Iterator[str]:
    """A text in pieces of about `_LONG` characters; each ends where a line does that a letter or digit comes after."""
    start = 0
    while start < len(text):
        end = start + _LONG
        found = end_of_line.search(text, end) if end < len(text) else None
        end = found.end() if found else len(text)
        yield text[start:end]
        start = end


def _batches(rows: Iterable[Row], size: Callable[[Row], int]) -> Iterator[list[Row]]:
    """Rows to be encoded at once: few where their texts are long, since ids take more memory than they do."""
    batch: list[Row] = []
    length = 0
    for row in rows:
        batch.append(row)
        length += size(row)
        if len(batch) == 1000 or length > _LONG:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _size(prompt: Messages) -> int:
    """Characters of its messages."""
    return sum(len(message["content"]) for message in prompt)


def _apply(tokenizer: Tokenizer, messages: Messages, **how: Any) -> Any:
    try:
        return tokenizer.apply_chat_template(messages, **how)
    except (TemplateError, TypeError, ValueError) as error:
        raise DataError(f"the chat template refuses the conversation {_excerpt(messages)}: {error}") from error


def _render(tokenizer: Tokenizer, prompt: Messages) -> str:
    """The prompt as the chat template writes it, up to where the answer begins."""
    text: str = _apply(tokenizer, prompt, tokenize=False, add_generation_prompt=True)
    for message in prompt:
        if message["role"] == "system" and message["content"].strip() not in text:
            raise DataError(
                f"the chat template leaves the system message out of {_excerpt(prompt)}; "
                "put it into the first user message, or use a template that has system messages"
            )
    return text


@dataclass(frozen=True)
class _Written:
    """A prompt as the chat template writes it."""

    text: str
    """Up to where the answer begins."""
    lead: str
    """What the template writes between prompt and answer."""
    ids: list[int] | None
    """Its ids, where a message spells a special token, which stays text there; else it has those of its text."""


def _written(tokenizer: Tokenizer, prompts: list[Messages]) -> list[_Written]:
    as_it_is = str(tokenizer.chat_template), len(tokenizer)
    frozen = (tuple(tuple(message.items()) for message in prompt) for prompt in prompts)
    return [_written_before(tokenizer, *as_it_is, messages) for messages in frozen]


@lru_cache(maxsize=1000)  # a prompt comes again with each of its answers, and templates take long
def _written_before(
    tokenizer: Tokenizer, _: str, num_tokens: int, messages: tuple[tuple[tuple[str, str], ...], ...]
) -> _Written:
    prompt = [dict(message) for message in messages]
    text = _render(tokenizer, prompt)
    lead = _lead(tokenizer, prompt, text)
    special = _special(tokenizer, num_tokens)
    if not any(special.search(value) for message in prompt for value in message.values()):
        return _Written(text, lead, None)  # to be encoded with others; below one is encoded by itself
    how = {"add_generation_prompt": True, "return_dict": False, "sanitize_control_tokens": True}
    return _Written(text, lead, _apply(tokenizer, prompt, **how))


@lru_cache(maxsize=16)  # some tokenizers have thousands
def _special(tokenizer: Tokenizer, _: int) -> re.Pattern[str]:
    """Finds what `apply_chat_template` has to keep as text: added tokens, but not those that are mere whitespace.

    Also the two private characters that it marks them with, since it leaves them out of what it is given.
    """
    added = tokenizer.added_tokens_decoder.values()
    texts = [re.escape(token.content) for token in added if token.special or not token.content.isspace()]
    return re.compile("|".join([*texts, "\U000f0000", "\U000f0001"]))  # a class of them would slow the search down


def _prompt_ids(tokenizer: Tokenizer, written: list[_Written]) -> Iterator[list[int]]:
    texts = list(dict.fromkeys(prompt.text for prompt in written if prompt.ids is None))
    ids_of = dict(zip(texts, _ids(tokenizer, texts), strict=True)) if texts else {}
    bos = tokenizer.bos_token_id
    adds_bos = bos is not None and tokenizer("", verbose=False)["input_ids"][:1] == [bos]
    for prompt in written:
        ids = ids_of[prompt.text] if prompt.ids is None else prompt.ids
        # The template may write bos, the tokenizer may add it, some do both: count it once.
        start = next((place for place, token in enumerate(ids) if token != bos), len(ids))
        yield [bos] * (start > 0 or adds_bos) + ids[start:]


def _response_ids(tokenizer: Tokenizer, written: list[_Written], responses: list[str]) -> list[list[int]]:
    num_tokens = len(tokenizer)
    roles = [_role_ids(tokenizer, num_tokens, prompt.lead) for prompt in written]
    rows = zip(written, roles, responses, strict=True)
    texts = [response if role else prompt.lead + response for prompt, role, response in rows]
    found = zip(roles, _text_ids(tokenizer, texts), strict=True)
    return [[*role, *ids, tokenizer.eos_token_id] for role, ids in found]


@lru_cache(maxsize=16)  # most prompts have the same
def _role_ids(tokenizer: Tokenizer, num_tokens: int, lead: str) -> tuple[int, ...]:
    """The ids of a lead that has a role token in it; none of other text, a space say, which is of the first word.
    `num_tokens` are the tokenizer's, since one that was given more is another."""
    ids = _ids(tokenizer, lead)
    return () if ids == _text_ids(tokenizer, lead) else tuple(ids)


def _text_ids(tokenizer: Tokenizer, text: str | list[str]) -> Any:
    """Ids of plain text, or of each of several."""
    return _ids(tokenizer, text, split_special_tokens=True)


def _ids(tokenizer: Tokenizer, text: str | list[str], **how: Any) -> Any:
    how |= {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    return tokenizer(text, **how)["input_ids"]


def _lead(tokenizer: Tokenizer, prompt: Messages, rendered: str) -> str:
    """What the template writes between the generation prompt and an answer, found with a stand-in answer.

    A stand-in, because templates may trim the real one. Templates whose generation prompt differs from how
    they write a past answer (thinking models) have no such text.
    """
    stand_in = "RESPONSE"
    text: str = _apply(tokenizer, [*prompt, {"role": "assistant", "content": stand_in}], tokenize=False)
    if not text.startswith(rendered):
        return ""
    lead, found, _ = text[len(rendered) :].partition(stand_in)
    return lead if found else ""


def _cut_left(tokenizer: Tokenizer, ids: list[int], max_length: int) -> list[int]:
    """The last `max_length` ids; a leading bos stays, in the place of one more."""
    if len(ids) <= max_length:
        return ids
    head = ids[:1] if ids[:1] == [tokenizer.bos_token_id] else []
    kept = max_length - len(head)
    return head + ids[len(ids) - kept :]


def _excerpt(prompt: Messages) -> str:
    text = prompt_text(prompt)
    return repr(text if len(text) <= 80 else text[:77] + "…")
