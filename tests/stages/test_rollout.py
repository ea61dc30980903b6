"""A rollout holds what was sampled and what every model says about it; the update sees the same numbers."""

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stages_world import byte_tokenizer, tiny_policy

from rlhf.data.rows import Prompt
from rlhf.stages import models
from rlhf.stages.engines.choice import make_engine
from rlhf.stages.microbatches import Piece
from rlhf.stages.models import PolicyModel, load_scalar
from rlhf.stages.ppo import train
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.evaluate import Evaluator
from rlhf.stages.ppo.objective import after_the_end
from rlhf.stages.ppo.reward_models import ModelReward
from rlhf.stages.ppo.rewards import Rewards
from rlhf.stages.ppo.rollout import Rollout, collect, placed, response_values
from rlhf.stages.ppo.shaping import shaped_scores

ASKED = [Prompt([{"role": "user", "content": "unread"}], {})] * 3  # the reward model reads ids
PROMPTS = [[7, 8, 9, 10], [11], [12, 0, 13]]  # 0 is pad and eos, and stands inside a prompt


@pytest.fixture
def scorer(policy_folder: Path, tokenizer: Any) -> Any:
    torch.manual_seed(1)
    return load_scalar(str(policy_folder), tokenizer, new_head=True).eval()


def settings(**fields: Any) -> PPOSettings:
    return PPOSettings.load({"data": "unused.jsonl", "max_new_tokens": 8, "temperature": 0.7, **fields}, "ppo")


def roll(policy: Any, scorer: Any, reference: Any = None, **fields: Any) -> Rollout:
    policy, reference = PolicyModel(policy), PolicyModel(reference or policy)
    torch.manual_seed(3)
    stops = [0, 17, 40, *range(100, 200)]  # many, so that some responses end early
    size = fields.pop("microbatch_size", None)
    chosen = settings(**fields)
    engine = make_engine(policy.model, batch_size=chosen.generation_batch_size)
    return collect(
        engine, policy, reference, rewards(scorer), scorer, PROMPTS, ASKED, chosen, stops, byte_tokenizer(), size
    )


def rewards(scorer: Any) -> Rewards:
    return Rewards([ModelReward("reward_model", copy.deepcopy(scorer))])  # it freezes its models


def shape(rollout: Rollout, state: dict[str, Any] | None = None, **fields: Any) -> torch.Tensor:
    alone: Any = SimpleNamespace(settings=settings(**fields), state={} if state is None else state, sum=lambda x: x)
    return shaped_scores(alone, rollout)


def test_policy_and_reference_with_equal_weights_have_no_kl(policy: Any, scorer: Any) -> None:
    assert roll(policy, scorer).kl.abs().max().item() < 1e-5


def test_the_ratio_is_one_before_the_first_update_whatever_the_microbatch(policy: Any, scorer: Any) -> None:
    rollout = roll(policy, scorer)
    for row in range(3):
        part = rollout.cut(Piece([row], rollout.input_ids.shape[1] - rollout.mask.shape[1], rollout.mask.shape[1]))
        logprobs, _, _ = PolicyModel(policy)(part.input_ids, part.attention_mask, part.mask.shape[1], 0.7)
        assert torch.where(part.mask, logprobs - part.logprobs, 0.0).abs().max().item() < 1e-5


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_dropout_in_the_config_changes_nothing_in_eval_mode(scorer: Any, shape: str) -> None:
    policy = tiny_policy(shape, dropout=0.3)
    assert roll(policy, scorer).kl.abs().max().item() < 1e-5


def test_a_prompt_that_contains_the_pad_id_is_attended_to(policy: Any, scorer: Any) -> None:
    rollout = roll(policy, scorer)
    prompt = rollout.attention_mask[:, : -rollout.mask.shape[1]]
    assert prompt.sum(-1).tolist() == [4, 1, 3]


def test_junk_after_the_stop_token_reaches_no_logprob_value_or_score(policy: Any, scorer: Any) -> None:
    rollout = roll(policy, scorer)
    length = rollout.mask.shape[1]
    assert not rollout.mask.all(), "the test needs a response that ends early"
    junk = torch.where(rollout.attention_mask, rollout.input_ids, 99)
    with torch.no_grad():
        logprobs, _, _ = PolicyModel(policy)(junk, rollout.attention_mask, length, 0.7)
        values = response_values(scorer, junk, rollout.attention_mask, length)
    assert torch.where(rollout.mask, logprobs - rollout.logprobs, 0.0).abs().max().item() < 1e-6
    assert torch.where(rollout.mask, values - rollout.values, 0.0).abs().max().item() < 1e-6


def test_a_value_judges_the_state_before_its_token(scorer: Any) -> None:
    ids, mask = torch.tensor([[7, 8, 9, 10, 11]]), torch.ones(1, 5).bool()
    with torch.no_grad():
        values = response_values(scorer, ids, mask, 2)
        everywhere = scorer(ids, mask)
    assert torch.equal(values[0], everywhere[0, [2, 3]])  # before the tokens at 3 and 4


def test_a_reference_on_a_second_gpu_reads_the_stop_token_that_was_drawn(policy: Any, scorer: Any) -> None:
    together, apart = (roll(policy, scorer, placement=name) for name in ("together", "second_gpu"))
    last = apart.responses[apart.ended].gather(-1, apart.lengths[apart.ended][:, None] - 1)
    assert (last != 0).any()
    torch.testing.assert_close(apart.ref_logprobs, together.ref_logprobs, rtol=0, atol=1e-5)
    assert torch.equal(apart.scores, together.scores)


def test_the_score_is_that_of_prompt_and_response_alone_whose_end_is_eos_as_in_training(
    policy: Any, scorer: Any
) -> None:
    rollout = roll(policy, scorer)
    for row in range(3):
        kept = rollout.input_ids[row][rollout.attention_mask[row]][None]
        if rollout.ended[row]:
            kept[0, -1] = 0  # whichever stop token was drawn
        with torch.no_grad():
            alone = scorer(kept, torch.ones_like(kept).bool())[0, -1]
        assert rollout.scores[row].item() == pytest.approx(alone.item(), abs=1e-5)


def test_an_answer_without_eos_pays_and_one_that_ends_in_the_last_slot_does_not(policy: Any, scorer: Any) -> None:
    rollout = roll(policy, scorer)
    rollout = rollout.cut(Piece([0, 1], rollout.input_ids.shape[1] - rollout.mask.shape[1], rollout.mask.shape[1]))
    rollout.scores, rollout.ended = torch.tensor([0.7, 0.7]), torch.tensor([False, True])
    assert shape(rollout).tolist() == pytest.approx([0.7, 0.7])
    assert shape(rollout, missing_eos_penalty=1.0).tolist() == pytest.approx([-1.0, 0.7])
    assert shape(rollout, missing_eos_penalty=1.0, missing_eos="subtract").tolist() == pytest.approx([-0.3, 0.7])


def test_a_response_that_ends_in_the_last_slot_has_ended(policy: Any, scorer: Any) -> None:
    torch.manual_seed(2)
    reader = PolicyModel(policy)
    chosen, every = settings(max_new_tokens=1), list(range(260))
    rollout = collect(
        make_engine(policy), reader, reader, rewards(scorer), None, PROMPTS, ASKED, chosen, every, byte_tokenizer()
    )
    assert rollout.ended.all()
    assert rollout.mask.all()


@pytest.mark.parametrize("placement", ["eos", "after_eos"])
def test_what_the_models_say_does_not_depend_on_who_shares_a_microbatch(
    policy: Any, scorer: Any, placement: str
) -> None:
    """Nor on how many are sampled at a time, at a temperature at which sampling draws nothing."""
    fields = {"score_placement": placement, "temperature": 1e-4}
    one, whole, apart = (
        roll(policy, scorer, **fields, **more) for more in ({"microbatch_size": 1}, {}, {"generation_batch_size": 1})
    )
    for other in (whole, apart):
        width = one.mask.shape[1]
        assert torch.equal(one.mask, other.mask)
        rewarded = after_the_end(one.mask) if placement == "after_eos" else one.mask
        for name in ("logprobs", "ref_logprobs", "values"):
            ours, theirs = (torch.where(rewarded, getattr(x, name)[:, :width], 0.0) for x in (one, other))
            counted = rewarded if name == "values" else one.mask
            torch.testing.assert_close(torch.where(counted, ours, 0.0), torch.where(counted, theirs, 0.0),
                                       atol=1e-4, rtol=1e-4)  # fmt: skip
    if placement == "after_eos":
        shorter = whole.lengths < whole.mask.shape[1]
        after = whole.values[shorter].gather(1, whole.lengths[shorter][:, None])
        assert (after != 0).all()


def test_no_model_is_given_more_tokens_at_a_time_than_the_budget(
    policy: Any, scorer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Policy, reference and critic read the prompts of 4, 1 and 3 tokens with their responses, the reward model too."""
    read: list[tuple[int, int]] = []
    read_rows = models.read_rows

    def watch(model: Any, ids: torch.Tensor, *more: Any) -> Any:
        read.append((ids.shape[0], ids.shape[1]))
        return read_rows(model, ids, *more)

    monkeypatch.setattr(models, "read_rows", watch)
    whole = roll(policy, scorer, max_new_tokens=4)
    assert len(read) == 4
    assert all(rows == 3 for rows, _ in read)
    read.clear()
    parts = roll(policy, scorer, max_new_tokens=4, microbatch_tokens=10)
    assert all(rows * width <= 10 or rows == 1 for rows, width in read)
    torch.testing.assert_close(parts.scores, whole.scores, rtol=1e-5, atol=1e-5)
    for name in ("logprobs", "ref_logprobs", "values"):
        ours, theirs = (getattr(rollout, name)[whole.mask] for rollout in (parts, whole))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_offloaded_models_are_put_away_also_when_memory_runs_out() -> None:
    moves: list[Any] = []
    model: Any = SimpleNamespace(to=moves.append)
    with pytest.raises(MemoryError), placed(torch.device("meta"), True, model):
        raise MemoryError
    assert moves == [torch.device("meta"), "cpu"]


def test_a_process_without_held_out_prompts_asks_no_model_and_no_reward(policy: Any) -> None:
    """It asks the engine alone, which may be a server that all processes wait for."""
    asked: list[list[list[int]]] = []
    engine: Any = SimpleNamespace(generate=lambda prompts, *law: asked.append(prompts))
    run: Any = SimpleNamespace(settings=settings())
    evaluator = Evaluator(run, byte_tokenizer(), pytest.fail, pytest.fail, [], {policy: engine})
    assert evaluator._answers(policy, []) == []
    assert asked == [[]]


def test_the_self_check_looks_at_tokens_and_not_at_what_stands_behind_a_short_response(
    policy: Any, scorer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = roll(policy, scorer)
    rows = rollout.lengths.argsort().tolist()  # the shortest first
    assert rollout.lengths[rows[0]] < rollout.lengths[rows[-1]]
    monkeypatch.setattr(train, "pieces", lambda *_, **__: [Piece(rows, 4, int(rollout.lengths.max()))])
    alone: Any = SimpleNamespace(
        settings=settings(), accelerator=SimpleNamespace(mixed_precision="no"), unwrap=lambda model: model,
        microbatch_size=None,
    )  # fmt: skip
    train.self_check(alone, PolicyModel(policy), rollout, first=True)
