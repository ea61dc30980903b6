"""Two processes do what one does: the same step, the same statistics, each prompt once."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ppo_world import World, make_targets, model_folders, run_ppo, settings
from processes_world import in_two_processes
from stages_world import tiny_policy
from torch import Tensor

from rlhf.data.collate import Blocks
from rlhf.data.rows import Prompt
from rlhf.stages import watchdog
from rlhf.stages.artifact import Artifact
from rlhf.stages.engines import Responses
from rlhf.stages.engines.static import StaticEngine
from rlhf.stages.microbatches import Piece
from rlhf.stages.models import PolicyModel, load_tokenizer
from rlhf.stages.ppo import update as update_module
from rlhf.stages.ppo.evaluate import Evaluator
from rlhf.stages.ppo.prompts import Asked
from rlhf.stages.ppo.rewards import load_rewards
from rlhf.stages.ppo.rollout import Rollout, policy_engine
from rlhf.stages.ppo.shaping import Targets, shaped_scores, targets
from rlhf.stages.ppo.train import rollout_stats
from rlhf.stages.runtime import Runtime

VARIANTS: list[dict[str, Any]] = [
    {"aggregation": "token_mean", "microbatch_size": 2},
    {"aggregation": "sequence_mean", "kl_in": "loss", "entropy_coef": 0.1},
    {"aggregation": "constant", "num_epochs": 2, "whiten_rewards": True, "normalise_scores": True},
    {"ptx_coef": 0.3, "ptx_data": "held_out.jsonl", "ptx_batch_size": 4, "ptx_block_size": 8, "microbatch_size": 1},
    {
        "layout": "shared_trunk", "value_coef": 0.5, "microbatch_size": 2, "ptx_coef": 0.3,
        "ptx_data": "held_out.jsonl", "ptx_batch_size": 4, "ptx_block_size": 8,
    },
    {"layout": "adapters", "lora": {"r": 2, "alpha": 8}, "num_epochs": 2, "microbatch_size": 2},
    {"num_epochs": 3, "microbatch_tokens": 22, "packing": True},  # one process has 29 tokens, the other 20
]  # fmt: skip
BLOCKS = Blocks(np.arange(1, 34), 8, "text")
"""Of raw text; the file that the settings name is only there to be found."""
STEP: dict[str, Any] = {
    "sgd": True, "num_epochs": 1, "num_minibatches": 1, "learning_rate": 0.01,
    "max_grad_norm": 1e9,  # clipping would hide a gradient of the wrong size
}  # fmt: skip

COLLECTIVES = [
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "gather_object", "scatter_object_list",
    "broadcast", "broadcast_object_list", "barrier",
]  # fmt: skip


@dataclass
class Found:
    """What one process saw."""

    weights: list[Tensor]
    stats: list[dict[str, float]]
    rollout_stats: list[dict[str, float]]
    whitened: list[Tensor]
    moments: list[Any]
    gradients: list[Tensor]
    noise: Tensor
    answers: list[tuple[str, str]]
    drawn: list[list[tuple[int, ...]]]
    metrics: list[dict[str, Any]]
    final: dict[str, Any]
    adapters: list[dict[str, Any]]
    waited: list[tuple[str, bool]]
    """For the other process, in what of torch.distributed, and whether that was written down."""
    left_out: tuple[dict[str, float], bool] | None = None
    """Statistics of a step for which the last process has no loss, and whether it moved weights."""


def act(root: Path, given: dict[str, str], rank: int, of: int) -> Found:
    """The same eight episodes for one process or shared by two, then an evaluation and a whole stage."""
    found = Found([], [], [], [], [], [], torch.zeros(0), [], [], [], {}, [], [])
    mine = list(range(rank, 8, of))
    for number, variant in enumerate(VARIANTS):
        chosen = {**given, **STEP, **variant}
        sgd, ptx = chosen.pop("sgd"), BLOCKS if "ptx_coef" in variant else None
        if ptx is not None:
            chosen["ptx_data"] = str(root / variant["ptx_data"])
        (folder := root / f"update-{of}-{number}").mkdir(exist_ok=True)
        run = Runtime(settings(**chosen), folder)
        world = World(run, sgd=sgd, ptx=ptx)
        whole = world.rollout()
        part = whole.cut(Piece(mine, whole.input_ids.shape[1] - 6, 6))
        learned = targets(part, shaped_scores(run, part), 0.05, run.settings)
        if number == 0:  # targets that do not depend on whitening
            given_targets = make_targets(whole)
            learned = Targets(*(getattr(given_targets, f.name)[mine] for f in fields(Targets)))
        found.whitened.append(learned.advantages)
        found.rollout_stats.append(rollout_stats(run, part, part.scores, learned.returns, 0.1, ["one"]))
        found.stats.append(world.update(part, learned))
        found.weights.append(world.weights())
        found.moments.append(run.state.get("score_moments"))
        run.seed(per_process=True)
        found.noise = torch.rand(4)
        if number == 0:
            found.left_out = without_a_loss(World(run), part, learned, spoils=rank == of - 1)
            tokenizer = load_tokenizer(given["model"])
            reader = PolicyModel(tiny_policy())
            rewards = load_rewards(settings(**given), tokenizer, reader.model)
            messages = [[{"role": "user", "content": f"p{i}"}] for i in range(9)]
            prompts = [Asked([30 + i] * (1 + i % 3), Prompt(messages[i], {})) for i in range(9)]
            evaluator = Evaluator(run, tokenizer, reader, rewards, prompts, {reader: policy_engine(run, reader)})
            found.answers = [(answer.prompt, answer.response) for answer in evaluator(reader)]
        run.close()
    sample, drawn = StaticEngine.generate, found.drawn

    def watch(self: StaticEngine, prompts: list[list[int]], *more: Any) -> Responses:
        drawn.append([tuple(prompt) for prompt in prompts])
        return sample(self, prompts, *more)

    StaticEngine.generate = watch  # type: ignore[method-assign]
    (root / f"stage-{of}").mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in COLLECTIVES:
            patch.setattr(torch.distributed, name, noting(found.waited, getattr(torch.distributed, name)))
        found.final = run_ppo(
            root / f"stage-{of}", given, num_iterations=3, eval_every=3, num_samples_per_prompt=2, save_every=1,
            kl_target=0.1, kl_horizon=50,
        )  # fmt: skip
    StaticEngine.generate = sample  # type: ignore[method-assign]
    found.metrics = Artifact(root / f"stage-{of}").metrics
    small: dict[str, Any] = {"layout": "adapters", "num_iterations": 2, "save_every": 1, "ema_decay": 0.5}
    for name in ("unbroken", "broken") if of == 2 else ():
        if name == "broken":
            end_at_the_second_row(root / name, given, small)
        (root / name).mkdir(exist_ok=True)
        found.adapters.append(run_ppo(root / name, given, **small))
    return found


def without_a_loss(world: World, part: Rollout, learned: Targets, spoils: bool) -> tuple[dict[str, float], bool]:
    before, loss = world.weights(), update_module.policy_loss

    def spoilt(*given: Any) -> Any:
        found, stats = loss(*given)
        return (found * torch.nan, stats) if spoils else (found, stats)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update_module, "policy_loss", spoilt)
        return world.update(part, learned), not torch.equal(before, world.weights())


def noting(waited: list[tuple[str, bool]], collective: Callable[..., Any]) -> Callable[..., Any]:
    def note(*arguments: Any, **options: Any) -> Any:
        if watchdog._current is not None:
            waited.append((collective.__name__, watchdog._current._place.waits))
        return collective(*arguments, **options)

    return note


def end_at_the_second_row(folder: Path, given: dict[str, str], chosen: dict[str, Any]) -> None:
    """Run the stage until its second row of metrics, which is after the first checkpoint."""
    log = Runtime.log

    def log_and_end(self: Runtime, step: int, *more: Any, **options: Any) -> None:
        log(self, step, *more, **options)
        if step == 2:
            raise KeyboardInterrupt

    folder.mkdir(exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runtime, "log", log_and_end)
        with pytest.raises(KeyboardInterrupt):
            run_ppo(folder, given, **chosen)


def process(rank: int, root: Path, given: dict[str, str]) -> Found:
    return act(root, given, rank, 2)


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> tuple[Found, list[Found]]:
    """What one process found, and what each of two did."""
    root = tmp_path_factory.mktemp("distributed")
    given = model_folders(root, tokenizer)
    both = in_two_processes(root, process, root, given)
    return act(root, given, 0, 1), both


Outcome = tuple[Found, list[Found]]


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_two_processes_make_the_step_of_one(outcome: Outcome, variant: int) -> None:
    alone, both = outcome
    start = alone.weights[variant]
    for found in both:
        torch.testing.assert_close(found.weights[variant], start, rtol=1e-5, atol=1e-5)
    assert torch.equal(both[0].weights[variant], both[1].weights[variant])


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_statistics_are_those_of_all_episodes_and_equal_everywhere(outcome: Outcome, variant: int) -> None:
    alone, both = outcome
    for found in both:
        assert found.stats[variant] == pytest.approx(alone.stats[variant], rel=1e-5, abs=1e-5)
        assert found.rollout_stats[variant] == pytest.approx(alone.rollout_stats[variant], rel=1e-5, abs=1e-5)
    assert both[0].stats == both[1].stats


def test_no_process_takes_a_step_for_which_one_of_them_has_no_loss(outcome: Outcome) -> None:
    """Though each decides by itself, on its device."""
    assert [found.left_out for found in (outcome[0], *outcome[1])] == [({}, False)] * 3


def test_whitening_and_score_moments_are_those_of_all_episodes(outcome: Outcome) -> None:
    alone, both = outcome
    for variant in (1, 2):
        for rank, found in enumerate(both):
            ours, theirs = found.whitened[variant], alone.whitened[variant][rank::2]
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert both[0].moments[2] == both[1].moments[2] == pytest.approx(alone.moments[2])
    assert alone.moments[2] == {"count": 8, "sum": 28, "squares": 140}  # scores 0 … 7


def test_an_evaluation_counts_each_of_an_odd_number_of_prompts_once_and_in_order(outcome: Outcome) -> None:
    for found in outcome[1]:
        assert [prompt for prompt, _ in found.answers] == [f"p{i}" for i in range(9)]
    assert outcome[1][0].answers == outcome[1][1].answers


def test_processes_draw_from_streams_of_their_own(outcome: Outcome) -> None:
    one, two = (found.noise for found in outcome[1])
    assert not torch.equal(one, two)


def test_a_rollouts_prompts_are_shared_without_doubles(outcome: Outcome) -> None:
    alone, both = outcome
    ours = [prompts for prompts in alone.drawn if len(prompts) == 8]
    theirs = list(zip(*(found.drawn for found in both), strict=True))
    shared = [sorted(a + b) for a, b in theirs if len(a) == len(b) == 4]
    assert len(ours) == len(shared) == 3
    assert [sorted(prompts) for prompts in ours] == shared


def test_a_stage_of_two_processes_writes_once_and_returns_the_same_figures_everywhere(outcome: Outcome) -> None:
    alone, both = outcome
    assert [row["step"] for row in both[0].metrics] == [1, 2, 3]
    assert both[0].metrics[0].keys() == alone.metrics[0].keys()
    assert both[0].final.keys() == alone.final.keys()
    assert both[0].final == both[1].final
    assert abs(both[0].metrics[0]["kl"]) < 1e-5


def test_a_process_of_a_stage_says_wherever_it_waits_for_the_other(outcome: Outcome) -> None:
    for found in outcome[1]:
        assert [name for name, said in found.waited if not said] == []
        assert {"all_reduce", "all_gather_object", "broadcast_object_list"} <= {name for name, _ in found.waited}


def test_two_processes_resume_adapters_as_if_nothing_had_happened(outcome: Outcome) -> None:
    for found in outcome[1]:
        unbroken, broken = ({k: v for k, v in metrics.items() if k != "peak_gib"} for metrics in found.adapters)
        assert unbroken == broken
