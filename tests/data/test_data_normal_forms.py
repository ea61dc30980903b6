"""Prompts that differ in their Unicode normal form alone are warned of, and stay different."""

from typing import Any
from unicodedata import normalize

import pytest
from formats_world import user

from rlhf.data.check import check
from rlhf.data.messages import prompt_key

NFC, NFD = (normalize(form, "Où est le café ?") for form in ("NFC", "NFD"))
KELVIN = "How cold is 3 \u212a?"  # the sign, of which NFC makes the letter K


def warnings(source: Any, kind: str = "demonstrations") -> list[str]:
    found: list[str] = check(source, kind)["warnings"]
    return found


def demonstrations(*prompts: Any) -> list[dict[str, Any]]:
    return [{"prompt": prompt, "response": "A"} for prompt in prompts]


def test_two_forms_of_one_prompt_are_two_prompts() -> None:
    assert NFC != NFD
    assert prompt_key([user(NFC)]) != prompt_key([user(NFD)])


@pytest.mark.parametrize("order", [(NFC, NFD), (NFD, NFC)])
def test_they_are_counted_with_their_first_rows_and_the_cure(write: Any, order: tuple[str, str]) -> None:
    first, second = order
    source = write(*demonstrations("Hi", first, "é", first, second, f" {second}\n"))
    assert check(source, "demonstrations")["prompts"] == 4
    assert warnings(source) == [
        "1 prompt differs from another in Unicode normal form alone (rows 2 and 5): one may be trained on while the "
        "other is held out; write all texts in one form, as unicodedata.normalize('NFC', text) does in Python"
    ]
    assert warnings(write(*demonstrations("Hi", first, second)), "prompts")[0].startswith("1 prompt differs from")


def test_of_many_the_first_few_are_named(write: Any) -> None:
    rows = [f"{number} {text}" for number in range(7) for text in (NFC, NFD)]
    [warning] = warnings(write(*demonstrations(*rows)))
    assert warning.startswith("7 prompts differ from another in Unicode normal form alone (rows 1 and 2, 3 and 4, ")
    assert "7 and 8, 9 and 10, …): one may" in warning


def test_neither_form_need_be_nfc_and_each_turn_counts(write: Any) -> None:
    half = NFD.replace("u\u0300", "ù")  # the one accent composed, the other not
    assert [warning[:16] for warning in warnings(write(*demonstrations(half, NFD)))] == ["1 prompt differs"]
    assert len(warnings(write(*demonstrations(KELVIN, KELVIN.replace("\u212a", "K"))))) == 1
    turns = [[user(NFC), {"role": "assistant", "content": text}, user("Why?")] for text in (NFC, NFD)]
    assert len(warnings(write(*demonstrations(*turns)))) == 1


def test_what_looks_alike_but_is_not_the_same_text_is_no_such_pair(write: Any) -> None:
    assert warnings(write(*demonstrations(NFC, "Ou est le cafe ?", NFD.upper(), "ﬁne", "fine"))) == []
    assert warnings(write(*demonstrations(NFD, NFD, f"\u2001{NFD}"))) == []  # outer blanks, however they are written
    assert warnings(write(*demonstrations(f"\u2001{NFC}", NFC))) == []


def test_prompts_of_one_row_may_be_such_a_pair_too(write: Any) -> None:
    row = {"instruction": "Say:", "instances": [{"input": text, "output": "A"} for text in (NFC, NFD)]}
    assert "(rows 2 and 2)" in warnings(write({"prompt": "Hi", "response": "A"}, row))[-1]
