"""Two processes train the reward model that one trains: the same step, the same figures, each row once."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from processes_world import in_two_processes
from reward_world import marked, policy_folder, ranking, rankings_file, run_reward, settings, tokenised
from torch import Tensor

from rlhf.data.errors import RefusedError
from rlhf.stages.artifact import Artifact
from rlhf.stages.models import load_scalar, load_tokenizer
from rlhf.stages.reward.evaluate import accuracy
from rlhf.stages.reward.train import language_head, normaliser, optimise
from rlhf.stages.runtime import Runtime

VARIANTS: list[dict[str, Any]] = [
    {},
    {"microbatch_size": 3},
    {"microbatch_tokens": 200, "lm_coef": 0.5, "margin_scale": 0.3, "centering": 0.01, "normalise": "reference"},
]


@dataclass
class Found:
    """What one process saw."""

    weights: list[Tensor] = field(default_factory=list)
    figures: list[dict[str, float]] = field(default_factory=list)
    final: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    sends_buffers: bool = False


def act(root: Path, model: str, data: str, of: int) -> Found:
    """One step and the figures of nine rows for each variant, then a whole stage."""
    found = Found()
    for number, variant in enumerate(VARIANTS):
        (folder := root / f"step-{of}-{number}").mkdir(exist_ok=True)
        run = Runtime(settings(model=model, data=data, **variant), folder)
        tokenizer = load_tokenizer(model)
        rows = [ranking(row["prompt"], row["responses"], row["ranks"], strengths=[4.0, 3, 2, 1]) for row in marked(9)]
        rows[1].responses[2:] = rows[1].ranks[2:] = rows[1].strengths[2:] = []  # type: ignore[index]
        encoded = tokenised(run, tokenizer, rows)
        torch.manual_seed(1)
        scorer = load_scalar(model, tokenizer, new_head=True)
        head = language_head(model, tokenizer) if "lm_coef" in variant else None
        optimizer = torch.optim.SGD(scorer.parameters(), lr=0.05)
        wrapped, optimizer = run.accelerator.prepare(scorer, optimizer)
        found.sends_buffers |= of > 1 and wrapped.will_sync_module_buffers()
        made = optimise(run, wrapped, optimizer, encoded[:8], 0, head)
        figures = {name: number.item() for name, number in made.items()}
        scorer = run.unwrap(wrapped)
        figures["accuracy"] = accuracy(run, scorer, encoded, 0)
        figures["mean"], figures["std"] = normaliser(run, scorer, encoded, 0)
        found.figures.append(figures)
        found.weights.append(torch.cat([p.detach().flatten() for p in scorer.parameters()]))
        run.close()
    (root / f"stage-{of}").mkdir(exist_ok=True)
    found.final = run_reward(root / f"stage-{of}", model, data, num_epochs=2, microbatch_tokens=300, eval_every=2)
    found.metrics = Artifact(root / f"stage-{of}").metrics
    return found


def process(rank: int, root: Path, model: str, data: str) -> Found:
    found = act(root, model, data, 2)
    found.refused = [
        refused(root / "refused", model=model, data=str(root / f"others-{rank}.jsonl")),
        uneven(root, model, data),
        refused(root / "refused", model=model, data=data, auto_microbatch=True),
    ]
    return found


def refused(folder: Path, **fields: Any) -> str:
    """What a run says that cannot begin."""
    folder.mkdir(exist_ok=True)
    with pytest.raises(RefusedError) as error:
        Runtime(settings(**fields), folder)
    return str(error.value)


def uneven(folder: Path, model: str, data: str) -> str:
    """The same where seven rows are all that there are for a step of eight."""
    run = Runtime(settings(model=model, data=data), folder)
    with pytest.raises(RefusedError) as error:
        run.batch_size("global_batch_size", 8, 7)
    assert run.batch_size("global_batch_size", 8, 6) == 6
    run.close()
    return str(error.value)


Outcome = tuple[Found, list[Found]]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """What one process found, and what each of two did."""
    root = tmp_path_factory.mktemp("distributed")
    model, data = policy_folder(root), rankings_file(root / "rows.jsonl", marked(40))
    for rank in range(2):
        rankings_file(root / f"others-{rank}.jsonl", marked(40, seed=rank))
    return act(root, model, data, 1), in_two_processes(root, process, root, model, data)


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_two_processes_make_the_step_of_one(outcome: Outcome, variant: int) -> None:
    alone, both = outcome
    for found in both:
        torch.testing.assert_close(found.weights[variant], alone.weights[variant], rtol=1e-5, atol=1e-5)
    assert torch.equal(both[0].weights[variant], both[1].weights[variant])


@pytest.mark.parametrize("variant", range(len(VARIANTS)))
def test_figures_are_those_of_all_rows_of_which_each_counts_once(outcome: Outcome, variant: int) -> None:
    alone, both = outcome
    for found in both:
        assert found.figures[variant] == pytest.approx(alone.figures[variant], rel=1e-4, abs=1e-6)
    assert both[0].figures == both[1].figures


def test_a_stage_of_two_processes_ends_as_that_of_one(outcome: Outcome) -> None:
    alone, both = outcome
    for found in both:
        assert [row["step"] for row in found.metrics] == [row["step"] for row in alone.metrics]
        for name in ("accuracy", "num_prompts", "num_eval_prompts", "score_mean", "score_std"):
            assert found.final[name] == pytest.approx(alone.final[name], rel=1e-3), name


def test_processes_that_read_unlike_rows_are_refused(outcome: Outcome) -> None:
    for rank, found in enumerate(outcome[1]):
        assert found.refused[0].startswith(f"reward.data: is not the same in rank {rank} and rank {1 - rank}; ")


def test_several_processes_are_refused_where_one_would_leave_the_others_waiting(outcome: Outcome) -> None:
    for found in outcome[1]:
        assert found.refused[2].startswith("reward.auto_microbatch: works with one process, there are 2")


def test_rows_that_are_too_few_for_a_step_and_odd_are_refused_with_a_number_that_will_do(outcome: Outcome) -> None:
    for found in outcome[1]:
        assert found.refused[1].startswith("reward.global_batch_size: there are 7 rows for a step of 8, which 2 proc")
        assert found.refused[1].endswith("; set reward.global_batch_size=6")


def test_no_process_waits_for_another_s_buffers(outcome: Outcome) -> None:
    assert [found.sends_buffers for found in outcome[1]] == [False, False]
