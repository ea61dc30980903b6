"""Steps whose loss or gradient norm is not finite, in sft, reward and ppo: none is taken, each is named and counted.

After `max_skipped` of them in a row the stage stops. Pretraining has a rule of its own (pretrain.health): it goes back
to a checkpoint and on with other data.
"""

import math
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer

from rlhf.data.errors import Diverged
from rlhf.stages import checkpoints
from rlhf.stages.logs import learning_rates
from rlhf.stages.optimizers import scaled_step
from rlhf.stages.runtime import Runtime


def all_finite(numbers: Mapping[str, float]) -> bool:
    return all(map(math.isfinite, numbers.values()))


def take_step(run: Runtime[Any], optimizers: Iterable[AcceleratedOptimizer], numbers: dict[str, float]) -> bool:
    """Let the optimizers step, unless one of the step's `numbers` is not finite; the gradients are gone in any case.

    The numbers are those of all processes together, so that all of them decide alike.
    """
    scaler = run.accelerator.scaler
    leave_out_overflow(scaler, numbers)
    fine = all_finite(numbers)
    if scaler is not None:
        scaled_step(scaler, [optimizer.optimizer for optimizer in optimizers], take=fine)
        return fine
    for optimizer in optimizers:
        if fine:
            optimizer.step()
        optimizer.zero_grad()
    return fine


def leave_out_overflow(scaler: torch.amp.GradScaler | None, numbers: dict[str, float]) -> None:
    """Take gradient norms that are not finite out of `numbers` where there is a scaler of float16: while it looks for
    its scale, it leaves out such steps itself."""
    if scaler is not None:
        for name in [name for name in numbers if name.endswith("grad_norm") and not math.isfinite(numbers[name])]:
            del numbers[name]


def count_step(run: Runtime[Any], step: int, numbers: Mapping[str, float]) -> bool:
    """Whether step `step` (from 1) was taken: one that was not is told of and counted; Diverged if too many."""
    taken = all_finite(numbers)
    if not taken:
        tell_skipped(run, f"step {step}", numbers)
    count_in_a_row(run, step, taken, described(numbers))
    return taken


def tell_skipped(run: Runtime[Any], step: str, numbers: Mapping[str, float]) -> None:
    """Name and count a step that was not taken; `step` says which, as a person would."""
    run.state["num_skipped"] = run.state.get("num_skipped", 0) + 1
    run.say(f"{step} skipped: {described(numbers)}")


def count_in_a_row(run: Runtime[Any], step: int, taken: bool, because: str) -> None:
    """Count the steps in a row that were not taken, up to `step` (from 1); Diverged at `max_skipped` of them.

    All processes count together.
    """
    in_a_row = run.state["skipped_in_a_row"] = 0 if taken else run.state.get("skipped_in_a_row", 0) + 1
    if in_a_row < run.settings.max_skipped:
        return
    good = run.from_main(lambda: _last_good_checkpoint(run, step - in_a_row))
    raise Diverged(
        f"{in_a_row} step{'s' * (in_a_row > 1)} in a row {'were' if in_a_row > 1 else 'was'} skipped, the last of them "
        f"step {step} ({because}): training diverged; lower {learning_rates(run.settings.stage)}. {how_to_go_on(good)}"
    )


def how_to_go_on(checkpoint: int | None) -> str:
    """From the checkpoint of this step, if there is one."""
    if checkpoint is None:
        return "There is no good checkpoint: run again to start over"
    return f"The last good checkpoint is step {checkpoint}; run again to go on from it"


def described(numbers: Mapping[str, float]) -> str:
    """'loss nan, gradient norm inf'"""
    names = (name.replace("grad_norm", "gradient_norm").replace("_", " ") for name in numbers)
    return ", ".join(f"{name} {value:.4g}" for name, value in zip(names, numbers.values(), strict=True))


def _last_good_checkpoint(run: Runtime[Any], last_taken: int) -> int | None:
    """The newest checkpoint from whose weights a step could be taken. One that was written after the last such step
    is removed: nothing shows that its weights are any good."""
    while (newest := checkpoints.newest_checkpoint(run.folder)) is not None and newest.step >= last_taken:
        run.say(f"removed the checkpoint of step {newest.step}: no step could be taken from it")
        shutil.rmtree(newest.folder)
    return None if newest is None else newest.step
