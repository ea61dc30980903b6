"""What spread models read without learning from it, of which the processes have unequally much, leaves their training
as it was: before the first step and between two."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from processes_world import in_two_processes
from resume_world import make_world, rows
from safetensors.torch import load_file
from stages_world import run_stage, tiny_policy
from torch.distributed.fsdp import FSDPModule

from rlhf.stages import sharding
from rlhf.stages.artifact import Artifact
from rlhf.stages.ppo.evaluate import Answer, Evaluator

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
FIELDS: dict[str, dict[str, Any]] = {
    "pretrain": {"num_steps": 3, "eval_every": 1, "block_size": 24, "sample_prompts": ["ab"], "sample_length": 4},
    "sft": {"num_epochs": 1},
    "reward": {"num_epochs": 1, "eval_every": 1},
    "ppo": {"num_iterations": 3, "eval_every": 1},
}
HUNG_AFTER = 60  # seconds; a process that waits for ever ends the test


def make_all(root: Path, world: dict[str, dict[str, Any]]) -> None:
    for stage, fields in FIELDS.items():
        suffix = "txt" if stage == "pretrain" else "jsonl"
        one = {"eval_data": str(root / f"one.{suffix}"), "stop_hung_after": HUNG_AFTER}
        run_stage(stage, root / stage, **{**world[stage], **one, **fields})


def process(rank: int, root: Path, world: dict[str, dict[str, Any]]) -> list[int]:
    """How many answers count in each of PPO's evaluations, in this process."""
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    counts = []
    evaluate = Evaluator.__call__

    def counted(*arguments: Any) -> list[Answer]:
        answers = evaluate(*arguments)
        counts.append(len(answers))
        return answers

    Evaluator.__call__ = counted  # type: ignore[method-assign]
    make_all(root, world)
    return counts


def test_a_process_without_a_held_out_row_trains_with_one_that_has_it(tmp_path: Path) -> None:
    world = make_world(tmp_path / "world", "llama", dropout=0.0)
    alone, both = tmp_path / "alone", tmp_path / "both"
    for folder in (alone, both):
        folder.mkdir()
        for suffix in ("txt", "jsonl"):
            first, _, _ = (tmp_path / "world" / f"held_out.{suffix}").read_text().partition("\n")
            (folder / f"one.{suffix}").write_text(first + "\n")
    make_all(alone, world)
    counts = in_two_processes(both, process, both, world)
    for stage in ("pretrain", "sft", "reward"):
        found, expected = (load_file(root / stage / "model" / "model.safetensors") for root in (both, alone))
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-5)
        for one, other in zip(rows(both / stage), rows(alone / stage), strict=True):
            assert one == pytest.approx(other, rel=1e-5)
    assert len(rows(both / "ppo")) == 3  # its samples come from a stream of each process
    assert Artifact(both / "ppo").sealed
    assert counts == [[1] * 4] * 2  # of SFT, then after each iteration


def noted(rank: int) -> list[tuple[int, int]]:
    """What a model has noted of a pass that no backward pass follows, before and after it settles: as torch has a word
    for that, and as torch 2.11 does, which has none."""
    torch.distributed.init_process_group("gloo")
    found = []
    for _ in range(2):
        model = tiny_policy().model
        sharding.spread(model, sharding.Sharding(True), torch.device("cpu"), None)
        state = model._get_fsdp_state()
        model(torch.arange(4)[None])
        groups = [one._fsdp_param_group for one in state._state_ctx.all_states if one._fsdp_param_group]
        lists = [state._comm_ctx.post_forward_order, *(group._post_forward_indices for group in groups)]
        before = sum(map(len, lists))
        sharding.settle()
        found.append((before, sum(map(len, lists))))
        if hasattr(FSDPModule, "reset_iter_state"):
            del FSDPModule.reset_iter_state
    return found


def test_what_was_noted_of_a_pass_is_dropped_with_any_torch(tmp_path: Path) -> None:
    for found in in_two_processes(tmp_path, noted):
        for before, after in found:
            assert before > 4  # the root, two layers, each also in the order of all
            assert after == 0
