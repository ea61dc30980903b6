"""PPO: the policy starts as the SFT model, which stays as its reference; the critic starts as the reward model.

Run by hand: `accelerate launch -m rlhf.stages.ppo FOLDER`, where FOLDER holds a settings.yaml.
"""

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlhf.data.collate import batch_indices
from rlhf.stages.artifact import read_settings
from rlhf.stages.models import (
    check_hand_over,
    hand_over,
    load_policy,
    load_scalar,
    load_tokenizer,
    response_logprobs,
    save_folder,
)
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.evaluate import Evaluator, comparison, write_gallery
from rlhf.stages.ppo.objective import gae, policy_loss, token_rewards, value_loss, whiten
from rlhf.stages.ppo.prompts import check_lengths, encode_prompts, read_rows
from rlhf.stages.ppo.rollout import Rollout, collect, response_values
from rlhf.stages.runtime import Runtime, set_learning_rate


def train(folder: str | Path) -> dict[str, Any]:
    """Run the stage in `folder` (resuming if it was interrupted) and seal it; returns the final metrics."""
    folder = Path(folder)
    settings = read_settings(folder, PPOSettings)
    assert settings.model is not None
    assert settings.reward_model is not None
    tokenizer = load_tokenizer(settings.model)
    prompts, eval_prompts = read_rows(settings)
    run = Runtime(settings, folder, settings.num_iterations)
    encoded, _ = encode_prompts(run, tokenizer, prompts)
    eval_encoded, eval_prompts = encode_prompts(run, tokenizer, eval_prompts)
    policy, reference = load_policy(settings.model), load_policy(settings.model)
    scorer = load_scalar(settings.reward_model, tokenizer)
    critic = load_scalar(settings.reward_model, tokenizer)
    check_hand_over(
        hand_over(tokenizer, policy), hand_over(load_tokenizer(settings.reward_model), scorer.classifier),
        "ppo.model", "ppo.reward_model",
    )  # fmt: skip
    check_lengths(settings, policy.config.max_position_embeddings)
    # Dropout would make the scored law differ from the sampled one: every model stays in eval mode throughout.
    for model in (policy, reference, scorer, critic):
        model.to(run.device).eval()
    for frozen in (reference, scorer):
        frozen.requires_grad_(False)
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.0)
        for model, rate in ((policy, settings.learning_rate), (critic, settings.critic_learning_rate))
    ]
    policy, critic, *optimizers = run.accelerator.prepare(policy, critic, *optimizers)
    batch_size = settings.rollout_batch_size
    run.batch_size("rollout_batch_size / num_minibatches", batch_size // settings.num_minibatches, batch_size)
    stops, pad = [tokenizer.eos_token_id], tokenizer.pad_token_id
    evaluator = Evaluator(run, tokenizer, reference, scorer, eval_prompts, eval_encoded)
    run.say(f"{len(encoded)} prompts, {len(eval_encoded)} held out, {batch_size} episodes an iteration")
    run.seed(per_process=True)
    sft = evaluator(reference)
    start = run.resume()
    for iteration in range(start, settings.num_iterations):
        remaining = 1 - iteration / settings.num_iterations
        set_learning_rate(optimizers[0], settings.learning_rate * remaining)
        set_learning_rate(optimizers[1], settings.critic_learning_rate * remaining)
        batch = run.shard(batch_indices(len(encoded), batch_size, iteration, settings.seed))
        rollout = collect(
            run.unwrap(policy), reference, scorer, run.unwrap(critic), [encoded[i] for i in batch], settings,
            stops, pad,
        )  # fmt: skip
        if iteration == start:
            self_check(run, policy, rollout, first=iteration == 0)
        rewards = token_rewards(
            shaped_scores(rollout, settings),
            rollout.logprobs,
            rollout.ref_logprobs,
            rollout.mask,
            settings.kl_coef,
        )
        if settings.whiten_rewards:
            rewards = whiten(rewards, rollout.mask, shift_mean=False)
        advantages, returns = gae(rewards, rollout.values, rollout.mask, settings.gamma, settings.gae_lambda)
        advantages = whiten(advantages, rollout.mask)
        stats = improve(run, policy, critic, optimizers, rollout, advantages, returns, iteration)
        done = iteration + 1
        row = {
            **rollout_stats(run, rollout, returns),
            **stats,
            "learning_rate": settings.learning_rate * remaining,
        }
        evaluate_now = done % settings.eval_every == 0 and done < settings.num_iterations
        if evaluate_now:
            row |= {f"eval_{k}": v for k, v in comparison(sft, evaluator(run.unwrap(policy))).items()}
        run.count_tokens(int(rollout.mask.sum()))
        run.log(done, row, force=evaluate_now)
        run.checkpoint(done)
    tuned = evaluator(run.unwrap(policy))
    metrics = comparison(sft, tuned)
    run.log(settings.num_iterations, {f"eval_{k}": v for k, v in metrics.items()}, force=True)
    run.on_main(lambda: write_gallery(folder / "samples.jsonl", sft, tuned, settings.num_gallery))
    run.on_main(lambda: save_folder(folder / "critic", run.unwrap(critic), tokenizer))
    run.on_main(lambda: save_folder(folder / "model", run.unwrap(policy), tokenizer))
    return run.finish(metrics, hand_over(tokenizer, run.unwrap(policy)))


def improve(
    run: Runtime,
    policy: torch.nn.Module,
    critic: torch.nn.Module,
    optimizers: list[torch.optim.Optimizer],
    rollout: Rollout,
    advantages: Tensor,
    returns: Tensor,
    iteration: int,
) -> dict[str, float]:
    """num_epochs × num_minibatches optimiser steps on one rollout; returns statistics averaged over them."""
    settings: Any = run.settings
    size = len(rollout.mask) // settings.num_minibatches
    num_steps = settings.num_epochs * settings.num_minibatches
    policy_learns = iteration >= settings.critic_warmup_iterations
    sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), device=run.device))
    for step in range(num_steps):
        minibatch = batch_indices(len(rollout.mask), size, step, settings.seed * 1_000_003 + iteration)
        # Tokens of the whole optimiser step over all processes: each weighs the same wherever it lies.
        num_tokens = run.sum(rollout.mask[minibatch].sum())
        for rows in run.microbatches(minibatch, settings.microbatch_size, policy, critic):
            part, length = rollout[rows], rollout.mask.shape[1]
            values = response_values(critic, part.input_ids, part.attention_mask, length)
            critic_loss, stats = value_loss(
                values, part.values, returns[rows], part.mask, settings.value_clip_range, num_tokens
            )
            run.accelerator.backward(critic_loss * run.num_processes)  # DDP averages gradients over processes
            if policy_learns:
                logprobs, _ = response_logprobs(
                    policy, part.input_ids, part.attention_mask, length, settings.temperature
                )
                loss, policy_stats = policy_loss(
                    logprobs, part.logprobs, advantages[rows], part.mask, settings.clip_range,
                    num_tokens=num_tokens,
                )  # fmt: skip
                run.accelerator.backward(loss * run.num_processes)
                stats |= policy_stats
            for name, value in stats.items():
                sums[name] += value
        for model, optimizer, name in zip((policy, critic), optimizers, ("policy", "critic"), strict=True):
            if model is critic or policy_learns:
                norm = run.accelerator.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
                sums[f"{name}_grad_norm"] += norm / run.num_processes  # equal on all processes
                optimizer.step()
                optimizer.zero_grad()
    names = sorted(sums)
    totals = run.sum(torch.stack([sums[name] for name in names])) / num_steps
    return dict(zip(names, totals.tolist(), strict=True))


def shaped_scores(rollout: Rollout, settings: PPOSettings) -> Tensor:
    """Scores [B] with the price of an answer that never ends."""
    if settings.missing_eos_penalty is None:
        return rollout.scores
    price = torch.full_like(rollout.scores, -settings.missing_eos_penalty)
    if settings.missing_eos == "subtract":
        price = rollout.scores + price
    return torch.where(rollout.ended, rollout.scores, price)


def rollout_stats(run: Runtime, rollout: Rollout, returns: Tensor) -> dict[str, float]:
    """Means over episodes (kl, score, length, eos_share) and over tokens, all processes together."""
    mask, episodes, tokens = rollout.mask, len(rollout.mask), rollout.mask.sum()
    residual = torch.where(mask, returns - rollout.values, 0.0)
    targets = torch.where(mask, returns, 0.0)
    entropy = torch.where(mask, rollout.entropy, 0.0).sum()
    sums = torch.stack([x.double() for x in (
        rollout.kl.sum(), rollout.scores.sum(), rollout.scores.square().sum(), rollout.ended.sum(), entropy,
        residual.sum(), residual.square().sum(), targets.sum(), targets.square().sum(), tokens,
        torch.tensor(episodes, device=mask.device),
    )])  # fmt: skip
    kl, score, score2, ended, entropy_sum, res, res2, ret, ret2, num_tokens, num = run.sum(sums).tolist()

    def variance(first: float, second: float, count: float) -> float:
        return max(second / count - (first / count) ** 2, 0.0)

    spread = variance(ret, ret2, num_tokens)
    return {
        "score": score / num,
        "score_std": variance(score, score2, num) ** 0.5,
        "kl": kl / num,
        "entropy": entropy_sum / num_tokens,
        "eos_share": ended / num,
        "length": num_tokens / num,
        "explained_variance": 1 - variance(res, res2, num_tokens) / spread if spread else 0.0,
    }


def self_check(run: Runtime, policy: torch.nn.Module, rollout: Rollout, first: bool) -> None:
    """Before the first update the ratio is 1, and at the very start the KL is 0; otherwise stop and say why."""
    settings: Any = run.settings
    rows = list(range(min(len(rollout.mask), settings.microbatch_size or 16)))
    part = rollout[rows]
    with torch.no_grad():
        logprobs, _ = response_logprobs(
            policy, part.input_ids, part.attention_mask, part.mask.shape[1], settings.temperature
        )
    tolerance = 1e-4 if run.accelerator.mixed_precision == "no" else 5e-2
    gap = torch.where(part.mask, logprobs - part.logprobs, 0.0).abs().max().item()
    if gap > tolerance:
        raise RuntimeError(
            f"self-check: the update sees other log-probabilities than the rollout (by {gap:.2g} nats): dropout, "
            "a random layer, or an attention that depends on the other rows of the batch"
        )
    gap = torch.where(part.mask, part.logprobs - part.ref_logprobs, 0.0).abs().max().item()
    if first and gap > tolerance:
        raise RuntimeError(f"self-check: policy and reference differ by {gap:.2g} nats before the first update")
