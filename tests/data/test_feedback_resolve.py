"""Several raters' rankings become one."""

import sys
from math import log

import pytest
from feedback_world import judged, vote

from rlhf.data.errors import SettingsError
from rlhf.data.feedback import resolve as module
from rlhf.data.feedback.resolve import RULES, Rule, places, resolve, votes_of


@pytest.mark.parametrize("rule", RULES)
def test_one_rater_is_taken_at_their_word(rule: Rule) -> None:
    found = resolve([vote("anna", 2, 1, 2, 3)], rule)
    assert (found.ranks, found.disagreed) == ([2, 1, 2, 3], False)


@pytest.mark.parametrize("rule", RULES)
def test_what_raters_are_split_about_is_tied(rule: Rule) -> None:
    found = resolve([vote("anna", 1, 2, 3), vote("bob", 2, 1, 3)], rule)
    assert (found.ranks, found.disagreed) == ([1, 1, 2], True)


def test_the_majority_of_each_pair_decides() -> None:
    # a over b 2:1, a over c 2:1, b over c 2:1
    votes = [vote("anna", 1, 2, 3), vote("bob", 1, 3, 2), vote("cleo", 3, 1, 2)]
    assert resolve(votes, "majority").ranks == [1, 2, 3]


def test_one_rater_far_from_the_others_moves_the_mean_but_not_the_majority() -> None:
    votes = [vote("anna", 2, 1, 3), vote("bob", 2, 1, 3), vote("cleo", 1, 3, 2)]
    assert resolve(votes, "majority").ranks == [2, 1, 3]
    assert resolve(votes, "mean_rank").ranks == [1, 1, 2]  # 5, 5 and 8 thirds


def test_ties_vote_too() -> None:
    one, tied = vote("anna", 1, 2), vote("bob", 1, 1)
    assert resolve([one, tied], "majority").ranks == [1, 1]  # one says better, one says equal
    assert resolve([one, one, tied], "majority").ranks == [1, 2]
    assert resolve([one, tied, tied], "majority").ranks == [1, 1]
    assert resolve([one, tied, tied], "mean_rank").ranks == [1, 2]  # places 4 and 5 thirds


def test_answers_that_win_in_a_circle_are_tied_and_the_others_keep_their_place() -> None:
    circle = [(1, 2, 3), (3, 1, 2), (2, 3, 1)]
    votes = [vote(name, a + 1, b + 1, c + 1, 1, 5) for name, (a, b, c) in zip("xyz", circle, strict=True)]
    found = resolve(votes, "majority")
    assert (found.ranks, found.circle) == ([2, 2, 2, 1, 3], True)
    assert not resolve(votes[:2], "majority").circle


def test_a_rank_is_one_more_than_the_longest_chain_of_wins_above() -> None:
    # a over b 3:1 and b over c 3:1; a and c are split 2:2, but b tells them apart
    votes = [vote("anna", 1, 2, 3), vote("bob", 1, 2, 3), vote("cleo", 3, 1, 2), vote("dan", 2, 3, 1)]
    assert resolve(votes, "majority").ranks == [1, 2, 3]


def test_tied_answers_share_the_mean_of_their_places() -> None:
    assert places([1, 1, 2, 3, 3, 3]) == [1.5, 1.5, 3, 5, 5, 5]


def test_bradley_terry_tells_log_odds_of_a_pair_with_one_imaginary_tie() -> None:
    # two wins, one loss, and the tie as half of each: 2.5 to 1.5
    found = resolve([vote("anna", 1, 2), vote("bob", 1, 2), vote("cleo", 2, 1)], "bradley_terry")
    assert found.strengths is not None
    assert found.strengths[0] - found.strengths[1] == pytest.approx(log(2.5 / 1.5), abs=1e-3)
    unanimous = resolve([vote("anna", 1, 2)] * 3, "bradley_terry").strengths
    assert unanimous is not None
    assert unanimous[0] - unanimous[1] == pytest.approx(log(3.5 / 0.5), abs=1e-3)


def test_without_evalica_bradley_terry_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "evalica", None)
    module._bradley_terry.cache_clear()
    with pytest.raises(SettingsError, match=r"needs evalica.*pip install 'rlhf-toolkit\[feedback\]', or use mean_rank"):
        resolve([vote("anna", 1, 2)], "bradley_terry")


def test_the_mean_strength_is_spread_over_the_ranks() -> None:
    votes = [vote("anna", 1, 2, 3, strength=7), vote("bob", 1, 2, 3, strength=3), vote("cleo", 1, 2, 3)]
    assert resolve(votes, "majority").strengths == [5.0, 2.5, 0.0]
    assert resolve([vote("anna", 1, 1, strength=7)], "majority").strengths is None
    assert resolve([vote("cleo", 1, 2)], "majority").strengths is None


def test_scores_are_kept_of_one_rater_alone() -> None:
    one = vote("rm", 1, 2, kind="judge", scores=[0.5, -2.0])
    assert resolve([one], "majority").strengths == [0.5, -2.0]
    assert resolve([one, one], "majority").strengths is None


def test_judges_count_where_no_person_has_ranked() -> None:
    anna, rm = vote("anna", 1, 2), vote("rm", 2, 1, kind="judge")
    both, alone = judged(anna, rm), judged(rm)
    assert votes_of(both, "people-first") == [anna]
    assert votes_of(alone, "people-first") == [rm]
    assert votes_of(alone, "people") == []
    assert votes_of(both, "judges") == [rm]
    assert votes_of(both, "all") == [anna, rm]


@pytest.mark.parametrize("rule", RULES)
def test_twenty_answers_are_no_harder_than_four(rule: Rule) -> None:
    votes = [vote(name, *range(1, 21)) for name in ("anna", "bob")]
    assert resolve(votes, rule).ranks == list(range(1, 21))
