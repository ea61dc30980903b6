"""Tokens of prompts, responses and documents: the border is exact, bos comes once, eos always."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf.data import tokens
from rlhf.data.errors import DataError
from rlhf.data.tokens import (
    Encoded,
    encode_documents,
    encode_example,
    encode_prompt,
    encode_response,
    ensure_chat_template,
    ensure_pad,
)

EOS, BOS, SYSTEM, USER, ASSISTANT = 0, 1, 2, 3, 4


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


STRICT = """{%- for message in messages -%}
{%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif -%}
{{ '[' + message.role + ']' + message.content }}
{%- endfor -%}{% if add_generation_prompt %}[assistant]{% endif -%}"""
IGNORES_SYSTEM = """{%- for message in messages if message.role != 'system' -%}
{{ '[' + message.role + ']' + message.content }}
{%- endfor -%}{% if add_generation_prompt %}[assistant]{% endif -%}"""
TRIMS = """{%- for message in messages -%}
{{ '<|' + message.role + '|>\n' + message.content | trim + '<|endoftext|>\n' }}
{%- endfor -%}{% if add_generation_prompt %}<|assistant|>\n{% endif -%}"""
THINKS = """{%- for message in messages -%}
{{ '[' + message.role + ']' + message.content }}
{%- endfor -%}{% if add_generation_prompt %}[assistant]<think>{% endif -%}"""


def test_the_own_template_marks_each_role_with_one_token(tokenizer: Any) -> None:
    conversation = [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]
    [x], [y] = tokenizer("x")["input_ids"], tokenizer("y")["input_ids"]
    assert encode_prompt(tokenizer, conversation) == [BOS, SYSTEM, x, USER, y, ASSISTANT]


def test_earlier_answers_of_the_own_template_end_with_eos(tokenizer: Any) -> None:
    turns = [*ask("x"), {"role": "assistant", "content": "y"}, *ask("x")]
    [x], [y] = tokenizer("x")["input_ids"], tokenizer("y")["input_ids"]
    assert encode_prompt(tokenizer, turns) == [BOS, USER, x, ASSISTANT, y, EOS, USER, x, ASSISTANT]


def test_a_tokenizer_without_role_tokens_gets_plain_words(build_tokenizer: Any) -> None:
    tokenizer = build_tokenizer(roles=False)
    assert ensure_chat_template(tokenizer) == "plain.jinja"
    assert tokenizer.decode(encode_prompt(tokenizer, ask("Say hi"))) == "<s>User: Say hi\nAssistant:"
    response = encode_response(tokenizer, ask("Say hi"), "hi")
    assert tokenizer.decode(response) == " hi<|endoftext|>"


def test_an_existing_template_is_kept(build_tokenizer: Any) -> None:
    tokenizer = build_tokenizer()
    assert ensure_chat_template(tokenizer) == "roles.jinja"
    tokenizer.chat_template = STRICT
    assert ensure_chat_template(tokenizer) is None
    assert tokenizer.chat_template == STRICT


def test_the_template_travels_with_the_tokenizer(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert ensure_chat_template(again) is None
    assert encode_prompt(again, ask("Say hi")) == encode_prompt(tokenizer, ask("Say hi"))


def test_pad_falls_back_to_eos_without_a_new_token(build_tokenizer: Any) -> None:
    tokenizer = build_tokenizer()
    size = len(tokenizer)
    ensure_pad(tokenizer)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == EOS
    assert len(tokenizer) == size


def test_a_pad_token_is_kept_and_a_missing_eos_refused(build_tokenizer: Any) -> None:
    tokenizer = build_tokenizer(pad_token="<s>")
    ensure_pad(tokenizer)
    assert tokenizer.pad_token_id == BOS
    with pytest.raises(DataError, match="no end-of-text token"):
        ensure_pad(build_tokenizer(eos_token=None))


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template", [None, STRICT, "{{ bos_token }}" + STRICT])
def test_bos_comes_at_most_once_whoever_writes_it(build_tokenizer: Any, adds_bos: bool, template: str | None) -> None:
    tokenizer = build_tokenizer(adds_bos=adds_bos)
    tokenizer.chat_template = template
    ensure_chat_template(tokenizer)
    ids = encode_prompt(tokenizer, ask("Say hi"))
    assert ids.count(BOS) == (0 if template == STRICT and not adds_bos else 1)
    assert BOS not in ids[1:]
    example = encode_example(tokenizer, ask("Say hi"), "hi", 100)
    assert example is not None
    assert example.input_ids[: example.prompt_length] == ids
    assert BOS not in example.input_ids[1:]


@pytest.mark.parametrize(
    ("prompt", "response"),
    [
        ("Question: 2+2\nAnswer: ", "4"),
        ("Question: 2+2\nAnswer:", " 4"),
        ("Name a colour", "\n blue"),
        ("Name a colour", "blue \n"),
        ("café 👋", "naïve 👋"),
    ],
)
@pytest.mark.parametrize("template", [None, TRIMS])
def test_the_border_between_prompt_and_response_is_exact(
    build_tokenizer: Any, prompt: str, response: str, template: str | None
) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    ensure_chat_template(tokenizer)
    example = encode_example(tokenizer, ask(prompt), response, 1000)
    assert example is not None
    assert example.input_ids[: example.prompt_length] == encode_prompt(tokenizer, ask(prompt))
    assert tokenizer.decode(example.input_ids[example.prompt_length : -1]) == response
    assert example.input_ids[-1] == EOS


def test_what_a_template_writes_after_the_answer_is_not_learned(build_tokenizer: Any) -> None:
    tokenizer = build_tokenizer(chat_template=TRIMS)
    assert tokenizer.decode(encode_response(tokenizer, ask("x"), "blue")) == "blue<|endoftext|>"


def test_an_answer_follows_the_generation_prompt_of_a_thinking_template(build_tokenizer: Any) -> None:
    tokenizer = build_tokenizer(chat_template=THINKS)
    example = encode_example(tokenizer, ask("x"), "blue", 100)
    assert example is not None
    assert tokenizer.decode(example.input_ids) == "[user]x[assistant]<think>blue<|endoftext|>"


def test_a_long_prompt_loses_its_left_end_and_keeps_bos(tokenizer: Any) -> None:
    whole = encode_example(tokenizer, ask("the answer is yes, the answer is no"), " blue", 100)
    assert whole is not None
    response = whole.input_ids[whole.prompt_length :]
    cut = encode_example(tokenizer, ask("the answer is yes, the answer is no"), " blue", len(response) + 4)
    prompt = whole.input_ids[: whole.prompt_length]
    assert cut == Encoded([BOS, *prompt[-3:], *response], prompt_length=4)
    assert encode_prompt(tokenizer, ask("the answer is yes, the answer is no"), 4) == [BOS, *prompt[-3:]]


def test_a_prompt_without_bos_is_cut_to_its_last_tokens(build_tokenizer: Any) -> None:
    tokenizer = build_tokenizer(bos_token=None)
    ensure_chat_template(tokenizer)
    ids = encode_prompt(tokenizer, ask("the answer is yes"))
    assert ids[0] == USER
    assert encode_prompt(tokenizer, ask("the answer is yes"), 2) == ids[-2:]


def test_a_response_is_never_cut(tokenizer: Any) -> None:
    response = encode_response(tokenizer, ask("x"), "the small grey fox")
    fits = encode_example(tokenizer, ask("x"), "the small grey fox", len(response) + 2)
    assert fits is not None
    assert fits.input_ids == [BOS, ASSISTANT, *response]
    assert encode_example(tokenizer, ask("x"), "the small grey fox", len(response) + 1) is None


def test_two_answers_to_a_long_prompt_stay_different(tokenizer: Any) -> None:
    prompt = ask("Read: " + " ".join(f"item{number}" for number in range(300)))
    blue, red = (encode_example(tokenizer, prompt, answer, 64) for answer in ("blue", "red"))
    assert blue is not None
    assert red is not None
    assert blue.input_ids != red.input_ids
    assert len(blue.input_ids) == 64


def test_a_conversation_that_the_template_refuses_is_named(build_tokenizer: Any) -> None:
    tokenizer = build_tokenizer(chat_template=STRICT)
    conversation = [{"role": "system", "content": "In French."}, *ask("Hi")]
    with pytest.raises(DataError, match=r"refuses.*user: Hi.*System role not supported"):
        encode_prompt(tokenizer, conversation)


def test_a_system_message_is_never_lost_in_silence(build_tokenizer: Any) -> None:
    tokenizer = build_tokenizer(chat_template=IGNORES_SYSTEM)
    conversation = [{"role": "system", "content": "In French."}, *ask("Hi")]
    with pytest.raises(DataError, match="leaves the system message out"):
        encode_prompt(tokenizer, conversation)


@pytest.mark.parametrize("roles", [True, False])
def test_our_templates_refuse_roles_they_do_not_know(build_tokenizer: Any, roles: bool) -> None:
    tokenizer = build_tokenizer(roles=roles)
    ensure_chat_template(tokenizer)
    with pytest.raises(DataError, match="no such role here: 'critic'"):
        encode_prompt(tokenizer, [{"role": "critic", "content": "5C"}])


@pytest.mark.parametrize(("roles", "written"), [(True, "<|user|>5C<|assistant|>"), (False, "Tool: 5C\nAssistant:")])
def test_our_templates_write_a_tools_turn(build_tokenizer: Any, roles: bool, written: str) -> None:
    tokenizer = build_tokenizer(roles=roles)
    ensure_chat_template(tokenizer)
    messages = [{"role": "tool", "content": "5C"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True).endswith(written)


def test_documents_become_one_stream_with_eos_after_each(tokenizer: Any) -> None:
    one, two = tokenizer("the fox")["input_ids"], tokenizer("blue")["input_ids"]
    assert list(encode_documents(tokenizer, iter(["the fox", "blue"]))) == [[*one, EOS], [*two, EOS]]
    assert list(encode_documents(tokenizer, ["blue"] * 1001)) == [[*two, EOS]] * 1001


def test_long_documents_are_encoded_few_at_a_time(tokenizer: Any) -> None:
    taken: list[int] = []

    def texts() -> Iterator[str]:
        for number in range(5):
            taken.append(number)
            yield "blue " * 120_000  # 600,000 characters: two of them are more than a million

    next(encode_documents(tokenizer, texts()))
    assert taken == [0, 1]


SPELT = "a <|endoftext|> b <|assistant|> c <s> d"


@pytest.mark.parametrize("template", [None, STRICT, TRIMS])
def test_special_tokens_spelt_in_a_prompt_stay_text(build_tokenizer: Any, template: str | None) -> None:
    tokenizer = build_tokenizer(chat_template=template)
    ensure_chat_template(tokenizer)
    plain, spelt = encode_prompt(tokenizer, ask("a")), encode_prompt(tokenizer, ask(SPELT))
    assert [id for id in spelt if id <= ASSISTANT] == [id for id in plain if id <= ASSISTANT]
    assert SPELT in tokenizer.decode(spelt)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_spelt_bos_at_the_start_of_a_prompt_is_no_bos(build_tokenizer: Any, adds_bos: bool) -> None:
    tokenizer = build_tokenizer(adds_bos=adds_bos, chat_template="{{ messages[0].content }}")
    ids = encode_prompt(tokenizer, ask("<s>a"))
    assert ids.count(BOS) == adds_bos
    assert tokenizer.decode(ids[adds_bos:]) == "<s>a"


@pytest.mark.parametrize("roles", [True, False])
def test_special_tokens_spelt_in_a_response_stay_text(build_tokenizer: Any, roles: bool) -> None:
    tokenizer = build_tokenizer(roles=roles)
    ensure_chat_template(tokenizer)
    ids = encode_response(tokenizer, ask("x"), SPELT)
    assert [id for id in ids if id <= (ASSISTANT if roles else BOS)] == [EOS] == ids[-1:]
    assert tokenizer.decode(ids[:-1]).removeprefix(" ") == SPELT


def test_a_role_token_that_only_answers_bring_stays_a_token(build_tokenizer: Any) -> None:
    template = "{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}{% endfor %}"
    tokenizer = build_tokenizer(chat_template=template)
    [x] = tokenizer("x")["input_ids"]
    spelt = tokenizer("<s>", split_special_tokens=True)["input_ids"]
    assert encode_response(tokenizer, ask("x"), "x") == [ASSISTANT, x, EOS]
    assert encode_response(tokenizer, ask("x"), "<s>") == [ASSISTANT, *spelt, EOS]


def test_special_tokens_spelt_in_a_document_stay_text(tokenizer: Any) -> None:
    [ids] = encode_documents(tokenizer, [SPELT])
    assert [id for id in ids if id <= ASSISTANT] == [EOS] == ids[-1:]
    assert tokenizer.decode(ids[:-1]) == SPELT
    assert tokenizer("<s>")["input_ids"] == [BOS]  # only our own calls are changed


@pytest.mark.parametrize("text", ["the fox\n\n  jumps\nover 12\nthe blue\n", "the fox.\n\nblue 12\n\n"])
def test_a_long_document_encoded_line_by_line_has_the_ids_of_the_whole(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    pieces = []
    encode = tokens._text_ids
    monkeypatch.setattr(tokens, "_text_ids", lambda t, text: pieces.append(text) or encode(t, text))
    text *= 80
    [whole] = encode_documents(tokenizer, [text])
    monkeypatch.setattr(tokens, "_LONG", 100)
    assert list(encode_documents(tokenizer, ["a", text, "b"])) == [
        *encode_documents(tokenizer, ["a"]), whole, *encode_documents(tokenizer, ["b"]),
    ]  # fmt: skip
    assert len([piece for piece in pieces if piece != text and len(piece) > 100]) > 10
