"""Several sources in exact proportion."""

from itertools import accumulate, pairwise

import numpy as np
import pytest

from rlhf.data.collate import Blocks
from rlhf.data.mixture import Mixture, Turns


def source(first: int, num_rows: int) -> Blocks:
    """Rows of two tokens that begin with `first`, `first` + 1, …"""
    return Blocks(np.arange(first, first + num_rows + 1), 1, "data")


def first_tokens(mixture: Mixture, steps: range, batch_size: int, seed: int = 0) -> list[int]:
    return [int(row[0]) for step in steps for row in mixture.batch(step, batch_size, seed)]


@pytest.mark.parametrize(
    "weights", [[60, 30, 10], [0.6, 0.3, 0.1], [1, 1], [60, 22, 8, 8, 3], [5], [1, 2, 4, 8, 16, 1.5]]
)
def test_after_any_number_of_rows_each_source_has_had_its_share_to_within_one(weights: list[float]) -> None:
    turns = Turns(weights)
    counts = [0] * len(weights)
    for place in range(1000):
        number, before = turns[place]
        assert before == counts[number]
        counts[number] += 1
        shares = [weight * (place + 1) / sum(weights) for weight in weights]
        assert all(abs(count - share) < 1 for count, share in zip(counts, shares, strict=True))


def test_ten_rows_of_60_30_10_hold_six_three_and_one() -> None:
    turns = Turns([0.6, 0.3, 0.1])
    for start in (0, 10, 990):
        numbers = [turns[place][0] for place in range(start, start + 10)]
        assert [numbers.count(number) for number in range(3)] == [6, 3, 1]


def test_any_place_can_be_asked_for_first() -> None:
    weights, places = [3.7, 1.1, 0.21], [777, 3, 500, 0]
    assert [Turns(weights)[place] for place in places] == [Turns(weights)[p] for p in places]
    turns = Turns(weights)
    assert [turns[place] for place in places] == [Turns(weights)[place] for place in places]


def test_each_source_goes_round_in_epochs_of_its_own() -> None:
    mixture = Mixture([source(0, 4), source(100, 3)], [3, 1])
    assert (len(mixture), mixture.num_tokens) == (7, 9)
    seen = first_tokens(mixture, range(6), 4)
    large, small = [s for s in seen if s < 100], [s for s in seen if s >= 100]
    assert (len(large), len(small)) == (18, 6)
    assert all(sorted(large[start : start + 4]) == [0, 1, 2, 3] for start in (0, 4, 8, 12))
    assert sorted(small[:3]) == sorted(small[3:]) == [100, 101, 102]


def test_the_stream_is_the_same_however_it_is_cut_into_batches() -> None:
    mixture = Mixture([source(0, 5), source(100, 50), source(1000, 7)], [60, 30, 10])
    assert first_tokens(mixture, range(12), 5, seed=3) == first_tokens(mixture, range(5), 12, seed=3)
    assert first_tokens(mixture, range(2), 5, seed=3) != first_tokens(mixture, range(2), 5, seed=4)


def test_a_single_source_has_the_rows_that_it_has_without_a_weight() -> None:
    rows = Blocks(np.arange(100), 7, "data")
    mixture = Mixture([rows], [0.5])
    assert all(mixture.batch(step, 5, 2).equal(rows.batch(step, 5, 2)) for step in range(9))


def test_no_source_waits_longer_than_it_must() -> None:
    numbers = [Turns([1, 1, 8])[place][0] for place in range(100)]
    places = [place for place, number in enumerate(numbers) if number == 0]
    assert all(last < 20 for last in (b - a for a, b in pairwise(places)))
    assert list(accumulate(number == 2 for number in numbers))[-1] == 80


def test_weights_without_a_short_period_are_followed_without_remembering_every_turn() -> None:
    turns = Turns([1234567891, 987654321, 55555557])
    numbers = [turns[place][0] for place in range(3000)]
    assert [numbers.count(number) for number in range(3)] == [1626, 1301, 73]  # 1625.7, 1300.6 and 73.2 of 3000
    assert turns[10] == Turns([1234567891, 987654321, 55555557])[10]
    assert all(size < 10 for size in (len(value) for value in vars(turns).values() if isinstance(value, list)))
