"""Microbatches of about equal length: what is cut where, that only padding is lost, and that no sum depends on it."""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import fields
from itertools import pairwise
from time import process_time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ppo_world import LENGTHS, PROMPTS, World, make_targets, model_folders, settings

from rlhf.data.collate import Blocks
from rlhf.stages import microbatches
from rlhf.stages.microbatches import PASS_TOKENS, PASS_TOKENS_ON_GPU, Piece, packs, pieces
from rlhf.stages.ppo import update as update_module
from rlhf.stages.ppo.rollout import Rollout
from rlhf.stages.ppo.shaping import Targets, targets
from rlhf.stages.ppo.update import Ratios
from rlhf.stages.runtime import Runtime

# --- what is cut where


def test_a_cut_is_made_where_it_saves_more_padding_than_a_pass_costs() -> None:
    assert PASS_TOKENS == 128
    # Together 128 + 2 · 210 = 548; apart 2 · 128 + 210 + 10 = 476.
    assert pieces([10, 2], [200, 8]) == [Piece([0], 10, 200), Piece([1], 2, 8)]
    # Together 128 + 2 · 110 = 348; apart 2 · 128 + 110 + 10 = 376.
    assert pieces([10, 2], [100, 8]) == [Piece([0, 1], 10, 100)]


def test_on_a_gpu_a_pass_costs_more_so_fewer_are_made() -> None:
    assert PASS_TOKENS_ON_GPU == 2000
    assert pieces([10, 2], [200, 8], device="cuda") == [Piece([0, 1], 10, 200)]
    # Together 2000 + 2 · 2010 = 6020; apart 2 · 2000 + 2010 + 10 = 6020; one token more is worth a pass.
    assert pieces([10, 2], [2001, 8], device="cuda") == [Piece([0], 10, 2001), Piece([1], 2, 8)]


def test_where_padding_is_not_read_a_cut_saves_nothing_and_real_tokens_count() -> None:
    assert pieces([10, 2], [200, 8], packed=True) == [Piece([0, 1], 10, 200)]
    # 210 + 30 fit into 240; of the others 30 · 8 do.
    found = pieces([10] * 10, [200] + [20] * 9, max_tokens=240, packed=True)
    assert [len(piece.rows) for piece in found] == [2, 8]
    assert found[0] == Piece([0, 1], 10, 200)
    assert [len(p.rows) for p in pieces([1] * 5, [1] * 5, max_rows=2, packed=True)] == [2, 2, 1]


def test_a_thousand_rows_are_cut_in_a_moment() -> None:
    prompts, responses = drawn(0, 1024)
    seconds = []
    for _ in range(3):
        began = process_time()  # of this process alone, whatever else the machine does
        pieces(prompts, responses)
        seconds.append(process_time() - began)
    assert min(seconds) < 0.1


def test_a_piece_is_as_wide_as_its_longest_prompt_and_its_longest_response() -> None:
    # Together 128 + 2 · 99 = 326; apart 2 · 128 + 52 + 50 = 358.
    assert pieces([50, 1], [2, 49]) == [Piece([0, 1], 50, 49)]


def test_rows_of_equal_length_stay_together_in_their_order() -> None:
    assert pieces([7] * 30, [300] * 30) == [Piece(list(range(30)), 7, 300)]
    assert pieces([7] * 5, [3] * 5, max_rows=2) == [Piece([0, 1], 7, 3), Piece([2, 3], 7, 3), Piece([4], 7, 3)]


def test_only_the_rows_that_are_asked_for_are_cut() -> None:
    assert pieces([1, 2, 3, 4], [5, 5, 5, 5], rows=[2, 0]) == [Piece([2, 0], 3, 5)]


def test_rows_of_several_texts_are_cut_by_a_budget_of_tokens_and_one_beyond_it_is_read_alone() -> None:
    lengths, num_texts = [10, 10, 10, 30, 10], [2, 3, 4, 4, 2]
    # Row 3 has 120 tokens; of the others 2 + 3 and 4 + 2 texts of 10 fit into 60.
    found = pieces([0] * 5, lengths, num_texts=num_texts, max_tokens=60)
    assert found == [Piece([3], 0, 30), Piece([0, 1], 0, 10), Piece([2, 4], 0, 10)]
    # Without a budget all together cost 128 + 15 · 30 = 578, the long ones alone 2 · 128 + 4 · 30 + 11 · 10 = 486.
    assert pieces([0] * 5, lengths, num_texts=num_texts) == [Piece([3], 0, 30), Piece([0, 1, 2, 4], 0, 10)]


def test_packs_are_as_few_as_hold_the_rows_and_about_equally_full() -> None:
    assert packs([5, 9, 4, 6, 8], 18) == [[1, 0, 2], [4, 3]]  # 32 tokens: 18 and 14
    # In two packs of 16 the longest first do not fit; in three they do.
    assert packs([5, 9, 4, 6, 8], 16) == [[1], [4, 2], [3, 0]]
    assert packs([5, 9, 4, 6, 8], 18, max_rows=2) == [[1], [4, 2], [3, 0]]
    assert packs([50, 9, 4], 16) == [[0], [1, 2]]  # one beyond the budget is alone
    assert packs([5, 9, 4, 6, 8], 100, rows=[4, 0]) == [[4, 0]]


@pytest.mark.parametrize("max_rows", [None, 1, 3])
@pytest.mark.parametrize("budget", [1, 100, 1000])
def test_no_pack_of_several_rows_is_too_large_and_each_row_is_in_one(budget: int, max_rows: int | None) -> None:
    for seed in range(10):
        lengths, _ = drawn(seed, 17)
        found = packs(lengths, budget, max_rows)
        assert sorted(row for pack in found for row in pack) == list(range(17))
        assert all(len(pack) <= (max_rows or 17) for pack in found)
        assert all(len(pack) == 1 or sum(lengths[row] for row in pack) <= budget for pack in found)


@pytest.mark.parametrize("budget", [1, 500, 2000])
def test_no_piece_of_several_rows_has_more_tokens_than_the_budget(budget: int) -> None:
    for seed in range(10):
        prompts, responses = drawn(seed, 17)
        found = pieces(prompts, responses, max_tokens=budget)
        assert sorted(row for piece in found for row in piece.rows) == list(range(17))
        sizes = [(len(piece.rows), len(piece.rows) * (piece.num_prompt + piece.num_response)) for piece in found]
        assert all(tokens <= budget or rows == 1 for rows, tokens in sizes)


def drawn(seed: int, num: int, longest: int = 400) -> tuple[list[int], list[int]]:
    chance = random.Random(seed)
    return [chance.randint(1, 60) for _ in range(num)], [chance.randint(1, longest) for _ in range(num)]


@pytest.mark.parametrize("max_rows", [None, 1, 3, 8])
def test_each_row_is_in_one_piece_none_is_too_large_and_the_longest_come_first(max_rows: int | None) -> None:
    for seed in range(20):
        prompts, responses = drawn(seed, 17)
        found = pieces(prompts, responses, max_rows)
        assert sorted(row for piece in found for row in piece.rows) == list(range(17))
        assert all(1 <= len(piece.rows) <= (max_rows or 17) for piece in found)
        lengths = [prompts[row] + responses[row] for piece in found for row in piece.rows]
        assert lengths == sorted(lengths, reverse=True)
        for piece in found:
            assert piece.num_prompt == max(prompts[row] for row in piece.rows)
            assert piece.num_response == max(responses[row] for row in piece.rows)


@pytest.mark.parametrize("max_tokens", [None, 700])
@pytest.mark.parametrize("max_rows", [None, 2])
def test_no_other_cut_of_the_sorted_rows_costs_less(max_rows: int | None, max_tokens: int | None) -> None:
    for seed in range(10):
        prompts, responses = drawn(seed, 7)
        order = sorted(range(7), key=lambda row: -prompts[row] - responses[row])

        def cost(parts: list[list[int]], prompts: list[int] = prompts, responses: list[int] = responses) -> float:
            widths = [max(prompts[row] for row in part) + max(responses[row] for row in part) for part in parts]
            tokens = [len(part) * width for part, width in zip(parts, widths, strict=True)]
            sizes = zip(parts, tokens, strict=True)
            if any(len(part) > (max_rows or 7) or (n > (max_tokens or n) and len(part) > 1) for part, n in sizes):
                return math.inf
            return sum(PASS_TOKENS + n for n in tokens)

        borders = [[0, *(i for i in range(1, 7) if 1 << (i - 1) & bits), 7] for bits in range(64)]
        best = min(cost([order[a:b] for a, b in pairwise(border)]) for border in borders)
        found = pieces(prompts, responses, max_rows, max_tokens=max_tokens)
        assert cost([piece.rows for piece in found]) == best < math.inf


# --- what a cut takes away


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, str]:
    return model_folders(tmp_path_factory.mktemp("models"), tokenizer)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, given: dict[str, str]) -> Iterator[Runtime]:
    run = Runtime(settings(**given), tmp_path_factory.mktemp("ppo"))
    yield run
    run.close()


NewWorld = Callable[..., World]


@pytest.fixture
def new_world(run: Runtime, given: dict[str, str]) -> NewWorld:
    def make(**chosen: Any) -> World:
        run.settings = settings(**{**given, **chosen})
        return World(run, sgd=True)

    return make


def test_a_cut_drops_columns_of_padding_and_nothing_else(new_world: NewWorld) -> None:
    rollout = new_world().rollout()
    assert rollout.prompt_lengths.tolist() == [len(prompt) for prompt in PROMPTS] == [5, 1, 3, 2, 4, 1, 2, 3]
    assert LENGTHS == (6, 1, 2, 5, 3, 1, 4, 6)
    learned = make_targets(rollout)
    piece = Piece([6, 2], 3, 4)  # prompts of 2 and 3 tokens, responses of 4 and 2
    part, of_part = rollout.cut(piece), learned.cut(piece)
    assert part.input_ids.shape == part.attention_mask.shape == (2, 7)
    assert part.mask.tolist() == [[True] * 4, [True, True, False, False]]
    assert part.attention_mask.tolist() == [[False] + [True] * 6, [True] * 5 + [False] * 2]
    for place, row in enumerate([6, 2]):
        ids, kept = rollout.input_ids[row], part.input_ids[place]
        assert torch.equal(kept[part.attention_mask[place]], ids[rollout.attention_mask[row]])
        for name in ("logprobs", "ref_logprobs", "entropy", "values", "mask"):
            assert torch.equal(getattr(part, name)[place], getattr(rollout, name)[row, :4]), name
        for field in fields(Targets):
            assert torch.equal(getattr(of_part, field.name)[place], getattr(learned, field.name)[row, :4])
    for name in ("scores", "reward_scores", "ended"):
        assert torch.equal(getattr(part, name), getattr(rollout, name)[[6, 2]]), name


def test_as_many_rows_as_slots_do_not_confuse_a_cut(new_world: NewWorld) -> None:
    """Fields [B] and [B,N] are told from [B,R] also where the numbers are alike."""
    rollout = new_world().rollout().cut(Piece(list(range(6)), 5, 6))
    assert rollout.mask.shape == (6, 6)
    part = rollout.cut(Piece([1, 5], 1, 1))
    assert (part.scores.tolist(), part.reward_scores.shape, part.logprobs.shape) == ([1, 5], (2, 1), (2, 1))


# --- no sum depends on it


@pytest.mark.parametrize("placement", ["eos", "after_eos"])
def test_an_update_in_many_pieces_is_the_update_of_one_padded_batch(
    new_world: NewWorld, placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    widths: list[tuple[int, int]] = []
    cut = Rollout.cut

    def watch(self: Rollout, piece: Piece) -> Rollout:
        widths.append((piece.num_prompt, piece.num_response))
        return cut(self, piece)

    monkeypatch.setattr(Rollout, "cut", watch)
    found = []
    for pass_tokens in (10**6, 0):
        monkeypatch.setattr(microbatches, "PASS_TOKENS", pass_tokens)
        world = new_world(
            num_epochs=2, num_minibatches=1, score_placement=placement, kl_in="loss", entropy_coef=0.1, target_kl=1e3,
            learning_rate=1e-3, critic_learning_rate=1e-3, max_grad_norm=1e9,
        )  # fmt: skip
        rollout = world.rollout()
        learned = targets(rollout, rollout.scores, 0.05, world.run.settings)
        extra = 0 if placement == "eos" else 1
        assert learned.value_mask.sum(-1).tolist() == [min(length + extra, 6) for length in LENGTHS]
        stats = world.update(rollout, learned)
        found.append((world.weights(), stats))
    assert widths[:2] == [(5, 6)] * 2  # once an epoch; then in pieces
    assert len(widths) - 2 >= 8
    assert (1, 1 + extra) in widths
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=1e-6)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-4, abs=1e-6)


def test_an_update_within_a_budget_of_tokens_is_that_of_the_whole(
    new_world: NewWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raw text too is read in parts that keep to it: of 5 blocks of 8 tokens two at a time."""
    read: list[tuple[int, int]] = []
    doing = update_module.doing
    monkeypatch.setattr(
        update_module, "doing", lambda what, ids, *num: (read.append(tuple(ids.shape)), doing(what, ids))
    )
    blocks, found = Blocks(np.arange(1, 37), 7, "text"), []
    for budget in (None, 16):
        world = new_world(
            num_epochs=1, num_minibatches=1, learning_rate=1e-3, max_grad_norm=1e9, microbatch_tokens=budget,
            ptx_coef=0.5, ptx_data="unread.txt", ptx_batch_size=5, ptx_block_size=7,
        )  # fmt: skip
        world.updater.ptx_blocks = blocks
        stats = world.update(world.rollout())
        found.append((world.weights(), stats))
    whole, parts = read[: read.index((5, 8)) + 1], read[read.index((5, 8)) + 1 :]
    assert max(rows * width for rows, width in whole) > 16
    assert all(rows * width <= 16 for rows, width in parts)
    assert parts[-3:] == [(2, 8), (2, 8), (1, 8)]
    torch.testing.assert_close(found[1][0], found[0][0], rtol=0, atol=1e-6)
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("minibatches", "cuts"), [(1, 1), (2, 6)])
def test_what_is_the_same_in_every_epoch_is_cut_once(
    new_world: NewWorld, monkeypatch: pytest.MonkeyPatch, minibatches: int, cuts: int
) -> None:
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        update_module, "pieces", lambda *lengths, **how: (calls.append(lengths[3]), pieces(*lengths, **how))[1]
    )
    world = new_world(num_epochs=3, num_minibatches=minibatches)
    assert world.update(world.rollout())["num_updates"] == 3 * minibatches
    assert len(calls) == cuts


def test_an_update_in_pieces_reads_far_less_than_the_padded_batch() -> None:
    """One response of 1000 tokens among 31 of 50: the padded batch has 32 000 slots."""
    found = pieces([10] * 32, [1000] + [50] * 31)
    assert sum(len(piece.rows) * (piece.num_prompt + piece.num_response) for piece in found) == 1010 + 31 * 60


# --- ratios


ALONE: Any = SimpleNamespace(sum=lambda x: x, max=lambda x: x)


def test_ratios_by_hand_over_microbatches_and_steps() -> None:
    ratios = Ratios(torch.device("cpu"))
    junk = 99.0
    logs = torch.tensor([[2.0, 0.5, junk]]).log(), torch.tensor([[1.0, junk, 1.0]]).log()
    masks = torch.tensor([[True, True, False]]), torch.tensor([[True, False, True]])
    for log_ratio, mask in zip(logs, masks, strict=True):
        ratios.add(log_ratio, mask, torch.tensor(4))
    # Ratios 2, ½, 1, 1: mean 1.125, mean square 6.25 / 4.
    expected = {"ratio_min": 0.5, "ratio_max": 2, "ratio_var": 1.5625 - 1.125**2}
    assert ratios.stats(ALONE, 1, mean=1.125) == pytest.approx(expected)
    ratios.add(torch.tensor([[0.0, math.nan]]), torch.tensor([[True, False]]), torch.tensor(1))
    # A second step of one token with ratio 1; steps weigh the same.
    expected["ratio_var"] = (1.5625 + 1) / 2 - ((1.125 + 1) / 2) ** 2
    assert ratios.stats(ALONE, 2, mean=(1.125 + 1) / 2) == pytest.approx(expected)


def test_ratios_of_an_update_do_not_depend_on_the_microbatch(new_world: NewWorld) -> None:
    found = []
    for size in (None, 1):
        world = new_world(num_epochs=1, num_minibatches=1, learning_rate=0.0, microbatch_size=size)
        rollout = world.rollout()
        rollout.logprobs = rollout.logprobs + torch.arange(8)[:, None] * 0.1  # ratios exp(0) … exp(−.7)
        found.append(world.update(rollout))
    each = torch.tensor([math.exp(-row / 10) for row in range(8) for _ in range(LENGTHS[row])])
    for stats in found:
        assert stats["ratio_min"] == pytest.approx(math.exp(-0.7), rel=1e-4)
        assert stats["ratio_max"] == pytest.approx(1, rel=1e-4)
        assert stats["ratio"] == pytest.approx(each.mean().item(), rel=1e-4)
        assert stats["ratio_var"] == pytest.approx(each.var(unbiased=False).item(), rel=1e-3)
