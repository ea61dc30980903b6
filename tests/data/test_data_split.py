"""Train and evaluation rows share no prompt."""

import pytest

from rlhf.data.split import border, split_by_prompt, train_and_eval, without


def prompt_of(row: tuple[str, int]) -> str:
    return row[0]


def test_no_prompt_is_on_both_sides_and_no_row_is_lost() -> None:
    rows = [(f"prompt {number % 200}", number) for number in range(600)]
    train, evaluation = split_by_prompt(rows, prompt_of, 0.2)
    assert sorted(train + evaluation, key=lambda row: row[1]) == rows
    assert not set(map(prompt_of, train)) & set(map(prompt_of, evaluation))
    assert 0.12 < len(evaluation) / len(rows) < 0.28


def test_a_prompt_falls_on_the_same_side_among_other_rows() -> None:
    prompts = [f"prompt {number}" for number in range(100)]
    _, among_all = split_by_prompt(prompts, str, 0.3)
    _, among_half = split_by_prompt(prompts[::-2], str, 0.3)
    assert set(among_half) == set(among_all) & set(prompts[::-2])


def test_a_larger_share_keeps_what_was_held_out() -> None:
    prompts = [f"prompt {number}" for number in range(100)]
    assert set(split_by_prompt(prompts, str, 0.1)[1]) < set(split_by_prompt(prompts, str, 0.3)[1])


@pytest.mark.parametrize("share", [0.001, 0.999])
def test_two_prompts_give_one_to_each_side(share: float) -> None:
    train, evaluation = split_by_prompt(["a", "b", "a"], str, share)
    assert len(set(train)) == len(set(evaluation)) == 1


@pytest.mark.parametrize("share", [0.1, 0.999])
def test_one_prompt_is_trained_on(share: float) -> None:
    assert split_by_prompt(["a", "a"], str, share) == (["a", "a"], [])


def test_no_share_holds_nothing_out() -> None:
    assert split_by_prompt(["a", "b", "c"], str, 0.0) == (["a", "b", "c"], [])


def test_half_a_character_in_a_key_is_no_obstacle() -> None:
    assert len(split_by_prompt(["\ud83d", "b"], str, 0.5)[1]) == 1


def test_rows_of_an_explicit_evaluation_set_leave_training() -> None:
    train = [("a", 1), ("b", 2), ("a", 3), ("c", 4)]
    assert without(train, [("a", 9), ("z", 9)], prompt_of) == ([("b", 2), ("c", 4)], 2)


def test_without_evaluation_rows_the_source_is_split() -> None:
    rows = [(f"prompt {number % 20}", number) for number in range(60)]
    assert train_and_eval(rows, None, prompt_of, 0.3) == (*split_by_prompt(rows, prompt_of, 0.3), 0)


def test_with_evaluation_rows_training_loses_their_prompts_and_the_share_means_nothing() -> None:
    train = [("a", 1), ("b", 2), ("a", 3), ("c", 4)]
    held_out = [("a", 9), ("z", 9)]
    assert train_and_eval(iter(train), iter(held_out), prompt_of, 0.9) == ([("b", 2), ("c", 4)], held_out, 2)
    assert train_and_eval(train, [], prompt_of, 0.5) == (train, [], 0)


def test_the_border_follows_from_the_lowest_and_the_highest_place() -> None:
    assert border(0.05, 0.9, 0.1) == 0.1
    assert 0.3 < border(0.3, 0.9, 0.1) < 0.3000001  # none would be held out: the lowest one is
    assert border(0.01, 0.08, 0.1) == 0.08  # all would be: the highest one is not
    assert border(0.05, 0.05, 0.1) == border(0.0, 0.9, 0) == 0
