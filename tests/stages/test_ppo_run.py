"""A whole PPO stage on tiny models: what it counts, what it keeps, what it saves and what it refuses."""

import copy
import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from ppo_world import EOS, flat, model_folders, run_ppo, tiny_scalar
from safetensors.torch import load_file
from stages_world import without_clock
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf.data.errors import RefusedError, SettingsError
from rlhf.data.rows import Prompt
from rlhf.data.tokens import encode_prompt
from rlhf.stages.artifact import Artifact
from rlhf.stages.engines import Responses
from rlhf.stages.engines.static import StaticEngine
from rlhf.stages.models import load_scalar, load_tokenizer, save_folder
from rlhf.stages.ppo import rollout as rollout_module
from rlhf.stages.ppo import train as train_module
from rlhf.stages.ppo.evaluate import Evaluator
from rlhf.stages.runtime import Runtime

Given = dict[str, str]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Given:
    return model_folders(tmp_path_factory.mktemp("models"), tokenizer)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [without_clock(row) for row in Artifact(folder).metrics]


def weights(folder: Path, part: str = "model") -> dict[str, torch.Tensor]:
    return load_file(folder / part / "model.safetensors")


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, ...]]]:
    """Prompts of every rollout as they reach the sampler, in the order of sampling; evaluations left out."""
    seen: list[list[tuple[int, ...]]] = []
    sample, evaluating = StaticEngine.generate, []
    evaluate = Evaluator.__call__

    def watch(self: StaticEngine, prompts: list[list[int]], *more: Any) -> Responses:
        if not evaluating:
            seen.append([tuple(prompt) for prompt in prompts])
        return sample(self, prompts, *more)

    def evaluate_aside(self: Evaluator, *more: Any) -> Any:
        evaluating.append(True)
        try:
            return evaluate(self, *more)
        finally:
            evaluating.pop()

    monkeypatch.setattr(StaticEngine, "generate", watch)
    monkeypatch.setattr(Evaluator, "__call__", evaluate_aside)
    return seen


# --- counting


def test_each_prompt_is_drawn_once_before_any_is_drawn_again(given: Given, tmp_path: Path, drawn: list) -> None:
    run_ppo(tmp_path / "ppo", given, num_iterations=3)  # 24 episodes from 12 prompts: twice through
    assert [len(prompts) for prompts in drawn] == [8] * 3
    stream = [prompt for prompts in drawn for prompt in prompts]
    epochs = [stream[i : i + 12] for i in range(0, 24, 12)]
    assert all(len(set(epoch)) == 12 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 2


def test_samples_of_a_prompt_lie_in_one_rollout_and_differ(given: Given, tmp_path: Path, drawn: list) -> None:
    seen: list[Any] = []
    original = rollout_module.collect

    def watch(*arguments: Any, **options: Any) -> Any:
        seen.append(original(*arguments, **options))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_module, "collect", watch)
        run_ppo(tmp_path / "ppo", given, num_samples_per_prompt=4, num_iterations=3)
    assert [sorted(Counter(prompts).values()) for prompts in drawn] == [[4, 4]] * 3
    assert len({prompt for prompts in drawn for prompt in prompts}) == 6  # 3 · 8 / 4 prompts, none twice
    responses = [tuple(row) for rollout in seen for row in rollout.responses.tolist()]
    assert len(set(responses)) == 24


def test_optimiser_steps_are_iterations_times_epochs_times_minibatches(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: dict[int, list[float]] = {}
    step = torch.optim.AdamW.step

    def watch(self: torch.optim.AdamW, *arguments: Any, **options: Any) -> Any:
        rates.setdefault(id(self), []).append(self.param_groups[0]["lr"])
        return step(self, *arguments, **options)

    monkeypatch.setattr(torch.optim.AdamW, "step", watch)
    run_ppo(tmp_path / "ppo", given, num_iterations=4, num_epochs=3, num_minibatches=2, learning_rate=4e-3,
            critic_learning_rate=8e-3, microbatch_size=1)  # fmt: skip
    policy, critic = rates.values()
    assert policy == pytest.approx([rate for rate in (4e-3, 3e-3, 2e-3, 1e-3) for _ in range(6)])
    assert critic == pytest.approx([2 * rate for rate in policy])
    assert [row["learning_rate"] for row in rows(tmp_path / "ppo")] == pytest.approx([4e-3, 3e-3, 2e-3, 1e-3])


def test_rollout_statistics_are_true_means(given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    original = rollout_module.collect

    def watch(*arguments: Any, **options: Any) -> Any:
        seen.append(original(*arguments, **options))
        return seen[-1]

    monkeypatch.setattr(train_module, "collect", watch)
    run_ppo(tmp_path / "ppo", given, temperature=2.0)
    for row, rollout in zip(rows(tmp_path / "ppo"), seen, strict=True):
        mask, tokens = rollout.mask, rollout.mask.sum().item()
        kl = torch.where(mask, rollout.logprobs - rollout.ref_logprobs, 0.0)
        assert row["score"] == pytest.approx(rollout.scores.mean().item(), abs=1e-5)
        assert row["score_std"] == pytest.approx(rollout.scores.std(unbiased=False).item(), rel=1e-3)
        assert row["kl"] == pytest.approx(kl.sum().item() / 8, abs=1e-5)
        assert row["length"] == tokens / 8
        assert row["eos_share"] == (rollout.responses == EOS).logical_and(mask).any(-1).sum().item() / 8
        assert row["entropy"] == pytest.approx(rollout.entropy[mask].sum().item() / tokens, rel=1e-5)


# --- states


def test_a_process_that_hangs_in_an_evaluation_is_told_in_the_first_one_too(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, evaluate = [], Evaluator.__call__

    def watch(self: Evaluator, *more: Any) -> Any:
        told.append(self.run.stopping.watched or self.run.stopping.training)
        return evaluate(self, *more)

    monkeypatch.setattr(Evaluator, "__call__", watch)
    run_ppo(tmp_path, given)
    assert len(told) > 1
    assert all(told)


def test_reference_and_reward_model_are_the_same_after_the_run_and_never_had_a_gradient(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[int, tuple[torch.nn.Module, torch.Tensor]] = {}
    evaluate = Evaluator.__call__

    def watch(self: Evaluator, *more: Any) -> Any:
        for model in vars(self).values():
            if isinstance(model, torch.nn.Module):
                seen.setdefault(id(model), (model, flat(model)))
        return evaluate(self, *more)

    monkeypatch.setattr(Evaluator, "__call__", watch)
    run_ppo(tmp_path / "ppo", given, num_iterations=3)
    assert len(seen) == 2  # the evaluator holds reference and reward model
    for model, before in seen.values():
        assert torch.equal(flat(model), before)
        assert not model.training
        assert all(p.grad is None and not p.requires_grad for p in model.parameters())


def test_dropout_that_the_model_was_saved_with_is_off_in_rollout_and_update(given: Given, tmp_path: Path) -> None:
    shutil.copytree(given["model"], tmp_path / "policy")
    config = json.loads((tmp_path / "policy" / "config.json").read_text())
    (tmp_path / "policy" / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.5}))
    run_ppo(tmp_path / "ppo", {**given, "model": str(tmp_path / "policy")}, learning_rate=0.0)
    for row in rows(tmp_path / "ppo"):
        assert abs(row["kl"]) < 1e-4
        assert row["ratio"] == pytest.approx(1, abs=1e-6)
        assert row["approx_kl"] == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(("spoilt", "message"), [
    ("policy", "the update sees other log-probabilities than the rollout"),
    ("reference", "policy and reference differ by"),
])  # fmt: skip
def test_the_self_check_stops_a_run_and_names_the_cause(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoilt: str, message: str
) -> None:
    original = rollout_module.collect

    def spoil(*arguments: Any, **options: Any) -> Any:
        rollout = original(*arguments, **options)
        if spoilt == "policy":  # as if the rollout had been scored by another law
            rollout.logprobs = rollout.logprobs + 0.01
            rollout.ref_logprobs = rollout.ref_logprobs + 0.01
        else:
            rollout.ref_logprobs = rollout.ref_logprobs + 0.01
        return rollout

    monkeypatch.setattr(train_module, "collect", spoil)
    with pytest.raises(RuntimeError, match=message):
        run_ppo(tmp_path / "ppo", given)
    assert not Artifact(tmp_path / "ppo").sealed
    assert not rows(tmp_path / "ppo")


def test_a_seed_decides_a_run_bit_for_bit(given: Given, tmp_path: Path) -> None:
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        run_ppo(tmp_path / name, given, seed=seed, num_iterations=1)
    assert same(weights(tmp_path / "one"), weights(tmp_path / "two"))
    assert rows(tmp_path / "one") == rows(tmp_path / "two")
    assert not same(weights(tmp_path / "one"), weights(tmp_path / "other"))


def test_a_resumed_run_with_every_state_there_is_ends_like_an_unbroken_one(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": f"text {i} " * 4}) + "\n" for i in range(9)))
    fields = {
        "kl_target": 0.1, "kl_horizon": 50, "normalise_scores": True, "ema_decay": 0.9, "ptx_coef": 0.1,
        "ptx_data": str(tmp_path / "text.jsonl"), "ptx_batch_size": 4, "ptx_block_size": 8, "num_iterations": 6,
        "warmup_iterations": 3, "critic_warmup_iterations": 1, "eval_every": 3, "num_samples_per_prompt": 2,
    }  # fmt: skip
    run_ppo(tmp_path / "straight", given, **fields)
    log = Runtime.log

    def die(self: Runtime, step: int, *more: Any, **options: Any) -> None:
        log(self, step, *more, **options)
        if step == 5:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(Runtime, "log", die)
        with pytest.raises(Killed):
            run_ppo(tmp_path / "broken", given, **fields)
    run_ppo(tmp_path / "broken", given, **fields)  # from step 4
    for part in ("model", "critic", "ema"):
        assert same(weights(tmp_path / "broken", part), weights(tmp_path / "straight", part)), part
    assert rows(tmp_path / "broken") == rows(tmp_path / "straight")
    metrics = [Artifact(tmp_path / name).manifest["metrics"] | {"peak_gib": 0} for name in ("broken", "straight")]
    assert metrics[0] == metrics[1]


# --- what is saved


def test_the_saved_policy_has_the_keys_it_started_with_and_its_own_generation_config(
    given: Given, tmp_path: Path
) -> None:
    run_ppo(tmp_path / "ppo", given, ema_decay=0.5)
    start = load_file(Path(given["model"]) / "model.safetensors")
    for part in ("model", "ema"):
        assert weights(tmp_path / "ppo", part).keys() == start.keys()
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "ppo" / part)
        config = model.generation_config
        assert (config.temperature, config.top_k, config.top_p, config.do_sample) == (None, None, None, True)
        assert (config.eos_token_id, config.pad_token_id) == (EOS, EOS)
        AutoTokenizer.from_pretrained(tmp_path / "ppo" / part)


def test_the_saved_critic_has_its_learned_head(given: Given, tmp_path: Path) -> None:
    run_ppo(tmp_path / "ppo", given)
    folder = str(tmp_path / "ppo" / "critic")
    critic = load_scalar(folder, load_tokenizer(folder))
    start = tiny_scalar()
    assert not torch.equal(critic.classifier.score.weight, start.classifier.score.weight)


def test_the_moving_average_moves_and_lags_behind(given: Given, tmp_path: Path) -> None:
    run_ppo(tmp_path / "ppo", given, ema_decay=0.9, eval_every=4)
    start = load_file(Path(given["model"]) / "model.safetensors")
    average, last = weights(tmp_path / "ppo", "ema"), weights(tmp_path / "ppo")

    def distance(one: dict[str, torch.Tensor]) -> float:
        return math.sqrt(sum((one[name] - start[name]).square().sum().item() for name in start))

    assert 0 < distance(average) < distance(last)


# --- what is refused


@pytest.mark.parametrize("name", [
    "top_k", "top_p", "min_p", "typical_p", "repetition_penalty", "do_sample", "no_repeat_ngram_size",
    "min_new_tokens", "bad_words_ids", "generation_config",
])  # fmt: skip
def test_nothing_that_bends_the_sampling_law_can_be_asked_for(given: Given, tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match=f"ppo: no setting '{name}'"):
        run_ppo(tmp_path / "ppo", given, **{name: 1})
    with pytest.raises(SettingsError, match=r"ppo\.temperature"):
        run_ppo(tmp_path / "ppo", given, temperature=0.0)


def test_more_tokens_than_positions_are_refused(given: Given, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="is 80, but the model has 64 positions"):
        run_ppo(tmp_path / "ppo", given, max_new_tokens=64)


def test_prompts_that_are_all_too_long_are_refused_with_their_number(given: Given, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="none of 12 prompts fits in 2 tokens"):
        run_ppo(tmp_path / "ppo", given, max_prompt_length=2)


def test_prompts_that_are_too_long_are_left_out_and_the_others_keep_their_ids(
    given: Given, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[int], Prompt]] = []

    def watch(*arguments: Any, **options: Any) -> Any:
        seen.extend(zip(arguments[5], arguments[6], strict=True))
        return rollout_module.collect(*arguments, **options)

    monkeypatch.setattr(train_module, "collect", watch)
    run_ppo(tmp_path / "ppo", given, max_prompt_length=5)  # of one to four letters between two role tokens
    texts = {prompt.messages[0]["content"] for _, prompt in seen}
    assert texts == {"a", "bb", "ccc", "e", "ff", "ggg", "i", "jj", "kkk"}
    assert all(ids == encode_prompt(tokenizer, prompt.messages) for ids, prompt in seen)


def test_a_reward_model_that_reads_text_otherwise_is_refused_with_both_values(
    given: Given, tmp_path: Path, tokenizer: Any
) -> None:
    other = copy.deepcopy(tokenizer)
    other.chat_template = "{{ messages[0].content }}"
    save_folder(tmp_path / "reward", tiny_scalar(), other)
    with pytest.raises(RefusedError, match=r"ppo\.model and ppo\.reward_model differ in chat_template: \w+ and \w+"):
        run_ppo(tmp_path / "ppo", {**given, "reward_model": str(tmp_path / "reward")})


def test_an_encoder_decoder_is_refused(given: Given, tmp_path: Path, tokenizer: Any) -> None:
    tokenizer.save_pretrained(tmp_path / "t5")
    (tmp_path / "t5" / "config.json").write_text('{"model_type": "t5", "vocab_size": 260}')
    with pytest.raises(RefusedError, match="no causal language model in"):
        run_ppo(tmp_path / "ppo", {**given, "model": str(tmp_path / "t5")})
