"""Who gets which prompt of the feedback store to rate, and in what order its answers."""

from pathlib import Path

import pytest
from feedback_world import asked, new, rank

from rlhf.data.feedback import assign
from rlhf.data.feedback.store import Store


def test_what_all_must_rate_comes_first_then_what_others_have_begun(store: Store) -> None:
    (new_, _), (begun, its), (all_, _) = (asked(store, q, "a", "b", overlap=q == "all") for q in ("1", "2", "all"))
    store.add_prompt("without answers")
    asked(store, "with one", "a")
    newer, _ = asked(store, "newer", "a", "b", round=2)
    anna, bob = map(store.add_rater, ("anna", "bob"))
    rank(store, begun, anna, its, [1, 2])
    given = []
    while (task := store.next_prompt(bob, target=2)) is not None:
        given.append(task.prompt_id)
        store.skip(new(), task.prompt_id, bob)
    assert given == [newer, all_, begun, new_]
    assert store.next_prompt(store.add_rater("cleo"), target=1).prompt_id == newer  # type: ignore[union-attr]


def test_raters_who_stop_halfway_have_rated_the_same_prompts(store: Store) -> None:
    for number in range(6):
        asked(store, str(number), "a", "b", overlap=number == 5)

    def rated(name: str, number: int, target: int) -> list[int]:
        rater, done = store.add_rater(name), []
        for _ in range(number):
            task = store.next_prompt(rater, target=target)
            assert task is not None
            rank(store, task.prompt_id, rater, [answer.id for answer in task.answers], [1, 2])
            done.append(task.prompt_id)
        return done

    assert rated("anna", 3, 2) == rated("bob", 3, 2) == [6, 1, 2]
    assert rated("cleo", 3, 3) == [6, 1, 2]  # for a third rating, what has two comes before what has none


def test_a_prompt_is_kept_from_others_only_where_those_who_have_it_in_hand_make_up_its_ratings(store: Store) -> None:
    asked(store, "q", "a", "b")
    anna, bob, cleo = map(store.add_rater, ("anna", "bob", "cleo"))
    judge = store.add_rater("rm", "judge")
    assert store.next_prompt(judge, target=2) is not None  # whose ratings are counted apart
    assert store.next_prompt(anna, target=2) is not None
    task = store.next_prompt(bob, target=2)
    assert task is not None
    assert store.next_prompt(cleo, target=2) is None
    rank(store, task.prompt_id, bob, [answer.id for answer in task.answers], [1, 2])
    assert store.next_prompt(cleo, target=2) is None  # one rating, and one in anna's hands
    assert store.next_prompt(cleo, target=3) is not None


def test_two_raters_at_once_get_different_prompts_until_one_has_gone(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for question in ("1", "2"):
        asked(store, question, "a", "b")
    anna, bob, cleo = map(store.add_rater, ("anna", "bob", "cleo"))
    now = [1000.0]
    monkeypatch.setattr(assign.time, "time", lambda: now[0])
    assert [store.next_prompt(rater).prompt_id for rater in (anna, bob, anna)] == [1, 2, 1]  # type: ignore[union-attr]
    assert store.next_prompt(cleo) is None
    now[0] += assign.LEASE_SECONDS - 1
    assert store.next_prompt(cleo) is None
    now[0] += 2
    assert store.next_prompt(cleo).prompt_id == 1  # type: ignore[union-attr]
    assert store.next_prompt(anna).prompt_id == 2  # type: ignore[union-attr]
    store.rank(new(), 1, anna, {1: 1, 2: 2})  # late, but kept
    assert store.progress().num_rated == 1


def test_answers_come_in_an_order_of_each_raters_own_that_stays(store: Store, tmp_path: Path) -> None:
    asked(store, "q", *"abcdef", overlap=True)
    raters = [store.add_rater(f"rater {number}") for number in range(40)]
    orders = [[answer.text for answer in store.next_prompt(rater).answers] for rater in raters]  # type: ignore[union-attr]
    assert all(sorted(order) == list("abcdef") for order in orders)
    assert len({tuple(order) for order in orders}) > 30
    firsts = [order[0] for order in orders]
    assert max(map(firsts.count, "abcdef")) < 20
    with Store.open(tmp_path / "f.sqlite") as again:
        assert [answer.text for answer in again.next_prompt(raters[0]).answers] == orders[0]  # type: ignore[union-attr]


def test_judges_do_not_use_up_what_people_shall_rate(store: Store) -> None:
    prompt, ids = asked(store, "q", "a", "b")
    judge, anna = store.add_rater("rm", "judge"), store.add_rater("anna")
    [task] = store.tasks(judge)
    rank(store, task.prompt_id, judge, ids, [1, 2])
    assert list(store.tasks(judge)) == []
    assert store.next_prompt(store.add_rater("api", "endpoint"), target=1) is None
    assert store.next_prompt(anna).prompt_id == prompt  # type: ignore[union-attr]
    found = store.progress()
    assert (found.num_rated, found.num_target, found.num_judged) == (1, 0, 1)
