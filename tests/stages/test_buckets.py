"""Gradients of two processes lie in what they send."""

from pathlib import Path
from typing import Any

import torch
from processes_world import in_two_processes
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rlhf.stages.buckets import gradients_in_buckets

NUM_STEPS, NUM_MICROBATCHES = 3, 3


def layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(300, 300) for _ in range(6)])


def learn(rank: int) -> list[dict[str, Any]]:
    """Of each step: storages of gradients before and after it, and how far gradients are from those of one process."""
    torch.distributed.init_process_group("gloo")
    model = layers()
    copied = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    texts = torch.randn(2, NUM_MICROBATCHES, 4, 300)
    found = []
    for _ in range(NUM_STEPS):
        gradients_in_buckets(copied)
        before = [weight.grad.data_ptr() for weight in model.parameters() if weight.grad is not None]
        num_storages = len({w.grad.untyped_storage().data_ptr() for w in model.parameters() if w.grad is not None})
        alone = layers()
        alone.load_state_dict(model.state_dict())
        for number, text in enumerate(texts[rank], start=1):
            copied.require_backward_grad_sync = number == NUM_MICROBATCHES
            copied(text).square().mean().backward()
        torch.stack([alone(text).square().mean() for text in texts.flatten(0, 1)]).sum().div(2).backward()
        pairs = list(zip(model.parameters(), alone.parameters(), strict=True))
        found.append({
            "before": before, "num_storages": num_storages,
            "after": [weight.grad.data_ptr() for weight in model.parameters() if weight.grad is not None],
            "apart": max((ours.grad - its.grad).abs().max().item() for ours, its in pairs),  # type: ignore[operator,union-attr]
        })  # fmt: skip
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_each_gradient_is_added_up_in_its_part_of_a_bucket_and_nowhere_else(tmp_path: Path) -> None:
    """A bucket is full when it has one MiB or more: three layers of 361,200 bytes each."""
    for steps in in_two_processes(tmp_path, learn):
        for step in steps:
            assert len(step["before"]) == 12  # six weights and biases have theirs before the first pass
            assert step["before"] == step["after"] == steps[0]["before"]
            assert step["num_storages"] == 2
            assert step["apart"] < 1e-6
