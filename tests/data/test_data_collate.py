"""Padding, labels, and the rows of each optimiser step."""

import pytest

from rlhf.data.collate import batch_indices, labels, pad_left, pad_right
from rlhf.data.tokens import Encoded

EOS = 0  # which also pads


def test_padding_masks_by_length_so_that_a_real_pad_id_counts() -> None:
    ids, mask = pad_right([[5, EOS], [7, 8, EOS]], EOS)
    assert ids.tolist() == [[5, EOS, EOS], [7, 8, EOS]]
    assert mask.tolist() == [[True, True, False], [True, True, True]]


def test_left_padding_puts_tokens_at_the_right_end() -> None:
    ids, mask = pad_left([[5], [7, 8]], EOS)
    assert ids.tolist() == [[EOS, 5], [7, 8]]
    assert mask.tolist() == [[False, True], [True, True]]


def test_no_sequences_make_an_empty_batch() -> None:
    ids, mask = pad_right([], EOS)
    assert ids.shape == mask.shape == (0, 0)


def test_the_closing_eos_is_learned_though_it_equals_pad() -> None:
    batch = [Encoded([1, 2, 3, EOS], prompt_length=2), Encoded([1, EOS, 3, 4, EOS], prompt_length=2)]
    assert labels(batch).tolist() == [[-100, -100, 3, EOS, -100], [-100, -100, 3, 4, EOS]]


def test_each_epoch_holds_each_row_once_in_its_own_order() -> None:
    stream = [row for step in range(15) for row in batch_indices(10, 2, step, seed=3)]
    epochs = [stream[:10], stream[10:20], stream[20:]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 3
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_a_batch_may_straddle_two_epochs() -> None:
    stream = [row for step in range(5) for row in batch_indices(7, 4, step, seed=0)]
    assert sorted(stream[:7]) == sorted(stream[7:14]) == list(range(7))


def test_a_batch_larger_than_the_data_goes_round() -> None:
    assert sorted(batch_indices(2, 6, 0, seed=0)) == [0, 0, 0, 1, 1, 1]


def test_another_seed_gives_another_order_and_the_same_seed_the_same() -> None:
    assert batch_indices(50, 50, 0, seed=1) == batch_indices(50, 50, 0, seed=1)
    assert batch_indices(50, 50, 0, seed=1) != batch_indices(50, 50, 0, seed=2)
    assert batch_indices(50, 50, 1, seed=0) != batch_indices(50, 50, 0, seed=1)


def test_no_rows_give_no_batch() -> None:
    with pytest.raises(ValueError, match="num_rows=0"):
        batch_indices(0, 4, 0, seed=0)
