"""What raters do in the feedback store: rank, skip, flag and undo, round by round."""

from typing import Any

import pytest
from feedback_world import asked, new, one, rank

from rlhf.data.errors import DataError
from rlhf.data.feedback import reading
from rlhf.data.feedback.records import Answer
from rlhf.data.feedback.store import Store


def test_a_ranking_sent_twice_is_stored_once(store: Store) -> None:
    prompt, anna, ids = one(store, "q")
    request = new()
    act = store.rank(request, prompt, anna, {ids[0]: 1, ids[1]: 2}, seconds=3.5, shown=ids[::-1], strength=7, note="n")
    assert store.rank(request.upper(), prompt, anna, {ids[0]: 1, ids[1]: 2}) == act
    assert store.has_act(request)
    with pytest.raises(DataError, match="another act has it"):
        store.skip(request, prompt, anna)
    [found] = store.rankings()
    [vote] = found.votes
    assert (vote.ranks, vote.seconds, vote.shown, vote.strength, vote.note) == ([1, 2], 3.5, [1, 0], 7, "n")


def test_the_newest_ranking_of_a_rater_counts_and_gaps_in_ranks_are_closed(store: Store) -> None:
    prompt, ids = asked(store, "q", "a", "b", "c")
    anna, bob = map(store.add_rater, ("anna", "bob"))
    rank(store, prompt, anna, ids, [1, 2, 3])
    rank(store, prompt, bob, ids, [1, 1, 1], all_bad=True)
    rank(store, prompt, anna, ids, [9, 4, 4], scores={ids[0]: -1.5, ids[1]: 0, ids[2]: 0})
    [found] = store.rankings()
    assert [(v.rater.name, v.ranks, v.all_bad, v.scores) for v in found.votes] == [
        ("anna", [2, 1, 1], False, [-1.5, 0, 0]),
        ("bob", [1, 1, 1], True, None),
    ]
    assert store.progress(target=2).num_target == 1
    assert store.progress(target=3).num_target == 0


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"ranks": {1: 1}}, r"covers its two or more answers \[1, 2\]; found \[1\]"),
        ({"ranks": {1: 1, 2: 1, 3: 2}}, r"found \[1, 2, 3\]"),
        ({"ranks": {}}, "ranks are whole numbers from 1"),
        ({"ranks": {1: 0, 2: 1}}, "ranks are whole numbers from 1"),
        ({"ranks": {1: 1.5, 2: 1}}, "ranks are whole numbers from 1"),
        ({"ranks": {1: True, 2: 1}}, "ranks are whole numbers from 1"),
        ({"request_id": "1"}, "request_id is '1'; a UUID is wanted"),
        ({"rater_id": 9}, "no rater 9"),
        ({"prompt_id": 2**70}, "no prompt 1180591620717411303424"),
        ({"strength": 8}, "strength is 8; it goes from 1 to 7"),
        ({"note": "x" * 10_001}, "the note has 10001 characters; at most 10000"),
        ({"note": "\ud800"}, "half a character"),
        ({"seconds": float("nan")}, "seconds is nan"),
        ({"seconds": -1}, "seconds is -1"),
        ({"shown": [1]}, r"shown holds each ranked answer once; found \[1\]"),
        ({"scores": {1: 1.0, 2: float("inf")}}, "scores are finite numbers"),
        ({"scores": {1: 10**400, 2: 1}}, "scores are finite numbers"),
    ],
)
def test_a_ranking_that_cannot_be_is_refused(store: Store, change: dict[str, Any], error: str) -> None:
    prompt, anna, ids = one(store, "q")
    asked(store, "other", "c", "d")
    words = {"request_id": new(), "prompt_id": prompt, "rater_id": anna, "ranks": {ids[0]: 1, ids[1]: 2}} | change
    with pytest.raises(DataError, match=error):
        store.rank(**words)
    assert store.progress().num_rated == 0


def test_undo_takes_back_the_last_act_and_gives_its_prompt_again(store: Store) -> None:
    one, ids = asked(store, "1", "a", "b")
    two, _ = asked(store, "2", "a", "b")
    anna = store.add_rater("anna")
    act = rank(store, one, anna, ids, [2, 1])
    flagged = store.flag(new(), two, anna, "it is broken", 2.0)
    task = store.undo(anna, flagged)
    assert task is not None
    assert (task.prompt_id, task.ranks) == (two, {})
    assert store.undo(anna, flagged) == task  # the same request again takes nothing more back
    assert store.last_act(anna) == act
    assert store.undo(anna) == store.next_prompt(anna)
    assert store.next_prompt(anna).ranks == {ids[0]: 2, ids[1]: 1}  # type: ignore[union-attr]
    assert store.undo(anna) is None
    assert store.last_act(anna) is None
    assert store.progress().num_rated == 0
    assert rank(store, one, anna, ids, [1, 2]) > act
    assert [vote.ranks for found in store.rankings() for vote in found.votes] == [[1, 2]]


def test_skips_and_flags_take_a_prompt_off_one_raters_list(store: Store) -> None:
    one, _ = asked(store, "1", "a", "b")
    two, _ = asked(store, "2", "a", "b")
    anna, bob = map(store.add_rater, ("anna", "bob"))
    store.skip(new(), one, anna, 1.0)
    store.flag(new(), two, anna, "not a question", 1.0)
    with pytest.raises(DataError, match="the reason of a flag is empty"):
        store.flag(new(), two, anna, "  ")
    assert store.next_prompt(anna) is None
    assert store.next_prompt(bob) is not None
    [own] = store.progress(anna).raters
    assert (own.num_rated, own.num_skipped, own.num_flagged, own.num_left) == (0, 1, 1, 0)
    assert [(found.num_skips, found.flags) for found in store.rankings()] == [(1, []), (0, ["not a question"])]


def test_progress_counts_what_is_left_for_a_rater_and_the_median_time(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [asked(store, str(number), "a", "b", overlap=number == 0) for number in range(4)]
    asked(store, "one answer", "a")
    anna, bob = map(store.add_rater, ("anna", "bob"))
    for (prompt, ids), seconds in zip(made[:3], (1.0, 9.0, 2.0), strict=True):
        rank(store, prompt, anna, ids, [1, 2], seconds=seconds)
    found = store.progress()
    assert (found.num_prompts, found.num_rated, found.num_target, found.seconds) == (4, 3, 3, 2.0)
    assert [(own.num_rated, own.num_left) for own in found.raters] == [(3, 1), (0, 2)]  # bob: the overlap and the last
    assert [own.num_left for own in store.progress(target=2).raters] == [1, 4]
    assert store.progress(bob).seconds is None
    monkeypatch.setattr(reading, "RECENT", 2)
    assert store.progress(anna).seconds == 5.5  # of the last two


def test_undo_leaves_earlier_rounds_whose_answers_are_not_shown_any_more(store: Store) -> None:
    prompt, anna, ids = one(store, "q")
    rank(store, prompt, anna, ids, [1, 2])
    asked(store, "q", "a", "d", round=2)
    assert store.last_act(anna) is None
    assert store.undo(anna) is None
    assert [(found.round, found.votes[0].ranks) for found in store.rankings()] == [(1, [1, 2])]


def test_answers_of_a_new_round_open_the_prompt_again_and_the_old_ranking_stays(store: Store) -> None:
    prompt, anna, ids = one(store, "q")
    rank(store, prompt, anna, ids, [1, 2])
    with pytest.raises(DataError, match="prompt 1 was rated in round 1; give new answers a new round"):
        store.add_answers(prompt, [Answer("c", "m")])
    assert store.next_prompt(anna) is None
    _, newer = asked(store, "q", "a", "d", round=2)
    task = store.next_prompt(anna)
    assert task is not None
    assert (task.round, sorted(answer.text for answer in task.answers)) == (2, ["a", "d"])
    assert store.progress().num_rated == 0
    rank(store, prompt, anna, newer, [2, 1])
    rank(store, prompt, anna, ids, [1, 1])  # a late one of the first round
    assert [(found.round, found.votes[0].ranks) for found in store.rankings()] == [(1, [1, 1]), (2, [2, 1])]
    assert store.progress().num_rated == 1


def test_a_skip_is_of_the_round_that_the_rater_saw(store: Store) -> None:
    prompt, anna, _ = one(store, "q")
    asked(store, "q", "a", "d", round=2)
    store.skip(new(), prompt, anna, round=1)
    assert store.next_prompt(anna).round == 2  # type: ignore[union-attr]
    store.flag(new(), prompt, anna, "no question")
    assert [(found.round, found.num_skips, found.flags) for found in store.rankings()] == [
        (1, 1, []),
        (2, 0, ["no question"]),
    ]
    for round_ in (0, 3, True):
        with pytest.raises(DataError, match=f"prompt 1: no round {round_}; the newest is 2"):
            store.skip(new(), prompt, anna, round=round_)


def test_gold_ranks_are_found_by_the_answers_texts(store: Store) -> None:
    prompt, ids = asked(store, "q", "bad", " good\n", "other", gold_ranks={"good": 1, "bad": 2})
    rank(store, prompt, store.add_rater("anna"), ids, [1, 2, 3])
    assert [found.gold for found in store.rankings()] == [[2, 1, None]]
    with pytest.raises(DataError, match="gold_ranks: two answers or more"):
        store.add_prompt("q", gold_ranks={"good": 1})
