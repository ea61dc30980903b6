"""The update phase: optimiser steps of policy and critic on one rollout."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean

import torch
from torch import Tensor

from rlhf.data.collate import Blocks, batch_indices
from rlhf.stages.bad_numbers import all_finite, described, tell_skipped
from rlhf.stages.late import are_finite, step_if_fine
from rlhf.stages.microbatches import Piece, pieces
from rlhf.stages.models import PolicyModel
from rlhf.stages.optimizers import trained
from rlhf.stages.out_of_memory import doing, within_memory
from rlhf.stages.packing import PackedRows
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.objective import kl_estimate, loss_denominator, policy_loss, update_log_ratio, value_loss
from rlhf.stages.ppo.rollout import Rollout, response_values
from rlhf.stages.ppo.shaping import Targets
from rlhf.stages.runtime import Runtime

TARGET_KL_SLACK = 1.5  # as in OpenAI's Spinning Up


class Updater:
    """Policy, critic and their optimisers; call it once per rollout. Without a critic the policy reads the values."""

    def __init__(
        self,
        run: Runtime[PPOSettings],
        policy: torch.nn.Module,
        critic: torch.nn.Module | None,
        optimizers: list[torch.optim.Optimizer],
        ptx_blocks: Blocks | None,
    ) -> None:
        self.run, self.policy, self.critic = run, policy, critic
        self.learners = [("policy", policy, optimizers[0])]
        if critic is not None:
            self.learners.append(("critic", critic, optimizers[1]))
        self.ptx_blocks = ptx_blocks  # of raw text
        self.fault = ""
        """What was wrong with the last optimiser step that was left out."""
        self.packed = all(run.unwrap(model).packed for _, model, _ in self.learners)
        self.unwrapped_policy: PolicyModel = run.unwrap(policy)  # here, since it goes through all modules
        self.ema = MovingAverage(self.unwrapped_policy, run.settings.ema_decay)
        if run.settings.ema_decay is not None:
            run.tensors["ema"] = self.ema.weights

    def __call__(self, rollout: Rollout, targets: Targets, iteration: int, kl_coef: float) -> dict[str, float]:
        """num_epochs × num_minibatches optimiser steps; returns statistics over those that were made.

        A step with a loss or gradient norm that is not finite is left out; where all are, nothing is returned.
        """
        run, settings = self.run, self.run.settings
        size = len(rollout.mask) // settings.num_minibatches
        num_steps = settings.num_epochs * settings.num_minibatches
        policy_learns = iteration >= settings.critic_warmup_iterations
        learners = [learner for learner in self.learners if learner[0] == "critic" or policy_learns]
        models, optimizers = [model for _, model, _ in learners], [optimizer for *_, optimizer in learners]
        steps: list[Step] = []
        lengths = rollout.prompt_lengths.tolist(), targets.value_mask.sum(-1).tolist()
        limit = settings.microbatch_tokens

        @cache
        def cut(rows: tuple[int, ...], max_rows: int | None) -> list[Piece]:
            found = pieces(*lengths, max_rows, rows, max_tokens=limit, device=run.device.type, packed=self.packed)
            text = rollout.input_ids, rollout.attention_mask, rollout.mask.shape[1]
            return [piece.packed(*text) for piece in found] if self.packed else found

        seed = settings.seed * 1_000_003 + iteration
        minibatches = [sorted(batch_indices(len(rollout.mask), size, step, seed)) for step in range(num_steps)]
        for minibatch in minibatches:  # before the first pass: to find their tokens waits for all that was launched
            cut(tuple(minibatch), run.microbatch_size)
        for step, minibatch in enumerate(minibatches):
            ptx_step = iteration * num_steps + step
            make = partial(self._gradients, rollout, targets, minibatch, cut, models, policy_learns, kl_coef, ptx_step)
            stats, ratios, too_far = within_memory(run, size, make, *models)
            losses = _of_all(run, {name: value for name, value in stats.items() if name.endswith("_loss")})
            steps.append(Step(stats, ratios, too_far, losses))
            if too_far:
                for optimizer in optimizers:
                    optimizer.zero_grad()
                break
            norms = {
                f"{name}_grad_norm": run.clip_gradients(model, settings.max_grad_norm) for name, model, _ in learners
            }
            steps[-1].decisive = step_if_fine(run, optimizers, losses | norms)
            if policy_learns and self.ema.decay is not None and are_finite(steps[-1].decisive):
                self.ema.update(self.unwrapped_policy)
        return self._summed_up(steps, f"iteration {iteration + 1}: optimiser step {{}} of {num_steps}")

    def _summed_up(self, steps: list["Step"], called: str) -> dict[str, float]:
        """Statistics over the steps that were taken; those that were not are told of, `called` with their number."""
        run = self.run
        measured: list[Step] = []
        taken: list[dict[str, float]] = []
        for number, (step, decisive) in enumerate(zip(steps, _read([step.decisive for step in steps]), strict=True), 1):
            if not all_finite(decisive):
                tell_skipped(run, called.format(number), decisive)
                self.fault = described(decisive)
                continue
            measured.append(step)
            if not step.too_far:
                taken.append(decisive)
        if not measured:
            return {}
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=run.device))
        ratios = Ratios(run.device)
        for step in measured:
            ratios.merge(step.ratios)
            for name, value in step.stats.items():
                sums[name] += value
        found = {name: total / len(measured) for name, total in _read([_of_all(run, sums)])[0].items()}
        for name in (name for name in (taken or [{}])[0] if name.endswith("_grad_norm")):
            found[name] = fmean(step[name] for step in taken)
        found["num_updates"] = len(taken)
        return found | (ratios.stats(run, len(measured), found["ratio"]) if "ratio" in found else {})

    def _gradients(
        self,
        rollout: Rollout,
        targets: Targets,
        minibatch: list[int],
        cut: Callable[[tuple[int, ...], int | None], list[Piece]],
        models: list[torch.nn.Module],
        policy_learns: bool,
        kl_coef: float,
        ptx_step: int,
    ) -> tuple[dict[str, Tensor], "Ratios", bool]:
        """Of one optimiser step: (this process's share of its statistics, ratios, whether it would lead too far)."""
        run, settings = self.run, self.run.settings
        microbatches = cut(tuple(minibatch), run.microbatch_size)
        # Tokens of the whole optimiser step over all processes: each weighs the same wherever it lies.
        rows = torch.cat([piece.on(run.device) for piece in microbatches])
        num_tokens = run.sum(rollout.mask[rows].sum())
        num_values = run.sum(targets.value_mask[rows].sum())
        stats: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=run.device))
        ratios = Ratios(run.device)
        for piece in run.accumulate(microbatches, *models):
            part, learned = rollout.cut(piece), targets.cut(piece)
            doing("the update", part.input_ids, len(piece))
            found: dict[str, Tensor] = {}
            if policy_learns:
                given = num_tokens, num_values, len(minibatch), kl_coef, ratios
                found |= self._policy_backward(part, learned, piece.as_pack, *given)
            if self.critic is not None:
                found |= self._critic_backward(part, learned, piece.as_pack, num_values)
            for name, value in found.items():
                stats[name] += value
        # As in OpenAI's Spinning Up: the step that would lead further is not made.
        if settings.target_kl and run.sum(stats["approx_kl"]).item() > TARGET_KL_SLACK * settings.target_kl:
            return stats, ratios, True
        if policy_learns and self.ptx_blocks is not None:
            stats["ptx_loss"] = self._ptx_backward(ptx_step)
        return stats, ratios, False

    def _critic_backward(
        self, part: Rollout, learned: Targets, as_pack: PackedRows | None, num_values: Tensor
    ) -> dict[str, Tensor]:
        assert self.critic is not None
        values = response_values(self.critic, part.input_ids, part.attention_mask, part.mask.shape[1], as_pack)
        loss, stats = self._value_loss(values, part, learned, num_values)
        self.run.backward(loss)
        return stats

    def _value_loss(
        self, values: Tensor, part: Rollout, learned: Targets, num_values: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        clip = self.run.settings.value_clip_range or float("inf")
        return value_loss(values, part.values, learned.returns, learned.value_mask, clip, num_values)

    def _policy_backward(
        self,
        part: Rollout,
        learned: Targets,
        as_pack: PackedRows | None,
        num_tokens: Tensor,
        num_values: Tensor,
        num_rows: int,
        kl_coef: float,
        ratios: "Ratios",
    ) -> dict[str, Tensor]:
        settings = self.run.settings
        bonus = settings.entropy_coef > 0
        logprobs, entropy, values = self.policy(
            part.input_ids, part.attention_mask, part.mask.shape[1], settings.temperature, with_entropy=bonus,
            as_pack=as_pack,
        )  # fmt: skip
        denominator = loss_denominator(
            part.mask, settings.aggregation, num_tokens, num_rows * self.run.num_processes, settings.max_new_tokens
        )
        loss, stats = policy_loss(
            logprobs, part.logprobs, learned.advantages, part.mask, settings.clip_range, settings.dual_clip,
            num_tokens, denominator,
        )  # fmt: skip
        ratios.add(update_log_ratio(logprobs.detach(), part.logprobs, part.mask), part.mask, num_tokens)

        def spread(values: Tensor) -> Tensor:
            return (torch.where(part.mask, values, 0.0) / denominator).sum()

        if settings.kl_in == "loss":
            kind = settings.kl_estimator or "k2"
            # Masked before the estimator: a NaN in an uncounted slot would come back through the gradient.
            ours, theirs = (torch.where(part.mask, x, 0.0) for x in (logprobs, part.ref_logprobs))
            kl_loss = spread(kl_estimate(ours, theirs, kind))
            loss, stats["kl_loss"] = loss + kl_coef * kl_loss, kl_loss.detach()
        if bonus:
            loss = loss - settings.entropy_coef * spread(entropy)
        if values is not None:
            of_values, more = self._value_loss(values, part, learned, num_values)
            loss, stats = loss + settings.value_coef * of_values, stats | more
        self.run.backward(loss)
        return stats

    def _ptx_backward(self, step: int) -> Tensor:
        """InstructGPT's pretraining gradients: the mean loss per token of raw text, added to the same step."""
        run, settings = self.run, self.run.settings
        assert self.ptx_blocks is not None
        rows = batch_indices(len(self.ptx_blocks), settings.ptx_batch_size, step, settings.seed)
        blocks = self.ptx_blocks[run.shard(rows)].to(run.device)
        length, total = blocks.shape[1] - 1, torch.zeros((), device=run.device)
        fitting = max(settings.microbatch_tokens // blocks.shape[1], 1)
        for piece in run.accumulate(blocks.split(min(run.microbatch_size or fitting, fitting)), self.policy):
            doing("the update", piece)
            logprobs, _, values = self.policy(piece, torch.ones_like(piece, dtype=torch.bool), length, 1.0)
            loss = -logprobs.sum() / (settings.ptx_batch_size * length)
            if values is not None:
                loss = loss + 0.0 * values.sum()  # DDP waits for a gradient of every weight
            run.backward(settings.ptx_coef * loss)
            total += loss.detach()
        return total


def _of_all(run: Runtime[PPOSettings], shares: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums over all processes of their shares."""
    names = sorted(shares)
    return dict(zip(names, run.sum(torch.stack([shares[name] for name in names])), strict=True))


def _read(steps: list[dict[str, Tensor]]) -> list[dict[str, float]]:
    """Numbers of several steps from the device, in one go."""
    numbers = [number.float() for step in steps for number in step.values()]
    read = iter(torch.stack(numbers).tolist() if numbers else [])
    return [{name: next(read) for name in step} for step in steps]


@dataclass
class Step:
    """An optimiser step; its numbers stay on the device, which need not be waited for until the last is launched."""

    stats: dict[str, Tensor]
    """Of this process's share."""
    ratios: "Ratios"
    too_far: bool
    """Whether it would lead further than `target_kl`: it was not made, and is the last."""
    decisive: dict[str, Tensor]
    """Losses over all processes and, where it was made, gradient norms, by which it counts or is left out."""


class Ratios:
    """How far the probability ratios of an update phase lie apart: minimum, maximum and variance over its tokens."""

    def __init__(self, device: torch.device) -> None:
        self.squares = torch.zeros((), device=device)  # mean of the squared ratios, summed over optimiser steps
        self.highest = torch.full((2,), -torch.inf, device=device)  # of −log-ratio and of log-ratio

    def add(self, log_ratio: Tensor, mask: Tensor, num_tokens: Tensor) -> None:
        """Log-ratios [B,R] of a microbatch; `num_tokens` are those of the whole optimiser step."""
        self.squares += torch.where(mask, (2 * log_ratio).exp(), 0.0).sum() / num_tokens
        found = [torch.where(mask, x, -torch.inf).amax() for x in (-log_ratio, log_ratio)]
        self.highest = torch.maximum(self.highest, torch.stack(found))

    def merge(self, other: "Ratios") -> None:
        """Take those of another optimiser step in."""
        self.squares = self.squares + other.squares
        self.highest = torch.maximum(self.highest, other.highest)

    def stats(self, run: Runtime[PPOSettings], num_steps: int, mean: float) -> dict[str, float]:
        """Over `num_steps` optimiser steps and all processes, in which the ratios average `mean`."""
        square = run.sum(self.squares).item() / num_steps
        down, up = run.max(self.highest).tolist()
        return {"ratio_min": math.exp(-down), "ratio_max": math.exp(up), "ratio_var": max(square - mean**2, 0.0)}


class MovingAverage:
    """Exponential moving average of a policy's trainable weights, in float32 (it would stall in half precision)."""

    def __init__(self, policy: PolicyModel, decay: float | None) -> None:
        self.decay = decay
        self.weights: dict[str, Tensor] = {}
        if decay is not None:
            self.weights = {name: p.detach().float().clone() for name, p in trained(policy).items()}

    @torch.no_grad()
    def update(self, policy: PolicyModel) -> None:
        """Once per optimiser step."""
        if self.decay is not None:
            for name, parameter in trained(policy).items():
                self.weights[name].lerp_(parameter.float(), 1 - self.decay)

    @torch.no_grad()
    def swap(self, policy: PolicyModel) -> None:
        """Exchange the policy's weights with the averages; twice is as if nothing had happened."""
        for name, parameter in trained(policy).items():
            current = parameter.detach().float().clone()
            parameter.copy_(self.weights[name])
            self.weights[name] = current
