"""One step off: rollouts that are sampled while the one before is learned from, and what they must not change."""

import copy
import threading
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from layouts_world import LAYOUTS, rows
from ppo_world import flat, model_folders, run_ppo, settings
from safetensors.torch import load_file
from stages_world import tiny_policy

from rlhf.data.errors import RefusedError, SettingsError, Stopped
from rlhf.stages.artifact import Artifact
from rlhf.stages.engines import Responses
from rlhf.stages.engines.static import StaticEngine
from rlhf.stages.models import PolicyModel
from rlhf.stages.ppo import placement
from rlhf.stages.ppo import train as train_module
from rlhf.stages.ppo.ahead import Ahead, copy_of
from rlhf.stages.ppo.evaluate import Evaluator
from rlhf.stages.ppo.health import KL_EPISODES, Health
from rlhf.stages.ppo.rollout import Rollout
from rlhf.stages.ppo.shaping import Targets, importance_weights, targets
from rlhf.stages.ppo.update import Updater
from rlhf.stages.runtime import Runtime

AHEAD: dict[str, Any] = {"rollout": {"one_step_off": True}}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, str]:
    return model_folders(tmp_path_factory.mktemp("models"), tokenizer)


def weights(folder: Path, part: str = "model") -> torch.Tensor:
    return torch.cat([tensor.flatten() for _, tensor in sorted(load_file(folder / part / "model.safetensors").items())])


def in_thread() -> bool:
    return threading.current_thread() is not threading.main_thread()


class Watched:
    """A whole run, the policy that each update began with, and what it learned from."""

    def __init__(self, folder: Path, given: dict[str, str], **fields: Any) -> None:
        self.policies: list[Any] = []
        self.learned: list[tuple[Rollout, Targets, Any]] = []
        self.folder = folder
        update = Updater.__call__

        def shaping(rollout: Rollout, scores: torch.Tensor, kl_coef: float, chosen: Any) -> Targets:
            self.learned.append((rollout, targets(rollout, scores, kl_coef, chosen), chosen))
            return self.learned[-1][1]

        def updating(updater: Updater, *arguments: Any) -> Any:
            # Copied rather than made, which would draw random numbers from those of the thread that samples.
            self.policies.append(copy.deepcopy(updater.run.unwrap(updater.policy).model))
            return update(updater, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_module, "targets", shaping)
            patch.setattr(Updater, "__call__", updating)
            run_ppo(folder, given, **fields)


def share_of_ascii(prompts: list[str], responses: list[str]) -> list[float]:
    """A reward."""
    return [sum(map(str.isascii, response)) / max(len(response), 1) for response in responses]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, given: dict[str, str]) -> Watched:
    """Some iterations for a reward that is soon learned."""
    models = {name: value for name, value in given.items() if name != "reward_model"}
    rewards = [{"function": f"{__name__}:share_of_ascii"}]
    return Watched(
        tmp_path_factory.mktemp("finished") / "ppo", models, rewards=rewards, kl_coef=0.0, rollout_batch_size=32,
        num_iterations=8, learning_rate=0.02, schedule="constant", eval_every=8, **AHEAD,
    )  # fmt: skip


# --- what it learns from


def test_a_rollout_comes_from_the_policy_of_one_update_ago_and_the_first_from_the_start(finished: Watched) -> None:
    assert [row["staleness"] for row in rows(finished.folder)] == [0] + [1] * 7
    for number, (rollout, _, chosen) in enumerate(finished.learned):
        length = rollout.mask.shape[1]
        for policy, expected in (
            (finished.policies[max(number - 1, 0)], rollout.sampled_logprobs),
            (finished.policies[number], rollout.logprobs),  # the ratio of the update begins at 1
        ):
            text = rollout.input_ids, rollout.attention_mask, length
            with torch.no_grad():
                logprobs, _, _ = PolicyModel(policy)(*text, chosen.temperature)
            gap = torch.where(rollout.mask, logprobs - expected, 0.0).abs().max().item()
            assert gap < 1e-4, f"iteration {number}"
    assert not torch.equal(flat(finished.policies[0]), flat(finished.policies[1]))


def test_importance_weights_are_1_without_staleness_and_the_truncated_ratio_with_it(finished: Watched) -> None:
    for number, (rollout, learned, chosen) in enumerate(finished.learned):
        found = importance_weights(rollout, chosen)
        assert found is not None
        ratio = torch.where(rollout.mask, rollout.logprobs - rollout.sampled_logprobs, 0.0).exp()
        torch.testing.assert_close(found, ratio.clamp(max=2.0))
        assert (found - 1).abs().max().item() < 1e-4 if number == 0 else (found - 1).abs().max().item() > 0.01
        plain = chosen.model_copy(update={"rollout": chosen.rollout.model_copy(update={"importance_cap": None})})
        unweighed = targets(rollout, rollout.scores, 0.0, plain)
        torch.testing.assert_close(learned.advantages, unweighed.advantages * found)
        assert torch.equal(learned.returns, unweighed.returns)
        row = rows(finished.folder)[number]
        assert row["importance_weight"] == pytest.approx(found[rollout.mask].mean().item(), rel=1e-5)


def test_the_policy_finds_what_pays(finished: Watched) -> None:
    scores = [row["score"] for row in rows(finished.folder)]
    assert sum(scores[-3:]) / 3 > sum(scores[:3]) / 3 + 0.05, scores  # about 0.2 whatever the seed


def test_at_a_learning_rate_of_0_it_is_the_synchronous_schedule(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample = StaticEngine.generate

    def drawn_by_prompts(self: StaticEngine, prompts: list[list[int]], *law: Any) -> Responses:
        torch.manual_seed(sum(map(sum, prompts)))
        return sample(self, prompts, *law)

    monkeypatch.setattr(StaticEngine, "generate", drawn_by_prompts)
    ahead = {"one_step_off": True, "importance_cap": None}
    for name, rollout in (("ahead", ahead), ("in_turn", {})):
        run_ppo(tmp_path / name, given, learning_rate=0.0, num_iterations=3, rollout=rollout)
    ours, theirs = rows(tmp_path / "ahead"), rows(tmp_path / "in_turn")
    assert [row.pop("staleness") for row in ours] == [0, 1, 1]
    assert ours == theirs
    assert torch.equal(weights(tmp_path / "ahead", "critic"), weights(tmp_path / "in_turn", "critic"))


def test_a_seed_decides_a_run_whatever_the_thread_is_late_for(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, update, evaluate = StaticEngine.generate, Updater.__call__, Evaluator.__call__
    begun: list[int] = []
    updated: list[int] = []
    sampling, disturbed = threading.Event(), []

    def sample_late(self: StaticEngine, *arguments: Any) -> Responses:
        if in_thread():
            sampling.set()
            begun.append(1)
            while len(updated) < len(begun) - 1:  # the update is over before it samples
                time.sleep(0.01)
            time.sleep(0.1)
        sampled = sample(self, *arguments)
        sampling.clear()
        return sampled

    def count(self: Updater, *arguments: Any) -> Any:
        stats = update(self, *arguments)
        updated.append(1)
        return stats

    def evaluate_alone(self: Evaluator, policy: Any) -> Any:
        disturbed.append(sampling.is_set())
        return evaluate(self, policy)

    def update_late(self: Updater, *arguments: Any) -> Any:
        time.sleep(0.2)
        return update(self, *arguments)

    monkeypatch.setattr(Evaluator, "__call__", evaluate_alone)
    fields = {"num_iterations": 3, "eval_every": 2, **AHEAD}
    with monkeypatch.context() as patch:
        patch.setattr(StaticEngine, "generate", sample_late)
        patch.setattr(Updater, "__call__", count)
        run_ppo(tmp_path / "one", given, **fields)
    with monkeypatch.context() as patch:
        patch.setattr(Updater, "__call__", update_late)
        run_ppo(tmp_path / "two", given, **fields)
    assert torch.equal(weights(tmp_path / "one"), weights(tmp_path / "two"))
    assert rows(tmp_path / "one") == rows(tmp_path / "two")
    assert disturbed == [False] * 6  # an evaluation begins when nothing is under way


@pytest.mark.parametrize(("layout", "engine"), [
    ("shared_trunk", "static"), ("adapters", "static"), ("separate", "transformers"),
])  # fmt: skip
def test_it_works_in_every_layout_and_with_generate(
    given: dict[str, str], tmp_path: Path, layout: str, engine: str
) -> None:
    rollout = {"one_step_off": True, "engine": engine}
    run_ppo(tmp_path / "ppo", given, num_iterations=2, rollout=rollout, kl_coef=0.0, **LAYOUTS[layout])
    found = rows(tmp_path / "ppo")
    assert found[0]["sampler_gap"] == pytest.approx(0, abs=1e-5)
    assert found[1]["sampler_gap"] > 1e-4


def test_a_copy_shares_what_is_frozen_and_follows_what_is_trained() -> None:
    model = tiny_policy()
    model.model.embed_tokens.requires_grad_(False)  # tied: the output embeddings too
    copied, refresh = copy_of(model, torch.device("cpu"), torch.bfloat16)
    assert copied.lm_head.weight is copied.model.embed_tokens.weight is model.lm_head.weight
    theirs, own = model.model.norm.weight, copied.model.norm.weight
    with torch.no_grad():
        theirs.fill_(3.0)
    refresh()
    assert own.dtype == torch.bfloat16
    assert own.eq(3).all()
    with torch.no_grad():
        theirs.fill_(4.0)
    assert own.eq(3).all()


# --- how it ends


def test_an_error_in_the_thread_ends_the_stage_with_its_message_and_its_own_traceback(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, calls = StaticEngine.generate, []

    def fails_at_the_third(self: StaticEngine, *arguments: Any) -> Responses:
        calls.append(in_thread())
        if in_thread() and sum(calls) == 3:
            raise ValueError("the sampler is gone")
        return sample(self, *arguments)

    monkeypatch.setattr(StaticEngine, "generate", fails_at_the_third)
    with pytest.raises(ValueError, match="the sampler is gone") as error:
        run_ppo(tmp_path / "ppo", given, **AHEAD)
    assert "fails_at_the_third" in [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]
    assert len(rows(tmp_path / "ppo")) == 2


def test_a_run_that_is_asked_to_stop_does_not_wait_for_the_thread_and_resumes_with_a_new_rollout(
    given: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, log, hangs, go_on = StaticEngine.generate, Runtime.log, threading.Event(), threading.Event()

    def hangs_at_the_third(self: StaticEngine, *arguments: Any) -> Responses:
        if in_thread():
            seeds.append(torch.initial_seed())
            if len(seeds) == 3:
                hangs.set()
                go_on.wait()
                raise Stopped(0)  # it is to draw nothing beside the tests that follow
        return sample(self, *arguments)

    def stop_after_the_second(self: Runtime, step: int, *more: Any, **options: Any) -> None:
        log(self, step, *more, **options)
        if step == 2:
            hangs.wait()
            self.stopping.code = 143

    seeds: list[int] = []
    monkeypatch.setattr(StaticEngine, "generate", hangs_at_the_third)
    with monkeypatch.context() as patch:
        patch.setattr(Runtime, "log", stop_after_the_second)
        with pytest.raises(Stopped):
            run_ppo(tmp_path / "ppo", given, eval_every=9, **AHEAD)
    assert not go_on.is_set()
    run_ppo(tmp_path / "ppo", given, eval_every=9, **AHEAD)
    go_on.set()
    assert len(set(seeds)) == 4
    assert seeds[3] == seeds[2]  # of the third iteration, whenever it is sampled
    assert [(row["step"], row["staleness"]) for row in rows(tmp_path / "ppo")] == [(1, 0), (2, 1), (3, 0), (4, 1)]


@pytest.mark.parametrize("engine", ["static", "transformers"])
def test_a_thread_that_samples_ends_with_the_interpreter(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not, torch aborts the process, and the exit code with it."""
    chosen = settings(rollout={"one_step_off": True, "engine": engine})
    alone: Any = SimpleNamespace(
        settings=chosen, device=torch.device("cpu"), num_processes=1, rank=0, low_precision=None, folder=Path()
    )
    monkeypatch.setattr(placement._ending, "is_set", lambda: True)
    ahead = Ahead(alone, PolicyModel(tiny_policy()), pytest.fail, lambda _: [])
    with pytest.raises(Stopped):
        ahead.generate([[7, 8]], 4, 1.0, [], 0)


# --- what is said and refused


def test_a_kl_below_zero_of_older_samples_is_no_finding() -> None:
    row = {"kl": -1.0, "score_std": 1.0}
    assert [finding.name for finding in Health(KL_EPISODES, 8).check(row)] == ["negative_kl"]
    assert not Health(KL_EPISODES, 8).check({**row, "staleness": 1.0})


def test_it_is_part_of_the_key_with_its_cap() -> None:
    plain, ahead = settings(), settings(**AHEAD)
    capped = settings(rollout={"one_step_off": True, "importance_cap": 1.5})
    found = [chosen.result_settings()["rollout"] for chosen in (plain, ahead, capped)]
    assert found == [{}, *({"importance_cap": cap, "one_step_off": True} for cap in (2.0, 1.5))]


def test_trying_again_with_less_memory_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"auto_microbatch is not possible with rollout\.one_step_off"):
        settings(auto_microbatch=True, **AHEAD)


@pytest.mark.parametrize(("engine", "run", "message"), [
    ({"engine": "auto"}, {"device": torch.device("cuda", 0), "num_processes": 1}, "sampling needs a GPU of its own"),
    ({"engine": "vllm", "server_url": "http://127.0.0.1:1"}, {"device": torch.device("cpu"), "num_processes": 2},
     "with engine vllm it works with one process, there are 2"),
])  # fmt: skip
def test_a_sampler_that_has_no_device_of_its_own_is_refused(
    engine: dict[str, str], run: dict[str, Any], message: str
) -> None:
    alone: Any = SimpleNamespace(settings=settings(rollout={"one_step_off": True, **engine}), **run)
    with pytest.raises(RefusedError, match=message):
        Ahead(alone, PolicyModel(tiny_policy()), pytest.fail, lambda _: [])


def test_a_finished_run_is_sealed_like_any_other(finished: Watched) -> None:
    assert Artifact(finished.folder).sealed
