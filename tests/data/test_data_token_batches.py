"""Prompts and responses by the thousand: each has the ids that it has alone."""

from collections.abc import Iterator
from typing import Any

import pytest

from rlhf.data import tokens
from rlhf.data.errors import DataError
from rlhf.data.tokens import (
    encode_example,
    encode_examples,
    encode_prompt,
    encode_prompts,
    encode_response,
    ensure_chat_template,
)

WRITES = "{% for message in messages %}{{ '[' + message.role + ']' + message.content }}{% endfor %}"
WITH_TOKENS = "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}{% endfor %}"
THINKS = WRITES + "{% if add_generation_prompt %}[assistant]<think>{% endif %}"
STRICT = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + WRITES
IGNORES_SYSTEM = WRITES.replace("in messages", "in messages if message.role != 'system'")
TOKENIZERS: dict[str, dict[str, Any]] = {
    "role tokens": {},
    "plain words": {"roles": False},
    "bos added and written": {"adds_bos": True},
    "bos added and written, plain words": {"adds_bos": True, "roles": False},
    "bos added": {"adds_bos": True, "chat_template": WRITES},
    "no bos": {"bos_token": None},
    "thinks": {"chat_template": THINKS},
    "role tokens, none of them before an answer": {"chat_template": WITH_TOKENS},
}
SPELT = "a <|endoftext|> b <|assistant|> c <s> d"


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


ROWS = [
    (ask("Name a colour"), "blue"),
    (ask("Name a colour"), "red"),
    (ask("Name a colour"), "blue"),
    ([*ask(SPELT), {"role": "assistant", "content": "y"}, *ask("the fox")], SPELT),
    (ask(""), ""),
    (ask("the answer is no " * 9), " yes"),
    (ask("café 👋\n\n"), "the small grey fox " * 9),
    (ask(SPELT), "\nnaïve"),
    ([{"role": "tool", "content": "Name a colour"}], "green"),
]


@pytest.fixture(params=[*TOKENIZERS, "slow"])
def any_tokenizer(request: pytest.FixtureRequest, build_tokenizer: Any) -> Any:
    """Of each kind; the slow one is written in Python, and knows bytes."""
    from transformers import ByT5Tokenizer

    tokenizer = (
        ByT5Tokenizer(eos_token="<|endoftext|>", bos_token="<s>", extra_ids=0)
        if request.param == "slow"
        else build_tokenizer(**TOKENIZERS[request.param])
    )
    ensure_chat_template(tokenizer)
    return tokenizer


def test_many_rows_at_once_have_the_ids_that_each_has_alone(any_tokenizer: Any) -> None:
    alone = [encode_example(any_tokenizer, prompt, answer, 1000) for prompt, answer in ROWS]
    assert list(encode_examples(any_tokenizer, iter(ROWS), 1000)) == alone
    assert [row.input_ids[row.prompt_length :] for row in alone if row] == [
        encode_response(any_tokenizer, prompt, answer) for prompt, answer in ROWS
    ]
    prompts = [prompt for prompt, _ in ROWS]
    for longest in (None, 5):
        alone_ids = [encode_prompt(any_tokenizer, prompt, longest) for prompt in prompts]
        assert list(encode_prompts(any_tokenizer, iter(prompts), longest)) == alone_ids


@pytest.mark.parametrize("text", ["blue", SPELT, "a\t\tb\n\nc", "a \U000f0000<s>\U000f0001 b", "a \U000f0001 b"])
def test_a_prompt_has_the_ids_that_the_tokenizer_itself_gives_its_conversation(any_tokenizer: Any, text: str) -> None:
    from transformers import AddedToken

    any_tokenizer.add_tokens([AddedToken("\t\t", special=True), AddedToken("\n\n", special=False)])
    conversations = [ask("Say hi"), ask(text), ask("Say hi")]
    how = {"add_generation_prompt": True, "return_dict": False, "sanitize_control_tokens": True}
    known = [any_tokenizer.apply_chat_template(conversation, **how) for conversation in conversations]
    bos = any_tokenizer.bos_token_id
    found = [ids[ids[:1] == [bos] :] for ids in encode_prompts(any_tokenizer, conversations)]
    assert found == [ids[ids[:1] == [bos] :] for ids in known]


def test_a_token_that_is_added_later_stays_text_too(any_tokenizer: Any) -> None:
    from transformers import AddedToken

    encode_prompt(any_tokenizer, ask("a <new>"))
    any_tokenizer.add_tokens([AddedToken("<new>", special=True)])
    for text in ("a <new>", "b <new>"):
        assert any_tokenizer.convert_tokens_to_ids("<new>") not in encode_prompt(any_tokenizer, ask(text))


def test_a_role_token_that_is_added_later_begins_each_answer_too(build_tokenizer: Any) -> None:
    tokenizer = build_tokenizer(roles=False, chat_template=WITH_TOKENS)
    encode_response(tokenizer, ask("x"), "y")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|assistant|>"]})
    assert encode_response(tokenizer, ask("x"), "y")[0] == tokenizer.convert_tokens_to_ids("<|assistant|>")


def test_ids_that_are_changed_change_no_other_row(any_tokenizer: Any) -> None:
    first, second = encode_prompts(any_tokenizer, [ask(SPELT)] * 2)
    first.append(-1)
    assert second == encode_prompt(any_tokenizer, ask(SPELT)) == first[:-1]


def test_a_response_that_does_not_fit_is_none_in_its_place(any_tokenizer: Any) -> None:
    rows = [(ask("x"), "blue"), (ask("x"), "the small grey fox " * 20), (ask("Say hi"), "red")]
    first, second, third = encode_examples(any_tokenizer, rows, 40)
    assert second is None
    assert (first, third) == tuple(encode_example(any_tokenizer, *row, 40) for row in (rows[0], rows[2]))
    assert None not in (first, third)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize(
    ("template", "message"),
    [
        (STRICT, r"refuses.*system: In French\.\\nuser: Hi.*System role not supported"),
        (IGNORES_SYSTEM, r"leaves the system message out of 'system: In French\.\\nuser: Hi'"),
    ],
)
def test_a_refused_conversation_is_named_among_others(
    build_tokenizer: Any, place: int, template: str, message: str
) -> None:
    tokenizer = build_tokenizer(chat_template=template)
    prompts = [ask("Say hi"), ask(SPELT)]
    prompts.insert(place, [{"role": "system", "content": "In French."}, *ask("Hi")])
    with pytest.raises(DataError, match=message):
        list(encode_prompts(tokenizer, prompts))
    with pytest.raises(DataError, match=message):
        list(encode_examples(tokenizer, [(prompt, "blue") for prompt in prompts], 1000))


def test_a_thousand_rows_are_encoded_at_once_and_each_prompt_once(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[list[str]] = []
    ids = tokens._ids

    def noted(tokenizer: Any, text: str | list[str], **how: Any) -> Any:
        if isinstance(text, list):
            encoded.append(text)
        return ids(tokenizer, text, **how)

    monkeypatch.setattr(tokens, "_ids", noted)
    rendered: list[object] = []
    apply = type(tokenizer).apply_chat_template
    monkeypatch.setattr(
        type(tokenizer), "apply_chat_template", lambda *given, **how: rendered.append(how) or apply(*given, **how)
    )
    rows = [(ask(f"once {number // 4}"), f"{number}") for number in range(1004)]
    assert len(list(encode_examples(tokenizer, rows, 1000))) == 1004
    assert [len(texts) for texts in encoded] == [1000, 250, 4, 1]
    assert len(rendered) == 2 * 251  # with a stand-in for the answer, and without one


@pytest.mark.parametrize(("prompt", "answer"), [("blue " * 120_000, ""), ("x", "blue " * 120_000)])
def test_long_rows_are_encoded_few_at_a_time(tokenizer: Any, prompt: str, answer: str) -> None:
    taken: list[int] = []

    def rows() -> Iterator[tuple[list[dict[str, str]], str]]:
        for number in range(5):
            taken.append(number)
            yield ask(prompt), answer

    next(encode_examples(tokenizer, rows(), 10**6))
    assert taken == [0, 1]
    next(encode_prompts(tokenizer, (prompt for prompt, _ in rows())))
    assert taken == ([0, 1] * 2 if len(prompt) > 1 else [0, 1, 0, 1, 2, 3, 4])
