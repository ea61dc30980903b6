"""Padding, labels, and the rows of each optimiser step."""

from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf.data.collate import Blocks, batch_indices, document_mask, labels, pack, pad_left, pad_right
from rlhf.data.errors import DataError
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


def test_the_width_is_a_multiple_where_one_is_asked_for() -> None:
    ids, mask = pad_right([[5, EOS], [7, 8, EOS]], EOS, 4)
    assert ids.tolist() == [[5, EOS, EOS, EOS], [7, 8, EOS, EOS]]
    assert mask.sum(1).tolist() == [2, 3]


def test_a_pack_has_positions_of_each_sequence_and_what_fills_it_up_is_one_more() -> None:
    ids, positions, borders = pack([[5, 6, EOS], [7]], EOS, 8)
    assert ids.tolist() == [[5, 6, EOS, 7, EOS, EOS, EOS, EOS]]
    assert positions.tolist() == [[0, 1, 2, 0, 0, 1, 2, 3]]
    assert borders.tolist() == [0, 3, 4, 8]
    ids, positions, borders = pack([[5, 6], [7, 8]], EOS, 4)
    assert (ids.tolist(), positions.tolist(), borders.tolist()) == ([[5, 6, 7, 8]], [[0, 1, 0, 1]], [0, 2, 4])
    assert borders.dtype == torch.int32


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


def test_blocks_overlap_by_one_token_so_that_each_but_the_first_is_predicted_once() -> None:
    rows = Blocks(np.arange(10, 18), 3, "data")  # 8 tokens: the last one does not fill a third row
    assert (len(rows), rows.num_tokens) == (2, 8)
    assert rows[[1, 0, 1]].tolist() == [[13, 14, 15, 16], [10, 11, 12, 13], [13, 14, 15, 16]]
    assert rows[[0]].dtype == torch.int64
    assert len(Blocks(np.arange(7), 3, "data")) == 2  # 7 = 2 · 3 + 1 fill it exactly


def test_rows_of_a_step_are_those_of_the_shuffled_epochs() -> None:
    rows = Blocks(np.arange(100), 7, "data")  # 14 rows
    for step in range(3):
        assert rows.batch(step, 4, seed=1).equal(rows[batch_indices(14, 4, step, seed=1)])


def test_each_later_epoch_cuts_the_text_at_other_places_and_goes_round_at_its_end() -> None:
    rows = Blocks(np.arange(101), 10, "data")  # 10 rows
    shifts = []
    for epoch in range(1, 9):
        taken = rows.at(range(10 * epoch, 10 * epoch + 10), seed=0)
        starts = sorted(int(row[0]) for row in taken)
        assert [start % 10 for start in starts] == [starts[0]] * 10
        assert taken.equal((taken[:, :1] + torch.arange(11)) % 101)
        shifts.append(starts[0])
    assert len(set(shifts)) > 3


def test_tokens_of_sixteen_bits_are_read_from_their_file(tmp_path: Path) -> None:
    (tmp_path / "ids").write_bytes(np.array([1, 65535, 3], np.uint16).tobytes())
    rows = Blocks(np.memmap(tmp_path / "ids", np.uint16, "r"), 2, "data")
    assert rows[[0]].tolist() == [[1, 65535, 3]]


def test_a_text_smaller_than_a_block_is_refused_with_both_sizes() -> None:
    with pytest.raises(DataError, match=r"pretrain\.data: the text gives 3 tokens, but a block needs 4; use more text"):
        Blocks(np.arange(3), 3, "pretrain.data")


def test_a_token_sees_its_own_document_only_and_positions_restart_after_its_eos() -> None:
    positions, mask = document_mask(torch.tensor([[5, EOS, 7, 8], [5, 6, 7, EOS]]), EOS)
    assert positions.tolist() == [[0, 1, 0, 1], [0, 1, 2, 3]]
    assert mask.shape == (2, 1, 4, 4)
    assert mask[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert mask[1, 0].equal(torch.ones(4, 4).tril().bool())


def test_an_eos_alone_is_a_document_of_one_token() -> None:
    positions, mask = document_mask(torch.tensor([[EOS, EOS, 4]]), EOS)
    assert positions.tolist() == [[0, 0, 0]]
    assert mask[0, 0].equal(torch.eye(3).bool())
