"""What a reward model must get right, from the ranked row to the score that PPO sees.

The table says where each property of the specification is shown; test_reward_objective is `objective` here.

R1   objective::test_pairs_equal_an_explicit_loop
R2   objective::test_the_order_in_which_answers_are_listed_does_not_matter
R3   objective::test_the_gradient_of_each_prompt_sums_to_zero_and_empty_slots_get_none
R4   objective::test_equal_scores_give_the_log_of_the_number_of_choices
R5   objective::test_two_answers_are_bradley_terry
R6   objective::test_pairs_golden_with_ties_dropped, …::test_pairs_golden_with_soft_ties, …::test_golden_without_ties
R7   objective::test_prompts_weigh_the_same_however_many_answers_they_have
R8   objective::test_reversed_labels_turn_accuracy_around
R9   objective::test_microbatches_add_up_to_the_whole_batch
     test_reward_options::test_a_step_is_the_same_however_it_is_cut
     test_reward_distributed::test_two_processes_make_the_step_of_one, …::test_figures_are_those_of_all_rows…
R10  test_a_score_does_not_depend_on_what_it_is_read_with
     test_models::test_a_score_is_the_same_alone_in_a_batch_and_padded_on_either_side
R11  test_models::test_the_score_is_read_at_the_final_eos_even_where_pad_is_eos
R12  test_an_answer_keeps_its_end_or_is_left_out_and_counted
R13  test_data_rows (identical answers); test_the_same_answer_twice_is_compared_with_the_others_once
R14  test_no_prompt_is_in_training_and_held_out_rows
R15  test_what_can_be_told_apart_is_learned_whole; test_labels_at_random_teach_nothing_that_holds_elsewhere
R16  test_models::test_a_saved_scorer_gives_the_same_scores_and_loads_in_plain_transformers
     test_models::test_a_missing_score_head_is_an_error_and_not_a_random_head
     test_a_sealed_reward_model_scores_as_it_did_in_training
R17  objective::test_extreme_scores_stay_finite_and_still_teach
R18  test_neither_prompt_nor_padding_takes_part_in_a_score
     test_reward_options::test_the_language_modelling_loss_is_that_of_the_best_answers_tokens
R19  objective::test_a_margin_asks_for_a_lead_and_zero_asks_for_nothing
     test_reward_options::test_a_margin_is_for_training_alone
R20  objective::test_centering_adds_the_squared_sum_of_a_pair; test_centering_draws_the_mean_score_to_zero
R21  test_dropout_is_off_where_scores_are_read
"""

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_world import marked, new_run, policy_folder, ranking, rankings_file, run_reward, tokenised

from rlhf.data.errors import DataError
from rlhf.data.rows import prompt_key
from rlhf.stages.models import load_scalar, load_tokenizer
from rlhf.stages.reward import train as reward
from rlhf.stages.reward.batches import collate
from rlhf.stages.reward.evaluate import accuracy, scored
from rlhf.stages.reward.objective import ranking_loss
from rlhf.stages.reward.train import normaliser, read_rows
from rlhf.stages.row_files import RowReader
from rlhf.stages.runtime import Runtime

CPU = torch.device("cpu")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Runtime]:
    run = new_run(tmp_path / "run", ties="soft")
    yield run
    run.close()


def new_scorer(folder: str, tokenizer: Any) -> Any:
    torch.manual_seed(1)
    return load_scalar(folder, tokenizer, new_head=True)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_score_does_not_depend_on_what_it_is_read_with(
    run: Runtime, tmp_path: Path, tokenizer: Any, pooling: str
) -> None:
    scorer = new_scorer(policy_folder(tmp_path), tokenizer)
    scorer.pooling = pooling
    rows = [ranking("ab", ["c", "dd!"], [1, 2]), ranking("abcdefgh", ["c" * 20, "d", "e" * 30], [1, 2, 3])]
    data = tokenised(run, tokenizer, rows)
    ((numbers, together, part),) = scored(run, scorer, data, 0)
    alone = [scores for number in numbers for _, scores, _ in scored(run, scorer, [data[number]], 0)]
    assert numbers == [1, 0]  # the longer one first
    assert part.mask.tolist() == [[True, True, True], [True, True, False]]
    torch.testing.assert_close(together[part.mask], torch.cat([x[0] for x in alone]), rtol=0, atol=1e-5)
    assert together[1, 2] == 0


def test_an_answer_keeps_its_end_or_is_left_out_and_counted(run: Runtime, tokenizer: Any) -> None:
    said: list[str] = []
    rows = [ranking("a" * 40, ["b" * 30, "c", "d" * 60], [1, 2, 3]), ranking("e", ["f", "g" * 60], [1, 2])]
    (kept,) = tokenised(run, tokenizer, rows, said)
    assert kept.ranks == [1, 2]
    for answer, text in zip(kept.answers, ["b" * 30, "c"], strict=True):
        assert len(answer.input_ids) <= 48
        assert answer.input_ids[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(answer.input_ids[answer.prompt_length :], skip_special_tokens=True).strip() == text
    assert said == [
        "left out 2 answers longer than max_length 48, 0 repeated ones",
        "left out 1 of 2 rankings with nothing to compare",
    ]


def test_the_same_answer_twice_is_compared_with_the_others_once(run: Runtime, tokenizer: Any) -> None:
    said: list[str] = []
    (kept,) = tokenised(run, tokenizer, [ranking("a", ["b", "b", "c"], [1, 2, 3], strengths=[5.0, 4.0, 3.0])], said)
    assert (len(kept.answers), kept.ranks, kept.strengths) == (2, [1, 3], [5, 3])
    assert said == ["left out 0 answers longer than max_length 48, 1 repeated ones"]
    with pytest.raises(DataError, match="the ranks hold all answers to be equal"):
        tokenised(run, tokenizer, [ranking("a", ["b", "b"], [1, 2])])


def test_no_prompt_is_in_training_and_held_out_rows(tmp_path: Path) -> None:
    rows = marked(20)
    twice = rows + [{**row, "responses": [text + "x" for text in row["responses"]]} for row in rows[:10]]
    data = rankings_file(tmp_path / "rows.jsonl", twice)
    eval_data = rankings_file(tmp_path / "eval.jsonl", rows[:3])
    for number, given in enumerate(({}, {"eval_data": eval_data})):
        run = new_run(tmp_path / f"split-{number}", data=data, **given)
        train, held_out = ({prompt_key(row.prompt) for row in side} for side in read_rows(RowReader(run.settings)))
        run.close()
        assert held_out
        assert not train & held_out
        assert len(train | held_out) == 20


def test_what_can_be_told_apart_is_learned_whole(tmp_path: Path) -> None:
    data = rankings_file(tmp_path / "rows.jsonl", marked(100))
    model = policy_folder(tmp_path)
    found = run_reward(tmp_path / "reward", model, data, num_epochs=20, pooling="mean", learning_rate=0.02)
    assert found["accuracy"] == 1
    assert found["num_eval_prompts"] >= 10


def test_labels_at_random_teach_nothing_that_holds_elsewhere(tmp_path: Path) -> None:
    chance = random.Random(0)
    rows = [
        {"prompt": f"{number}", "responses": ["".join(chance.choices("abcdefgh", k=6)) for _ in "ab"], "ranks": [1, 2]}
        for number in range(500)
    ]
    data = rankings_file(tmp_path / "rows.jsonl", rows)
    found = run_reward(tmp_path / "reward", policy_folder(tmp_path), data, eval_share=0.6, num_epochs=2)
    assert found["num_eval_prompts"] > 250
    assert found["accuracy"] == pytest.approx(0.5, abs=3 * math.sqrt(0.25 / found["num_eval_prompts"]))


@pytest.mark.parametrize("lora", [None, {"r": 2, "alpha": 4}])
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_sealed_reward_model_scores_as_it_did_in_training(
    run: Runtime, tmp_path: Path, lora: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[torch.Tensor] = []

    def save(folder: Path, scorer: Any, *more: Any) -> None:
        seen.append(scores(scorer))
        saved(folder, scorer, *more)

    def scores(scorer: Any) -> torch.Tensor:
        rows = [ranking(row["prompt"], row["responses"], row["ranks"]) for row in marked(5)]
        return torch.cat([found for _, found, _ in scored(run, scorer, tokenised(run, tokenizer, rows), 0)])

    saved = reward.save
    monkeypatch.setattr(reward, "save", save)
    model, data = policy_folder(tmp_path), rankings_file(tmp_path / "rows.jsonl", marked(30))
    tokenizer = load_tokenizer(model)
    run_reward(tmp_path / "reward", model, data, pooling="mean", lora=lora)
    again = scores(load_scalar(str(tmp_path / "reward" / "model"), tokenizer))
    if lora is None:
        assert torch.equal(again, seen[0])
    else:  # merged: the sums are made in another order
        torch.testing.assert_close(again, seen[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_neither_prompt_nor_padding_takes_part_in_a_score(
    run: Runtime, tmp_path: Path, tokenizer: Any, pooling: str
) -> None:
    scorer = new_scorer(policy_folder(tmp_path), tokenizer)
    scorer.pooling = pooling
    part = collate(tokenised(run, tokenizer, [ranking("abc", ["d", "ef", "ghi"], [1, 2, 3])]), 0, CPU)
    length = part.ids.shape[1]
    assert part.response.sum(1).tolist() == [2, 3, 4]  # eos included; the shortest is followed by two of padding
    values = torch.arange(length).expand(3, length) + 100.0 * torch.arange(3)[:, None]
    start = length - 4
    expected = {
        "last": [start + 1, 100 + start + 2, 200 + start + 3],
        "mean": [start + 0.5, 100 + start + 1, 200 + start + 1.5],
    }[pooling]
    assert scorer.pool(values.where(part.response, torch.nan), part.response).tolist() == expected


@pytest.mark.parametrize(("centering", "mean"), [(0.0, 5.0), (0.1, 0.0)])
def test_centering_draws_the_mean_score_to_zero(centering: float, mean: float) -> None:
    scores = torch.tensor([[6.0, 4.0], [3.0, 7.0]], requires_grad=True)
    optimizer = torch.optim.SGD([scores], lr=0.5)
    for _ in range(300):
        ranking_loss(scores, torch.tensor([[1, 2], [2, 1]]), centering=centering).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert scores.mean().item() == pytest.approx(mean, abs=1e-3)
    assert scores[0, 0] > scores[0, 1]
    assert scores[1, 1] > scores[1, 0]


def test_dropout_is_off_where_scores_are_read(run: Runtime, tmp_path: Path, tokenizer: Any) -> None:
    scorer = new_scorer(policy_folder(tmp_path, shape="gpt2", dropout=0.5), tokenizer)
    data = tokenised(run, tokenizer, [ranking(r["prompt"], r["responses"], r["ranks"]) for r in marked(6)])
    part = collate(data, 0, CPU)
    with torch.no_grad():
        one, other = (scorer.train()(part.ids, part.attention) for _ in range(2))
    assert not torch.equal(one, other)  # it is there
    found = []
    for _ in range(2):
        scorer.train()
        ((_, scores, _),) = scored(run, scorer, data, 0)
        scorer.train()
        share = accuracy(run, scorer, data, 0)
        scorer.train()
        found.append((scores.tolist(), share, normaliser(run, scorer, data, 0)))
    assert found[0] == found[1]
