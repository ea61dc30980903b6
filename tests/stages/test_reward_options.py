"""What the reward stage can be asked for: margins, a language-modelling loss, microbatches, scales, another start."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from reward_world import marked, new_run, policy_folder, ranking, rankings_file, run_reward, settings, tokenised
from safetensors.torch import load_file
from stages_world import tiny_policy
from torch.nn.functional import cross_entropy

from rlhf.data.collate import labels
from rlhf.data.errors import RefusedError, SettingsError
from rlhf.stages.artifact import Artifact
from rlhf.stages.models import load_scalar, load_tokenizer
from rlhf.stages.packing import reads_packs
from rlhf.stages.reward.answers import judged
from rlhf.stages.reward.batches import Ranked, collate, passes
from rlhf.stages.reward.evaluate import scored
from rlhf.stages.reward.objective import margins, ranking_loss
from rlhf.stages.reward.train import language_head, language_loss, normaliser, optimise, starting_model
from rlhf.stages.runtime import Runtime

CPU = torch.device("cpu")
NewRun = Callable[..., Runtime]


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[NewRun]:
    made: list[Runtime] = []

    def make(**fields: Any) -> Runtime:
        made.append(new_run(tmp_path / f"run-{len(made)}", **fields))
        return made[-1]

    yield make
    for run in made:
        run.close()


def encoded(run: Runtime, num: int = 8, **more: Any) -> list[Ranked]:
    rows = [ranking(row["prompt"], row["responses"], row["ranks"], **more) for row in marked(num)]
    return tokenised(run, load_tokenizer(run.settings.model), rows)


def step(run: Runtime, batch: list[Ranked], head: bool = False) -> tuple[dict[str, float], torch.Tensor]:
    """Figures of one step of plain gradient descent, and the weights after it."""
    torch.manual_seed(1)
    tokenizer = load_tokenizer(run.settings.model)
    model = load_scalar(run.settings.model, tokenizer, new_head=True)
    lm_head = language_head(run.settings.model, tokenizer) if head else None
    found = optimise(run, model, torch.optim.SGD(model.parameters(), lr=0.1), batch, 0, lm_head)
    figures = {name: number.item() for name, number in found.items()}
    return figures, torch.cat([p.detach().flatten() for p in model.parameters()])


# --- margin


def test_the_margin_of_a_pair_is_the_scaled_difference_in_strength_and_never_below_zero() -> None:
    found = margins(torch.tensor([[3.0, 1.0, 1.5]]), 0.5)
    assert found.tolist() == [[[0, 1, 0.75], [0, 0, 0], [0, 0.25, 0]]]
    loss = ranking_loss(torch.tensor([[0.0, 2.0]]), torch.tensor([[1, 2]]), margin=margins(torch.tensor([[3.0, 1]]), 1))
    assert loss.item() == pytest.approx(math.log1p(math.exp(4)))  # behind by 2 where 2 ahead was asked for


def test_a_margin_is_for_training_alone(make_run: NewRun) -> None:
    plain, wide = make_run(), make_run(margin_scale=2.0)
    strong = encoded(plain, strengths=[4.0, 3.0, 2.0, 1.0])
    without, start = step(plain, strong)
    asked, pushed = step(wide, strong)
    assert asked["loss"] == without["loss"]
    assert asked["grad_norm"] > without["grad_norm"]
    assert not torch.equal(start, pushed)
    torch.testing.assert_close(step(wide, encoded(plain))[1], start, rtol=0, atol=0)  # no strengths, no margin


def test_a_judges_qualities_are_the_strengths_of_what_it_ranks() -> None:
    answers = ["Nothing.", "The brave fox found a red kite."]
    rows = [ranking("Write about a fox and a kite.", answers, [], strengths=[9.0, 8.0])]
    (found,) = judged("rlhf.recipes.demo_world:judge", rows, noise=0.0, seed=0)
    assert (found.ranks, found.strengths) == ([2, 1], [0, 1])


def test_margins_that_nothing_gives_are_told_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = rankings_file(tmp_path / "rows.jsonl", marked(12))
    run_reward(tmp_path / "reward", policy_folder(tmp_path), data, margin_scale=1.0)
    assert "reward.margin_scale has no effect: no answer in the data has a strength" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"loss": "best_of_k", "margin_scale": 1.0}, r"margin_scale works with loss 'pairs', not with 'best_of_k'"),
        ({"loss": "plackett_luce", "label_smoothing": 0.1}, "label_smoothing works with loss 'pairs'"),
        ({"loss": "plackett_luce", "ties": "soft"}, "works with ties 'drop' only"),
    ],
)
def test_options_that_do_not_go_together_are_refused_before_training(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        settings(data="x.jsonl", **fields)


# --- language-modelling loss


def test_the_language_modelling_loss_is_that_of_the_best_answers_tokens(make_run: NewRun) -> None:
    run = make_run()
    tokenizer = load_tokenizer(run.settings.model)
    rows = [ranking("ab", ["c", "defg!"], [2, 1]), ranking("a" * 9, ["bb", "ccc", "d"], [1, 1, 3])]
    data = tokenised(run, tokenizer, rows)
    assert [row.best for row in data] == [[False, True], [True, True, False]]
    assert [row.num_best_tokens for row in data] == [6, 3 + 4]
    best = [data[0].answers[1], *data[1].answers[:2]]
    policy = tiny_policy()
    losses = [
        cross_entropy(policy(torch.tensor([answer.input_ids])).logits[0, :-1], labels([answer])[0, 1:], reduction="sum")
        for answer in best
    ]
    scorer = load_scalar(run.settings.model, tokenizer, new_head=True)
    part, head = collate(data, 0, CPU), language_head(run.settings.model, tokenizer)
    _, hidden = scorer(part.ids, part.attention, with_hidden=True)
    found = language_loss(head, hidden, part, 13)
    assert found.item() == pytest.approx(sum(x.item() for x in losses) / 13, rel=1e-5)
    counted = part.best[:, None] & part.response.roll(-1, 1)
    junk = hidden.where(counted[..., None], torch.nan)
    assert language_loss(head, junk, part, 13).equal(found)  # neither prompt nor padding nor worse answers


def test_the_language_modelling_loss_trains_the_backbone_against_a_head_that_stays(make_run: NewRun) -> None:
    plain, both = make_run(), make_run(lm_coef=3.0)
    batch = encoded(plain)
    without, _ = step(plain, batch)
    found, _ = step(both, batch, head=True)
    assert "lm_loss" not in without
    assert found["loss"] == without["loss"]
    tokenizer = load_tokenizer(both.settings.model)
    head = language_head(both.settings.model, tokenizer)
    start = head.model.get_output_embeddings().weight.clone()
    scorer = load_scalar(both.settings.model, tokenizer, new_head=True)
    part = collate(batch, 0, CPU)
    num_tokens = int((part.response & part.best[:, None]).sum())
    _, hidden = scorer(part.ids, part.attention, with_hidden=True)
    assert found["lm_loss"] == pytest.approx(language_loss(head, hidden, part, num_tokens).item(), rel=1e-5)
    optimizer = torch.optim.SGD(scorer.parameters(), lr=0.02)
    seen = [optimise(both, scorer, optimizer, batch, 0, head)["lm_loss"] for _ in range(10)]
    assert seen[-1] < seen[0] - 0.1
    assert torch.equal(head.model.get_output_embeddings().weight, start)


def test_a_stage_with_a_language_modelling_loss_saves_a_plain_reward_model(tmp_path: Path) -> None:
    model, data = policy_folder(tmp_path), rankings_file(tmp_path / "rows.jsonl", marked(12))
    run_reward(tmp_path / "reward", model, data, lm_coef=1.0)
    assert all("lm_loss" in row for row in Artifact(tmp_path / "reward").metrics)
    assert not [name for name in load_file(tmp_path / "reward" / "model" / "model.safetensors") if "lm_head" in name]


# --- microbatches


@pytest.mark.parametrize(("pooling", "fields"), [("last", {}), ("mean", {"microbatch_tokens": 150})])
def test_packed_answers_give_the_step_that_padded_ones_give(
    make_run: NewRun, pooling: str, fields: dict[str, int]
) -> None:
    run = make_run(lm_coef=0.5, margin_scale=0.3, centering=0.01, pooling=pooling, **fields)
    batch, tokenizer = encoded(run, strengths=[4.0, 3.0, 2.5, 1.0]), load_tokenizer(run.settings.model)
    found = []
    for packed in (False, True):
        torch.manual_seed(1)
        scorer = starting_model(run, tokenizer)
        scorer.packed = packed and reads_packs(scorer.classifier, nullcontext())
        assert scorer.packed == packed
        head = language_head(run.settings.model, tokenizer)
        optimizer = torch.optim.SGD(scorer.parameters(), lr=0.1)
        figures = optimise(run, scorer, optimizer, batch, 0, head, multiple=1 if packed else 8)
        weights = torch.cat([p.detach().flatten() for p in scorer.parameters()])
        found.append(({name: number.item() for name, number in figures.items()}, weights))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-4)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0, atol=1e-5)


def test_the_stage_packs_where_it_is_asked_to_and_learns_the_same(tmp_path: Path) -> None:
    given = {"model": policy_folder(tmp_path), "data": rankings_file(tmp_path / "rows.jsonl", marked(48))}
    one, other = (
        run_reward(tmp_path / name, **given, packing=packing) for name, packing in (("padded", False), ("packed", True))
    )
    assert other["score_std"] == pytest.approx(one["score_std"], rel=1e-3)
    losses = [
        [row["loss"] for row in Artifact(tmp_path / name).metrics if "loss" in row] for name in ("padded", "packed")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize("cut", [{"microbatch_size": 3}, {"microbatch_tokens": 200}, {"microbatch_tokens": 1}])
def test_a_step_is_the_same_however_it_is_cut(make_run: NewRun, cut: dict[str, int]) -> None:
    options = {"lm_coef": 0.5, "margin_scale": 0.3, "centering": 0.01}
    whole = make_run(**options)
    batch = encoded(whole, strengths=[4.0, 3.0, 2.5, 1.0])
    batch[0].answers, batch[0].ranks, batch[0].strengths = batch[0].answers[:2], [1.0, 2.0], [2.0, 1.0]
    pieces = make_run(**options, **cut)
    assert len(passes(batch, list(range(8)), cut.get("microbatch_size"), cut.get("microbatch_tokens", 2**14))) > 1
    one, weights = step(whole, batch, head=True)
    other, same = step(pieces, batch, head=True)
    assert other == pytest.approx(one, rel=1e-5)
    torch.testing.assert_close(same, weights, rtol=1e-5, atol=1e-6)


def test_prompts_of_like_length_share_a_pass_and_no_prompt_is_taken_apart(make_run: NewRun) -> None:
    run = make_run()
    rows = [ranking("a" * length, ["b", "c", "d"], [1, 2, 3]) for length in (3, 30, 4, 31)]
    data = tokenised(run, load_tokenizer(run.settings.model), rows)
    short, long = len(data[2].answers[0].input_ids), len(data[3].answers[0].input_ids)
    for budget, expected in ((3 * 2 * long, [[3, 1], [2, 0]]), (3 * 2 * short, [[3], [1], [2, 0]])):
        assert passes(data, [0, 1, 2, 3], None, budget) == expected
    assert passes(data, [2, 0], None, 9) == [[2], [0]]
    assert passes(data, [2, 0], None, 2**14) == [[2, 0]]


def test_an_evaluation_within_a_budget_reads_each_row_once_and_scores_it_alike(make_run: NewRun) -> None:
    whole, cut = make_run(), make_run(microbatch_tokens=150)
    data = encoded(whole, 9)
    torch.manual_seed(1)
    scorer = load_scalar(whole.settings.model, load_tokenizer(whole.settings.model), new_head=True)
    found = []
    for run in (whole, cut):
        parts = [(rows, scores) for rows, scores, _ in scored(run, scorer, data, 0)]
        of_row = {row: found for rows, scores in parts for row, found in zip(rows, scores, strict=True)}
        assert sorted(of_row) == list(range(9))
        found.append(torch.stack([of_row[row] for row in range(9)]))
    assert len(list(scored(cut, scorer, data, 0))) > 2
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-5)


# --- scale


@pytest.mark.parametrize("normalise", ["answers", "reference", "none"])
@pytest.mark.parametrize("unit_scale", [True, False])
def test_what_scores_zero_and_what_one(make_run: NewRun, normalise: str, unit_scale: bool) -> None:
    run = make_run(normalise=normalise, unit_scale=unit_scale)
    data = encoded(run)
    torch.manual_seed(1)
    scorer = load_scalar(run.settings.model, load_tokenizer(run.settings.model), new_head=True)
    ((_, raw, part),) = scored(run, scorer, data, 0)
    scorer.mean, scorer.std = normaliser(run, scorer, data, 0)
    ((_, scores, _),) = scored(run, scorer, data, 0)
    zero = {"answers": scores, "reference": scores[part.ranks == 1], "none": scores - raw}[normalise]
    assert zero.mean().item() == pytest.approx(0, abs=1e-5)
    spread = raw.std(unbiased=False).item() if normalise == "none" or not unit_scale else 1
    assert scores.std(unbiased=False).item() == pytest.approx(spread, rel=1e-4)
    assert abs(raw.mean().item()) > 0.01
    assert abs(spread - 1) > 0.1 or unit_scale


# --- where it starts


def test_a_reward_model_goes_on_with_its_own_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = rankings_file(tmp_path / "rows.jsonl", marked(40))
    first = run_reward(tmp_path / "first", policy_folder(tmp_path), data, num_epochs=2, pooling="mean")
    assert "is a reward model" not in capsys.readouterr().out
    start = str(tmp_path / "first" / "model")
    again = run_reward(tmp_path / "again", start, data, learning_rate=0.0, pooling="mean", seed=5)
    said = capsys.readouterr().out
    assert f"{start} is a reward model already: training goes on from its own head" in said
    assert "pooling" not in said
    heads = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("first", "again")]
    assert torch.equal(heads[0]["score.weight"], heads[1]["score.weight"])
    for name in ("accuracy", "score_mean", "score_std"):
        assert again[name] == pytest.approx(first[name], rel=1e-5)
    run_reward(tmp_path / "otherwise", start, data, learning_rate=0.0)
    assert "set reward.pooling=mean to go on as it was" in capsys.readouterr().out


def test_the_language_modelling_loss_needs_a_language_model_to_start_from(tmp_path: Path) -> None:
    data = rankings_file(tmp_path / "rows.jsonl", marked(12))
    run_reward(tmp_path / "first", policy_folder(tmp_path), data)
    with pytest.raises(RefusedError, match=r"reward\.lm_coef: .* is a reward model, not a language model"):
        run_reward(tmp_path / "again", str(tmp_path / "first" / "model"), data, lm_coef=1.0)
