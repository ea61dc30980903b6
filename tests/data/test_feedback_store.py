"""The feedback store: the prompts, answers and raters that go into it."""

from pathlib import Path

import pytest
from feedback_world import asked, one, rank

from rlhf.data.errors import DataError
from rlhf.data.feedback.records import Answer
from rlhf.data.feedback.store import Store


def test_the_same_messages_are_the_same_prompt(store: Store) -> None:
    first = store.add_prompt("Why?", meta={"topic": "why"})
    assert store.add_prompt([{"role": "user", "content": " Why?\n"}], overlap=True) == first
    assert store.add_prompt("Why not?") != first
    rank(store, *one(store, "Why?"), [1, 2])
    [found] = store.rankings()
    assert (found.meta, found.overlap) == ({"topic": "why"}, True)  # what was not given again stayed


def test_prompts_that_do_not_leave_the_word_to_the_assistant_are_refused(store: Store) -> None:
    with pytest.raises(DataError, match="the last turn of the prompt is not the user's"):
        store.add_prompt([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])
    with pytest.raises(DataError, match="empty prompt"):
        store.add_prompt("  ")


def test_equal_answers_are_refused_and_then_none_is_added(store: Store) -> None:
    prompt, _ = asked(store, "q", "yes", "no")
    with pytest.raises(DataError, match="prompt 1, round 1: the answer 'yes' is there already"):
        store.add_answers(prompt, [Answer("maybe", "m"), Answer(" yes\n", "m")])
    assert [answer.text for answer in store.answers(prompt)] == ["yes", "no"]
    with pytest.raises(DataError, match="no prompt 7"):
        store.add_answers(7, [Answer("a", "m")])


def test_an_answer_keeps_where_it_came_from_but_raters_see_its_text_alone(store: Store) -> None:
    prompt = store.add_prompt("q")
    store.add_answers(prompt, [Answer("a", "runs/sft", 0.7), Answer("b", "runs/ppo", 1.0)])
    assert [(a.model, a.temperature, a.round) for a in store.answers(prompt)] == [
        ("runs/sft", 0.7, 1),
        ("runs/ppo", 1.0, 1),
    ]
    task = store.next_prompt(store.add_rater("anna"))
    assert "runs" not in repr(task)


def test_raters_have_a_name_a_kind_and_perhaps_a_token(store: Store, tmp_path: Path) -> None:
    anna = store.add_rater("anna", token="first")
    assert store.add_rater(" anna ", token="sesame") == anna
    assert store.rater_of_token("first") is None
    assert store.rater_of_token("sesame") == store.raters()[0]
    with pytest.raises(DataError, match="'anna' is there as person, not as judge"):
        store.add_rater("anna", "judge")
    with pytest.raises(DataError, match="another rater has this token"):
        store.add_rater("bob", token="sesame")
    for name in ("", "a\nb", "\u202eanna", "\u200d"):
        with pytest.raises(DataError, match="a rater's name has 1 to 100 characters"):
            store.add_rater(name)
    with pytest.raises(DataError, match="at most 100 characters, and 'xxxxxxxxxxxxxxxxxxxx'… has 101; shorten it"):
        store.add_rater("x" * 101)
    store.add_rater("محمد\u200cرضا")  # what parts letters in Persian is no letter, but belongs to the name
    assert [rater.name for rater in store.raters()] == ["anna", "محمد\u200cرضا"]
    written = b"".join(file.read_bytes() for file in tmp_path.iterdir())
    assert b"anna" in written
    assert b"sesame" not in written
