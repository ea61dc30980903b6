"""PPO: the policy starts as the SFT model, which stays as its reference; the critic starts as the reward model.

Run by hand: `accelerate launch -m rlhf.stages.ppo FOLDER`, where FOLDER holds a settings.yaml.
"""

import math
from contextlib import nullcontext
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.data.collate import Blocks, batch_indices
from rlhf.data.documents import plain_documents
from rlhf.stages.bad_numbers import count_in_a_row
from rlhf.stages.budget_ppo import described, memory
from rlhf.stages.checkpoints import saying_what_cannot_be_written
from rlhf.stages.metric_names import named_rewards
from rlhf.stages.microbatches import pieces
from rlhf.stages.models import hand_over, load_tokenizer
from rlhf.stages.out_of_memory import explained, within_memory
from rlhf.stages.ppo.ahead import Ahead
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.evaluate import Evaluator
from rlhf.stages.ppo.health import Finding, Health
from rlhf.stages.ppo.layout import keep_policy, load_roles, prepare, put_in_place, save_critic
from rlhf.stages.ppo.objective import AdaptiveKL
from rlhf.stages.ppo.prompts import Asked, encode_rows, read_rows
from rlhf.stages.ppo.rollout import Rollout, collect, give_room, policy_engine
from rlhf.stages.ppo.selection import Selection
from rlhf.stages.ppo.shaping import importance_weights, shaped_scores, targets
from rlhf.stages.ppo.update import Updater
from rlhf.stages.ppo.work import Work
from rlhf.stages.row_files import rows_of
from rlhf.stages.runtime import Runtime
from rlhf.stages.settings_file import read_settings
from rlhf.stages.sharding import gathered
from rlhf.stages.text_limits import check_sampled, stops_of
from rlhf.stages.token_cache import TokenCache, tell


@explained
def train(folder: str | Path) -> dict[str, Any]:
    """Run the stage in `folder` (resuming if it was interrupted) and seal it; returns the final metrics."""
    folder = Path(folder)
    settings = read_settings(folder, PPOSettings)
    assert settings.model is not None
    tokenizer = load_tokenizer(settings.model)
    run = Runtime(settings, folder)
    run.num_steps = settings.num_iterations
    prompts, eval_prompts, _ = rows_of(
        run,
        lambda reader: (encode_rows(reader, tokenizer, rows) for rows in read_rows(reader)),
        Asked.of,
    )
    roles = load_roles(run, tokenizer)
    rewards, reference = roles.rewards, roles.reference
    rewards.check_prompts(asked.prompt for asked in chain(prompts, eval_prompts))
    check_sampled(*settings.longest(), roles.policy.model)
    policy, critic, *optimizers = prepare(run, roles)
    per_prompt = settings.num_samples_per_prompt
    batch_size = settings.rollout_batch_size
    name, num_minibatches = "rollout_batch_size / num_minibatches", settings.num_minibatches
    run.batch_size(name, batch_size // num_minibatches, batch_size, num_minibatches, per_prompt)
    if settings.ptx_data is not None:
        run.batch_size("ptx_batch_size", settings.ptx_batch_size, settings.ptx_batch_size)
    stops = stops_of(roles.policy.model, tokenizer)
    update = Updater(run, policy, critic, optimizers, ptx_blocks(run, tokenizer))
    engine = policy_engine(run, roles.policy)
    engine.sync(roles.policy.model)
    engines = {roles.policy: engine}

    def batch_of(iteration: int) -> list[int]:
        """Prompts of this process, by number; none after the last iteration."""
        if iteration >= settings.num_iterations:
            return []
        rows = batch_indices(len(prompts), batch_size // per_prompt, iteration, settings.seed)
        return run.shard([i for i in rows for _ in range(per_prompt)])

    ahead = None
    if settings.rollout.one_step_off:
        ahead = Ahead(run, roles.policy, engine, lambda iteration: [prompts[i].ids for i in batch_of(iteration)])
    evaluator = Evaluator(run, tokenizer, reference, rewards, list(eval_prompts), engines)
    run.say(f"{len(prompts)} prompts, {len(eval_prompts)} held out, {batch_size} episodes an iteration")
    run.in_memory = described(memory(roles, settings, batch_size // run.num_processes))
    run.say(f"layout {settings.layout}; {run.in_memory}")
    run.seed(per_process=True)
    with run.watched():
        selection = Selection(run, tokenizer, sft=evaluator(roles.policy))  # which has learned nothing yet
    work = Work(run, roles)
    paid_by = named_rewards(settings.reward_model, [spec.model_dump() for spec in settings.rewards])
    health = Health(batch_size, settings.max_new_tokens, settings.critic_warmup_iterations, paid_by)
    run.state["kl_coef"] = settings.kl_coef

    def answer(batch: list[int]) -> Rollout:
        give_room(run, engine)
        asked = [prompts[i] for i in batch]
        return collect(
            ahead or engine, roles.policy, reference, rewards, roles.critic, [one.ids for one in asked],
            [one.prompt for one in asked], settings, stops, tokenizer, run.microbatch_size,
        )  # fmt: skip

    start = run.resume()
    engine.sync(roles.policy.model)
    if ahead is not None:
        ahead.begin(start)
    health.load_state_dict(run.state.get("health", health.state_dict()))
    for iteration in range(start, settings.num_iterations):
        rate = schedule(iteration, settings)
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = group["peak"] * rate
        batch = batch_of(iteration)
        with run.accelerator.autocast():
            rollout = within_memory(run, len(batch), partial(answer, batch))
        if iteration == start:
            self_check(run, policy, rollout, first=iteration == 0)
        kl_coef = run.state["kl_coef"]
        shaped = shaped_scores(run, rollout)
        learned = targets(rollout, shaped, kl_coef, settings)
        stats = update(rollout, learned, iteration, kl_coef)
        (ahead or engine).sync(roles.policy.model)
        work.count(rollout, stats.get("num_updates", 0), iteration >= settings.critic_warmup_iterations)
        done, taken = iteration + 1, bool(stats)  # without a step that was taken, the iteration is skipped as a whole
        count_in_a_row(run, done, taken, f"of its optimiser steps none could be taken: {update.fault}")
        row = {"kl_coef": kl_coef, "learning_rate": settings.learning_rate * rate}
        if ahead is not None:
            row |= {"staleness": ahead.staleness, "seconds_sampling": round(ahead.seconds, 4)}
        findings: list[Finding] = []
        if taken:
            row = {**rollout_stats(run, rollout, shaped, learned.returns, kl_coef, rewards.names), **stats, **row}
            if settings.kl_target is not None:
                controller = AdaptiveKL(kl_coef, settings.kl_target, settings.kl_horizon)
                run.state["kl_coef"] = controller.update(row["kl"], batch_size)
            findings = health.check(row)
        run.state["health"] = health.state_dict()
        for finding in findings:
            run.say(f"iteration {done}: {finding.name}: {finding.message}")
        evaluate_now = done % settings.eval_every == 0 or done == settings.num_iterations
        if evaluate_now:
            with run.phases.evaluation():
                if ahead is not None:
                    ahead.settle()
                row |= selection.consider(done, roles.policy, evaluator)
        run.count_tokens(int(rollout.mask.sum()))
        run.log(done, row, force=evaluate_now)
        if findings and settings.on_unhealthy == "stop":
            run.save(done)
            raise RuntimeError(f"unhealthy at iteration {done}: {findings[0].name} (on_unhealthy: stop)")
        run.checkpoint(done, good=taken)
    metrics = {**selection.finish(folder), "findings": health.active}
    if smaller := run.state.get("generation_batch_size"):  # by auto_microbatch
        metrics["generation_batch_size"] = smaller
    with nullcontext() if roles.critic is None else run.whole(roles.critic) as whole:
        run.on_main(partial(save_critic, folder / "critic", whole, selection.best, settings, tokenizer))
    if settings.ema_decay is not None:
        update.ema.swap(roles.policy)
        average = folder / "checkpoints" / "ema"
        with run.whole(roles.policy) as whole:
            run.on_main(partial(keep_policy, average, whole, settings, tokenizer))
        run.on_main(lambda: put_in_place(average, folder / "ema", settings, tokenizer))
    return run.finish(metrics, hand_over(tokenizer, roles.policy.model))


def schedule(iteration: int, settings: PPOSettings) -> float:
    """Share of the peak learning rates in an iteration, from 0: warm-up times the fall to zero."""
    warmup = min(1.0, (iteration + 1) / settings.warmup_iterations) if settings.warmup_iterations else 1.0
    progress = iteration / settings.num_iterations
    fall = {"linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2, "constant": 1.0}
    return warmup * fall[settings.schedule]


def ptx_blocks(run: Runtime[PPOSettings], tokenizer: PreTrainedTokenizerBase) -> Blocks | None:
    """Raw text for the pretraining gradients, in blocks [N, T + 1]: the run's own, which pretrain may have made.

    What pretrain holds out of the same text is held out here, too, and is new to the policy when it is evaluated.
    """
    settings = run.settings
    if settings.ptx_data is None:
        return None
    documents = plain_documents(settings.ptx_data, settings.eval_share, settings.max_dropped, "ppo", "ptx_data")
    cache = TokenCache(run.folder, documents, {"data": run.identity.data["ptx_data"]})
    with saying_what_cannot_be_written(run.folder, cache.root.name):
        tokens = cache.make(tokenizer, run.say)
    tell(run.say, "ppo", [part | {"name": "ptx_data"} for part in tokens.sources])
    return Blocks(tokens.train, settings.ptx_block_size, "ppo.ptx_data")


def rollout_stats(
    run: Runtime[PPOSettings], rollout: Rollout, shaped: Tensor, returns: Tensor, kl_coef: float, rewards: list[str]
) -> dict[str, float]:
    """Means over episodes and over tokens, all processes together; kl is in nats per response."""
    mask = rollout.mask
    residual, returns = (torch.where(mask, x, 0.0) for x in (returns - rollout.values, returns))
    # Double before they are squared: float32 loses the variance of large numbers that lie close together.
    scores, residual, returns = (x.cpu().double() for x in (rollout.scores, residual, returns))
    gap = torch.where(mask, (rollout.logprobs - rollout.sampled_logprobs).abs(), 0.0)
    weights = importance_weights(rollout, run.settings)
    sums = torch.stack([x.sum().cpu().double() for x in (
        gap, rollout.kl, scores, scores.square(), shaped, rollout.ended,
        torch.where(mask, rollout.entropy, 0.0), residual, residual.square(), returns, returns.square(),
        mask, mask.any(-1), torch.where(mask, 0.0 if weights is None else weights, 0.0),
    )])  # fmt: skip
    found = run.sum(sums).tolist()
    gap, kl, score, score2, final, ended, entropy, res, res2, ret, ret2, tokens, episodes, weight = found

    def variance(first: float, second: float, count: float) -> float:
        return max(second / count - (first / count) ** 2, 0.0)

    spread = variance(ret, ret2, tokens)
    of_each = run.sum(rollout.reward_scores.cpu().double().sum(0)) / episodes
    each = {f"score_{name}": value for name, value in zip(rewards, of_each.tolist(), strict=True)}
    return {
        "score": score / episodes,
        "score_std": variance(score, score2, episodes) ** 0.5,
        **(each if len(each) > 1 else {}),
        "kl": kl / episodes,
        "kl_per_token": kl / tokens,
        "non_score_reward": -kl_coef * kl / episodes,
        "rlhf_reward": (final - kl_coef * kl) / episodes,
        "entropy": entropy / tokens,
        "sampler_gap": gap / tokens,
        **({} if weights is None else {"importance_weight": weight / tokens}),
        "eos_share": ended / episodes,
        "length": tokens / episodes,
        "length_max": run.max(rollout.lengths.amax()[None]).item(),
        "explained_variance": 1 - variance(res, res2, tokens) / spread if spread else 0.0,
    }


def self_check(run: Runtime[PPOSettings], policy: torch.nn.Module, rollout: Rollout, first: bool) -> None:
    """Before the first update the ratio is 1, and at the very start the KL is 0; otherwise stop and say why."""
    settings = run.settings
    exact = run.accelerator.mixed_precision == "no"
    lengths, limit = (rollout.prompt_lengths.tolist(), rollout.lengths.tolist()), settings.microbatch_tokens
    part = rollout.cut(pieces(*lengths, run.microbatch_size, max_tokens=limit)[0])
    with torch.no_grad(), gathered(run.unwrap(policy)):
        run.unwrap(policy).check_head(part.input_ids[0][part.attention_mask[0]][None])
        logprobs, _, _ = policy(part.input_ids, part.attention_mask, part.mask.shape[1], settings.temperature)

    def gap(other: Tensor) -> float:
        """Of two log-probabilities: the largest, and of rounded ones, whose largest means little, the mean."""
        gaps = torch.where(part.mask, (other - part.logprobs).abs(), 0.0)
        return (gaps.max() if exact else gaps.sum() / part.mask.sum()).item()

    if (found := gap(logprobs)) > (1e-5 if exact else 2e-2):
        raise RuntimeError(
            f"self-check: the update sees other log-probabilities than the rollout (by {found:.2g} nats): dropout, "
            "a random layer, or an attention that depends on the other rows of the batch"
        )
    served = settings.rollout.engine == "vllm"
    if (found := gap(part.sampled_logprobs)) > (1e-3 if exact and not served else 0.1):
        raise RuntimeError(
            f"self-check: the engine samples from another law than the policy's (by {found:.2g} nats); use "
            "rollout.engine transformers, or start its server with ppo.model"
        )
    if first and (found := gap(part.ref_logprobs)) > (1e-5 if exact else 5e-2):
        raise RuntimeError(f"self-check: policy and reference differ by {found:.2g} nats before the first update")
