"""The one place that turns rows into token ids, cuts what is too long, and turns answers back into text.

Prompt and response are tokenised apart and joined as ids. Joined as text first, a tokenizer would merge
letters across the border, and the same prompt would have other ids in SFT than in PPO.

Text stays text: a special token that rows spell out ("<|endoftext|>") becomes the ids of its letters. Only the
chat template, and this file where an answer or document ends, write special tokens.
"""

import re
from array import array
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import chain, pairwise, takewhile
from typing import Any

from jinja2 import TemplateError

from rlhf.data.errors import DataError
from rlhf.data.messages import Messages, prompt_text

Tokenizer = Any  # a Hugging Face tokenizer; importing transformers for the type's sake would take seconds

_LONG = 1_000_000  # characters
_CUTS = ("\n", ""), ("\n\n", ""), ("\n", "\n")
"""What is before a cut and behind it, where a text may be cut between two lines, or between two paragraphs."""

ROLE_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>")


@dataclass(frozen=True)
class Encoded:
    """A prompt with its response; `input_ids[prompt_length:]` is the response, eos included."""

    input_ids: list[int]
    prompt_length: int


class EncodedRows:
    """Many of them, in four bytes a token: as lists of Python's numbers they would take many times that."""

    def __init__(self, rows: Iterable[Encoded]) -> None:
        self._ids, self._ends, self._prompt_lengths = array("i"), array("q", [0]), array("q")
        for row in rows:
            self._ids.extend(row.input_ids)
            self._ends.append(len(self._ids))
            self._prompt_lengths.append(row.prompt_length)

    def __len__(self) -> int:
        return len(self._prompt_lengths)

    def __getitem__(self, place: int) -> Encoded:
        """That row, from 0."""
        return Encoded(self._ids[self._ends[place] : self._ends[place + 1]].tolist(), self._prompt_lengths[place])

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max((end - start for start, end in pairwise(self._ends)), default=0)


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
    ids = list(_asked(tokenizer, prompt).ids)
    return ids if max_length is None else _cut_left(tokenizer, ids, max_length)


def encode_response(tokenizer: Tokenizer, prompt: Messages, response: str) -> list[int]:
    """Response ids as the chat template begins an answer (a space, say), then the text as it is, then eos."""
    return _response_ids(tokenizer, _asked(tokenizer, prompt), response)


def answer_texts(tokenizer: Tokenizer, answers: Iterable[list[int]], stops: Container[int]) -> list[str]:
    """What each answer says before the first of `stops`; special tokens and whitespace at either end are left out."""
    said = [list(takewhile(lambda id: id not in stops, ids)) for ids in answers]
    return [text.strip() for text in tokenizer.batch_decode(said, skip_special_tokens=True)]


def encode_example(tokenizer: Tokenizer, prompt: Messages, response: str, max_length: int) -> Encoded | None:
    """Prompt and response in at most `max_length` tokens, the prompt cut from the left, the response never.

    None where the response, its eos and one prompt token do not fit: the caller counts and names such rows.
    """
    asked = _asked(tokenizer, prompt)
    response_ids, prompt_ids = _response_ids(tokenizer, asked, response), asked.ids
    room = max_length - len(response_ids)
    if room < 1 + (prompt_ids[:1] == [tokenizer.bos_token_id]):
        return None
    prompt_ids = _cut_left(tokenizer, prompt_ids, room)
    return Encoded(prompt_ids + response_ids, len(prompt_ids))


def encode_documents(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[list[int]]:
    """The ids of each document, eos at their end: joined they are a stream that is ready to be cut into blocks.

    A long document is encoded some lines at a time where the tokenizer does not look across the ends of lines, or of
    paragraphs: while a text is encoded, it takes many times its memory.
    """
    cuts = [cut for cut in _CUTS if _falls_apart(tokenizer, *cut)]
    end_of_line = re.compile("|".join(rf"(?<=\S){before}(?={behind}\w)" for before, behind in cuts))
    for some in _batches(texts):
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


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts to be encoded at once: few where they are long, since their ids take more memory than they do."""
    batch: list[str] = []
    length = 0
    for text in texts:
        batch.append(text)
        length += len(text)
        if len(batch) == 1000 or length > _LONG:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


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


def _prompt_ids(tokenizer: Tokenizer, prompt: Messages) -> list[int]:
    ids: list[int] = _apply(
        tokenizer, prompt, add_generation_prompt=True, return_dict=False, sanitize_control_tokens=True
    )
    bos = tokenizer.bos_token_id
    if bos is None:
        return ids
    # The template may write bos, the tokenizer may add it, some do both: count it once.
    start = next((place for place, token in enumerate(ids) if token != bos), len(ids))
    once = start > 0 or tokenizer("", verbose=False)["input_ids"][:1] == [bos]
    return [bos] * once + ids[start:]


@dataclass(frozen=True)
class _Asked:
    """What an answer follows."""

    ids: list[int]
    """Of the prompt, up to where the answer begins."""
    lead: str
    """What the template writes between prompt and answer."""
    lead_ids: list[int] | None
    """Its ids, where it has a role token in it; other text, a space say, belongs to the first word."""


def _asked(tokenizer: Tokenizer, prompt: Messages) -> _Asked:
    messages = tuple(tuple(message.items()) for message in prompt)
    return _asked_before(tokenizer, str(tokenizer.chat_template), messages)


@lru_cache(maxsize=1000)  # a prompt comes again with each of its answers, and templates take long
def _asked_before(tokenizer: Tokenizer, _: str, messages: tuple[tuple[tuple[str, str], ...], ...]) -> _Asked:
    prompt = [dict(message) for message in messages]
    lead = _lead(tokenizer, prompt, _render(tokenizer, prompt))
    lead_ids: list[int] = tokenizer(lead, add_special_tokens=False)["input_ids"] if lead else []
    with_role = bool(lead) and lead_ids != _text_ids(tokenizer, lead)  # a token that the generation prompt lacks
    return _Asked(_prompt_ids(tokenizer, prompt), lead, lead_ids if with_role else None)


def _response_ids(tokenizer: Tokenizer, asked: _Asked, response: str) -> list[int]:
    if asked.lead_ids is not None:
        return [*asked.lead_ids, *_text_ids(tokenizer, response), tokenizer.eos_token_id]
    return [*_text_ids(tokenizer, asked.lead + response), tokenizer.eos_token_id]


def _text_ids(tokenizer: Tokenizer, text: str | list[str]) -> Any:
    """Ids of plain text, or of each of several."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]


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
