"""Public bug reports and real files of the field, read where they lie beside the checkout."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlhf.data.check import check
from rlhf.data.collate import labels, pad_left, pad_right
from rlhf.data.errors import DataError, SettingsError
from rlhf.data.rows import prompt_text, read_demonstrations, read_prompts, read_rankings, read_text
from rlhf.data.sources import Source
from rlhf.data.tokens import Encoded, encode_documents, encode_example, encode_prompt, ensure_chat_template, ensure_pad
from rlhf.pipeline.recipe import load_recipe
from rlhf.stages.sft.config import SFTSettings

SHARED = Path(__file__).resolve().parents[3] / "shared"
CASES, DATA = SHARED / "cases", SHARED / "data"
HH = "preferences/hh_harmless_base_test.jsonl.gz"
TRL = "preferences/trl_formats"
EOS = 0

pytestmark = pytest.mark.skipif(not (CASES.is_dir() and DATA.is_dir()), reason="no shared cases and data here")


def case(name: str) -> Source:
    return Source(path=str(CASES / name))


def data(name: str, **settings: Any) -> Source:
    return Source(path=str(DATA / name), **settings)


def dropped(source: Source, kind: str) -> dict[str, list[int]]:
    found = check(source, kind)
    assert found["kept"] + sum(drop["count"] for drop in found["dropped"].values()) == found["rows"]
    return {reason: drop["rows"] for reason, drop in found["dropped"].items()}


def test_a03_a_prompt_longer_than_the_limit_leaves_the_whole_answer_to_learn(tokenizer: Any) -> None:
    rows = read_demonstrations(case("A03_sft_prompt_longer_than_max.jsonl")).rows
    encoded = [encode_example(tokenizer, row.prompt, row.response, 64) for row in rows]
    for row, example in zip(rows, encoded, strict=True):
        assert example is not None
        learned = [id for id in labels([example])[0].tolist() if id != -100]
        assert len(example.input_ids) <= 64
        assert tokenizer.decode(learned) == row.response + "<|endoftext|>"


def test_a04_labels_are_exactly_the_answer_and_the_prompt_is_that_of_ppo(tokenizer: Any) -> None:
    source = case("A04_trailing_space.jsonl")
    rows = read_demonstrations(source).rows
    asked = dict.fromkeys(prompt_text(prompt.messages).strip() for prompt in read_prompts(source).rows)
    assert list(asked) == ["Question: 2+2\nAnswer:", "Name a colour"]  # the space alone makes no other prompt
    for row, response in zip(rows, ["4", " 4", "\n blue"], strict=True):
        example = encode_example(tokenizer, row.prompt, row.response, 1000)
        assert example is not None
        assert example.input_ids[: example.prompt_length] == encode_prompt(tokenizer, row.prompt)
        assert tokenizer.decode(example.input_ids[example.prompt_length :]) == response + "<|endoftext|>"


def test_a05_a_long_pair_is_still_two_answers(tokenizer: Any) -> None:
    for row in read_rankings(case("A05_pair_identical_after_truncation.jsonl")).rows:
        first, second = (encode_example(tokenizer, row.prompt, response, 64) for response in row.responses)
        assert first is not None
        assert second is not None
        assert first.input_ids != second.input_ids


def test_a06_identical_answers_are_counted_and_never_paired() -> None:
    assert dropped(case("A06_identical_pair.jsonl"), "preferences") == {"identical answers": [1, 2]}
    assert check(case("A06_identical_pair.jsonl"), "preferences")["pairs"] == 1


def test_a06_a_tie_is_counted_and_makes_no_pair() -> None:
    assert dropped(case("A06_ties.jsonl"), "preferences") == {"all answers tied": [1]}
    (row,) = read_rankings(case("A06_ties.jsonl"), max_dropped=0.5).rows
    assert (row.responses, row.ranks) == (["Nile", "Rock"], [1, 2])


def test_a07_no_prompt_is_guessed_from_a_common_beginning() -> None:
    assert dropped(case("A07_implicit_prompt_edges.jsonl"), "preferences") == {
        "chosen is text without a prompt": [1, 2, 3, 4]
    }
    conversation = case("A07_implicit_prompt_conversation.jsonl")
    assert dropped(conversation, "preferences") == {"the last turn of rejected is not the assistant's": [1]}
    [row] = read_rankings(conversation, max_dropped=0.5).rows
    assert (prompt_text(row.prompt), row.responses) == ("Q", ["yes", "no"])


def test_a08_a_transcript_is_split_at_its_last_answer() -> None:
    source = case("A08_hh_multiturn.jsonl")
    assert dropped(source, "preferences") == {"empty response": [2]}
    [row] = read_rankings(source, max_dropped=0.5).rows
    assert prompt_text(row.prompt).endswith("Human: Another?\n\nAssistant:")
    assert row.responses == [" Wren.", " No."]


def test_a08_real_transcripts_lose_no_text() -> None:
    assert dropped(data(HH), "preferences") == {
        "empty response": [87, 517, 926, 1104],
        "chosen and rejected answer different prompts": [1255, 1689, 1951, 1953, 2037],
    }
    found = check(data(HH), "preferences")
    assert (found["rows"], found["kept"], found["pairs"], found["prompts"]) == (2312, 2303, 2303, 2301)
    with gzip.open(DATA / HH, "rt", encoding="utf-8") as lines:
        given = [(row["chosen"], row["rejected"]) for row in map(json.loads, lines)]
    for row in read_rankings(data(HH), max_dropped=0.01).rows:
        text = prompt_text(row.prompt)
        assert (text + row.responses[0], text + row.responses[1]) in given
        assert text.endswith("\n\nAssistant:")
        assert all("\n\nAssistant:" not in response for response in row.responses)


def test_a09_each_wrong_type_is_named_and_the_good_row_loads() -> None:
    source = case("A09_mixed_types.json")
    assert dropped(source, "preferences") == {
        "rejected is true or false, not text": [1],
        "chosen is a number, not text": [2],
        "chosen is an object, not text": [3],
    }
    assert [row.responses for row in read_rankings(source, max_dropped=0.75).rows] == [["hi", "no"]]
    with pytest.raises(DataError, match=r"A09_mixed_types\.json row 1: rejected is true or false"):
        read_rankings(source)


def test_a10_marks_and_carriage_returns_are_gone_and_emoji_stay() -> None:
    table = read_rankings(case("A10_bom_crlf.csv")).rows
    assert [(prompt_text(row.prompt), row.responses) for row in table] == [
        ('Say "hi"\ntwice', ["hi hi 👋", "no"]),
        ("café?", ["Oui", "Non"]),
    ]
    lines = read_rankings(case("A10_bom.jsonl")).rows
    assert [(prompt_text(row.prompt), row.responses) for row in lines] == [
        ("Say hi", ["hi", "no"]),
        ("Say bye", ["bye", "no"]),
    ]


STRICT = """{%- for message in messages -%}
{%- if message.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif -%}
{{ '[' + message.role + ']' + message.content }}
{%- endfor -%}{% if add_generation_prompt %}[assistant]{% endif -%}"""
IGNORES_SYSTEM = """{%- for message in messages if message.role != 'system' -%}
{{ '[' + message.role + ']' + message.content }}
{%- endfor -%}{% if add_generation_prompt %}[assistant]{% endif -%}"""


def test_a11_conversations_that_do_not_end_with_an_answer_are_no_demonstrations() -> None:
    assert dropped(case("A11_roles.jsonl"), "demonstrations") == {
        "the last turn of messages is not the assistant's": [4],
    }
    called = read_demonstrations(case("A11_roles.jsonl"), max_dropped=0.4).rows[-1]
    assert prompt_text(called.prompt) == (
        'user: weather?\nassistant: {"name": "get", "arguments": {"c": "Oslo"}}\ntool: 5C'
    )
    assert called.response == "5 C"


@pytest.mark.parametrize(
    ("template", "refused"),
    [
        (STRICT, ["System role not supported", *["Roles must alternate"] * 3]),
        (IGNORES_SYSTEM, ["leaves the system message out", "", "", ""]),
        (None, ["", "", "", ""]),
    ],
)
def test_a11_a_template_refuses_by_name_or_keeps_every_word(
    build_tokenizer: Any, template: str | None, refused: list[str]
) -> None:
    tokenizer = build_tokenizer(chat_template=template)
    ensure_chat_template(tokenizer)
    rows = read_demonstrations(case("A11_roles.jsonl"), max_dropped=0.4).rows
    for row, reason in zip(rows, refused, strict=True):
        if reason:
            with pytest.raises(DataError, match=reason):
                encode_example(tokenizer, row.prompt, row.response, 1000)
        else:
            example = encode_example(tokenizer, row.prompt, row.response, 1000)
            assert example is not None
            text = tokenizer.decode(example.input_ids)
            assert all(message["content"] in text for message in row.prompt)


def test_a12_a_number_that_yaml_takes_for_text_is_one() -> None:
    section = yaml.safe_load((CASES / "A12_lr_string.yaml").read_text(encoding="utf-8"))["sft"]
    assert section.pop("learning_rate") == "1e-5"
    with pytest.raises(SettingsError, match="sft: no setting 'max_steps'"):
        SFTSettings.load({"data": "x.jsonl", **section}, "sft")
    assert SFTSettings.load({"data": "x.jsonl", "learning_rate": "1e-5"}, "sft").learning_rate == 1e-5


def test_a13_all_unknown_keys_are_told_at_once_with_the_nearest_names() -> None:
    with pytest.raises(SettingsError) as told:
        load_recipe(str(CASES / "A13_unknown_key.yaml"))
    assert "sft: no setting 'learning_rte'; did you mean 'learning_rate'?" in str(told.value)
    assert "no section or setting 'rewrd'; did you mean 'reward'?" in str(told.value)


def test_a21_and_a27_small_sets_are_read_whole() -> None:
    assert [row.messages[-1]["content"] for row in read_prompts(case("A21_five_prompts.jsonl")).rows] == [
        f"Say {letter}" for letter in "abcde"
    ]
    assert check(case("A27_seven_pairs.jsonl"), "preferences")["pairs"] == 7


def test_a23_pad_is_eos_and_masks_go_by_length(build_tokenizer: Any) -> None:
    tokenizer = build_tokenizer()
    ensure_pad(tokenizer)
    answers = [[5, EOS], [7, 8, 9, EOS]]  # A22's eos is real wherever it stands, and what follows is padding
    for pad in (pad_left, pad_right):
        ids, mask = pad(answers, tokenizer.pad_token_id)
        assert [row[keep].tolist() for row, keep in zip(ids, mask, strict=True)] == answers
    assert labels([Encoded([1, *answer], 1) for answer in answers])[0].tolist() == [-100, 5, EOS, -100, -100]


def test_a29_bad_rows_are_summed_up_and_nothing_left_is_refused() -> None:
    with pytest.raises(DataError, match=r"kept 0 of 5 rows; 2 × empty prompt \(rows 1, 5\); 3 × empty response"):
        read_demonstrations(case("A29_all_rows_bad.jsonl"), max_dropped=1.0)
    with pytest.raises(DataError, match="it is empty"):
        read_demonstrations(case("A29_empty.jsonl"))
    with pytest.raises(DataError, match=r"kept 2 of 4 rows; 2 × empty response \(rows 2, 3\).*max_dropped=0\.5"):
        read_demonstrations(case("A29_some_rows_bad.jsonl"))
    assert len(read_demonstrations(case("A29_some_rows_bad.jsonl"), max_dropped=0.5).rows) == 2
    with pytest.raises(DataError, match=r"row 2: broken JSON"):
        read_demonstrations(case("A29_truncated_last_line.jsonl"))
    assert len(read_demonstrations(case("A29_truncated_last_line.jsonl"), max_dropped=0.5).rows) == 1


@pytest.mark.parametrize(
    ("name", "kind", "kept"),
    [
        ("text/c4_demo.jsonl", "text", 300),
        ("text/names.txt", "text", 1),
        ("text/tinyshakespeare.txt", "text", 1),
        ("prompts/arena_hard_v01_questions.jsonl", "prompts", 500),
        (f"{TRL}/standard_language_modeling.jsonl", "text", 19),
        (f"{TRL}/standard_prompt_only.jsonl", "prompts", 19),
        (f"{TRL}/conversational_prompt_only.jsonl", "prompts", 19),
        (f"{TRL}/standard_prompt_completion.jsonl", "demonstrations", 19),
        (f"{TRL}/conversational_prompt_completion.jsonl", "demonstrations", 19),
        (f"{TRL}/conversational_language_modeling.jsonl", "demonstrations", 19),
        (f"{TRL}/standard_preference.jsonl", "preferences", 19),
        (f"{TRL}/conversational_preference.jsonl", "preferences", 19),
        (f"{TRL}/conversational_implicit_prompt_preference.jsonl", "preferences", 19),
        ("preferences/ultrafeedback_binarized.jsonl", "demonstrations", 3),
    ],
)
def test_files_of_the_field_are_read_whole(name: str, kind: str, kept: int) -> None:
    found = check(data(name), kind)
    assert (found["rows"], found["kept"], found["warnings"]) == (kept, kept, [])


def test_columns_of_other_names_are_read_through_a_map() -> None:
    names = {"prompt": "question", "response": "answer"}
    rows = read_demonstrations(data("pairs/torchtitan_question_answer.json", map=names)).rows
    assert len(rows) == 10
    assert (prompt_text(rows[0].prompt), rows[0].response) == ("What is 2 + 3?", "2 + 3 = 5. #### 5")
    names = {"prompt": "question", "chosen": "response_j", "rejected": "response_k"}
    assert len(read_rankings(data("preferences/stack_exchange_paired_tiny.json", map=names)).rows) == 25
    names = {"prompt": "input", "response": "output"}
    assert len(read_demonstrations(data("pairs/longform_fixture.json", map=names)).rows) == 17


def test_labelled_answers_are_no_pairs() -> None:
    with pytest.raises(DataError, match="one answer that was judged good or bad, with none to compare; rankings"):
        read_rankings(data("preferences/lf_kto_en_demo.json"))


def test_real_documents_survive_tokenising(tokenizer: Any) -> None:
    texts = read_text(data("text/c4_demo.jsonl")).rows
    documents = list(encode_documents(tokenizer, texts))
    assert [(ids.count(EOS), ids[-1]) for ids in documents] == [(1, EOS)] * len(texts)
    assert [tokenizer.decode(ids[:-1]) for ids in documents] == texts
