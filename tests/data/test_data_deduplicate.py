"""Repeats are found: equal ones, and nearly equal ones."""

import sys

import pytest

from rlhf.data.deduplicate import seen_before
from rlhf.data.errors import SettingsError

WORDS = [f"w{number}" for number in range(200)]


def text_with(num_changed: int) -> str:
    """200 words of which the last ones are others: 196 shingles, as many of them others as words, and 4 on the edge."""
    return " ".join(WORDS[: 200 - num_changed] + [f"x{number}" for number in range(num_changed)])


def test_exact_means_to_the_letter() -> None:
    is_repeat = seen_before("exact")
    assert [is_repeat(text) for text in ("a b", "a  b", "a b", "A b", "A b", "\ud83d")] == [
        False, False, True, False, True, False,
    ]  # fmt: skip


def test_without_a_way_nothing_is_a_repeat() -> None:
    is_repeat = seen_before(None)
    assert not is_repeat("a")
    assert not is_repeat("a")


def test_minhash_finds_what_shares_more_than_four_fifths_of_its_shingles() -> None:
    # 196 shingles each; with 4 words changed 192 are common, 192 / 200 = 0.96; with 60 changed 136 / 256 = 0.53
    for num_changed, expected in ((0, True), (4, True), (60, False), (200, False)):
        is_repeat = seen_before("minhash")
        assert not is_repeat(text_with(0))
        assert is_repeat(text_with(num_changed)) == expected


def test_minhash_reads_words_without_case_and_spacing_and_knows_short_texts() -> None:
    is_repeat = seen_before("minhash")
    assert [is_repeat(text) for text in ("To be", "to\n  BE", "to be or", "", "anna", "anne", "anna")] == [
        False, True, False, False, False, False, True,
    ]  # fmt: skip


def test_a_repeat_is_not_what_later_ones_are_compared_with() -> None:
    is_repeat = seen_before("minhash")
    chain = [is_repeat(text_with(number)) for number in (0, 12, 24, 36, 48)]
    assert chain[:2] == [False, True]
    assert not all(chain[1:])  # 48 words on it is another text, though each step was small


def test_without_rensa_minhash_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(SettingsError, match=r"minhash needs rensa.*pip install 'rlhf-toolkit\[dedup\]', or use exact"):
        seen_before("minhash")
    seen_before("exact")
