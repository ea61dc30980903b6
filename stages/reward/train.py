"""The reward model: a scalar head on the SFT backbone, trained on all pairs of a prompt's ranked answers.

Run by hand: `accelerate launch -m rlhf.stages.reward FOLDER`, where FOLDER holds a settings.yaml.
"""

import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf.data.collate import batch_indices, pad_right
from rlhf.data.errors import DataError
from rlhf.data.rows import Ranking, prompt_key, read_rankings
from rlhf.data.tokens import Encoded, encode_example
from rlhf.stages import adapters
from rlhf.stages.artifact import model_digest, read_settings
from rlhf.stages.models import ScalarModel, check_positions, hand_over, load_scalar, load_tokenizer, save_folder
from rlhf.stages.optimizers import adamw, learning_rate_at, set_learning_rate
from rlhf.stages.reward.answers import judged, with_sampled_answers
from rlhf.stages.reward.config import RewardSettings
from rlhf.stages.reward.objective import comparable, ranking_accuracy, ranking_loss
from rlhf.stages.runtime import Runtime


@dataclass
class Ranked:
    """The answers of one prompt as token ids, with their ranks."""

    answers: list[Encoded]
    ranks: list[float]


def train(folder: str | Path) -> dict[str, Any]:
    """Run the stage in `folder` (resuming if it was interrupted) and seal it; returns the final metrics."""
    folder = Path(folder)
    settings = read_settings(folder, RewardSettings)
    assert settings.model is not None
    tokenizer = load_tokenizer(settings.model)
    run = Runtime(settings, folder)
    rows, eval_rows = read_rows(run)
    if settings.num_sampled_answers:
        rows, eval_rows = with_sampled_answers(run, tokenizer, rows, eval_rows)
    elif settings.judge:
        judge, seed = settings.judge, settings.seed
        eval_rows = run.from_main(lambda: judged(judge, eval_rows, noise=0.0, seed=seed))
    data = encode_rows(run, tokenizer, rows)
    eval_data = encode_rows(run, tokenizer, eval_rows)
    batch_size = run.batch_size("global_batch_size", settings.global_batch_size, len(data))
    run.num_steps = math.ceil(settings.num_epochs * len(data) / batch_size)
    run.seed()  # the head is the same whether the answers were sampled now or before an interruption
    model = load_scalar(settings.model, tokenizer, new_head=True)
    check_positions("reward.max_length", settings.max_length, model.classifier)
    model.pooling = settings.pooling
    if settings.lora:
        adapters.add_lora(model.classifier, settings.lora)
        adapters.checkpoint_trained_only(run.accelerator)
    optimizer = adamw(model, settings.learning_rate, settings.weight_decay)
    model, optimizer = run.accelerator.prepare(model, optimizer)
    pad = tokenizer.pad_token_id
    run.say(f"{len(data)} prompts with {sum(len(r.answers) for r in data)} answers, {len(eval_data)} held out")
    start = run.resume()
    for step in range(start, run.num_steps):
        learning_rate = learning_rate_at(
            step, run.num_steps, settings.learning_rate, math.ceil(settings.warmup_share * run.num_steps), 0.1
        )
        set_learning_rate(optimizer, learning_rate)
        batch = [data[i] for i in batch_indices(len(data), batch_size, step, settings.seed)]
        loss, grad_norm = optimise(run, model, optimizer, batch, pad)
        row = {"loss": loss, "learning_rate": learning_rate, "grad_norm": grad_norm}
        done = step + 1
        evaluate_now = done % settings.eval_every == 0 or done == run.num_steps
        if evaluate_now:
            row["accuracy"] = accuracy(run, run.unwrap(model), eval_data, pad)
        run.log(done, row, force=evaluate_now)
        run.checkpoint(done)
    scorer = run.unwrap(model)
    scorer.mean, scorer.std = score_moments(run, scorer, data, pad)
    run.on_main(lambda: save(folder, scorer, settings, tokenizer))
    metrics = {
        "accuracy": accuracy(run, scorer, eval_data, pad),
        "longer_wins_accuracy": longer_wins_accuracy(eval_data),
        "num_prompts": len(data),
        "num_eval_prompts": len(eval_data),
        "score_mean": scorer.mean,
        "score_std": scorer.std,
    }
    return run.finish(metrics, hand_over(tokenizer, scorer.classifier))


def save(folder: Path, scorer: ScalarModel, settings: RewardSettings, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write the reward model; adapters are merged, and lie beside with the digest of the model they belong to."""
    if settings.lora is None:
        save_folder(folder / "model", scorer, tokenizer)
        return
    assert settings.model is not None
    adapter = folder / "checkpoints" / "adapter"
    adapters.save_scalar(adapter, scorer, model_digest(settings.model, "reward.model"))
    whole = load_scalar(settings.model, tokenizer, new_head=True)
    whole.pooling, whole.mean, whole.std = scorer.pooling, scorer.mean, scorer.std
    whole.classifier = adapters.merged(whole.classifier, adapter)
    whole.classifier.score.load_state_dict(scorer.classifier.score.state_dict())
    save_folder(folder / "model", whole, tokenizer)
    shutil.copytree(adapter, folder / "model" / "adapter")


def optimise(
    run: Runtime[RewardSettings],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: list[Ranked],
    pad: int,
) -> tuple[float, float]:
    """One optimiser step; every answer is read once, and each prompt weighs the same however many it has."""
    settings = run.settings
    model.train()
    ranks, mask = padded_ranks(batch)
    num_prompts = comparable(ranks, mask, settings.ties).sum().clamp(min=1).item()  # over all processes
    total = torch.zeros((), device=run.device)
    rows = run.shard(list(range(len(batch))))
    for micro in run.microbatches(rows, model):
        scores, ranks, mask = score(model, run.unwrap(model), [batch[i] for i in micro], pad, run.device)
        loss = ranking_loss(
            scores, ranks, mask, settings.loss, settings.ties,
            label_smoothing=settings.label_smoothing, centering=settings.centering, num_prompts=num_prompts,
        )  # fmt: skip
        run.accelerator.backward(loss * run.num_processes)  # DDP averages gradients over processes
        total += loss.detach()
    run.count_tokens(sum(len(answer.input_ids) for i in rows for answer in batch[i].answers))
    grad_norm = run.accelerator.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return run.sum(total).item(), float(grad_norm)


def score(
    model: torch.nn.Module, reader: ScalarModel, batch: list[Ranked], pad: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, ranks and mask [N,K] of N prompts. `model` may be wrapped; `reader` knows how to pool."""
    answers = [answer for row in batch for answer in row.answers]
    ids, attention = (x.to(device) for x in pad_right([a.input_ids for a in answers], pad))  # [N·K,T]
    starts = torch.tensor([a.prompt_length for a in answers], device=device)
    response = attention & (torch.arange(ids.shape[1], device=device) >= starts[:, None])
    flat = reader.pool(model(ids, attention), response)
    ranks, mask = (x.to(device) for x in padded_ranks(batch))
    return torch.zeros_like(ranks).masked_scatter(mask, flat), ranks, mask


def padded_ranks(batch: list[Ranked]) -> tuple[Tensor, Tensor]:
    """Ranks and mask [N,K], K being the most answers that a prompt has."""
    width = max(len(row.ranks) for row in batch)
    ranks = torch.tensor([row.ranks + [0.0] * (width - len(row.ranks)) for row in batch])
    return ranks, torch.arange(width) < torch.tensor([len(row.ranks) for row in batch])[:, None]


@torch.no_grad()
def accuracy(run: Runtime[RewardSettings], model: ScalarModel, data: list[Ranked], pad: int) -> float:
    """Share of held-out pairs in the right order, each counted once; equal scores count one half."""
    model.eval()
    total = torch.zeros(2, dtype=torch.float64)
    for rows in run.chunks(len(data), run.settings.global_batch_size):
        scores, ranks, mask = score(model, model, [data[i] for i in rows], pad, run.device)
        if not scores.isfinite().all():
            raise RuntimeError("scores are no numbers any more: training diverged; lower reward.learning_rate")
        total += torch.stack(ranking_accuracy(scores, ranks, mask)).cpu()
    correct, pairs = run.sum(total).tolist()
    return correct / pairs


def longer_wins_accuracy(data: list[Ranked]) -> float:
    """What always preferring the longer answer would reach on the same pairs: the figure to beat."""
    ranks, mask = padded_ranks(data)
    lengths = [float(len(a.input_ids) - a.prompt_length) for row in data for a in row.answers]
    scores = torch.zeros_like(ranks).masked_scatter(mask, torch.tensor(lengths))
    correct, pairs = ranking_accuracy(scores, ranks, mask)
    return (correct / pairs).item()


@torch.no_grad()
def score_moments(
    run: Runtime[RewardSettings], model: ScalarModel, data: list[Ranked], pad: int
) -> tuple[float, float]:
    """Mean and standard deviation of the scores of the training answers, which become 0 and 1."""
    model.eval()
    total = torch.zeros(3, dtype=torch.float64)
    for rows in run.chunks(len(data), run.settings.global_batch_size):
        scores, _, mask = score(model, model, [data[i] for i in rows], pad, run.device)
        kept = scores[mask].cpu().double()
        total += torch.stack([kept.sum(), kept.square().sum(), torch.tensor(float(len(kept)))])
    first, second, count = run.sum(total).tolist()
    mean = first / count
    return mean, max(second / count - mean**2, 1e-12) ** 0.5


def read_rows(run: Runtime[RewardSettings]) -> tuple[list[Ranking], list[Ranking]]:
    """Training and held-out rankings."""
    settings = run.settings
    keep_ties = settings.ties == "soft" or settings.judge is not None  # a judge ranks anew
    rows = read_rankings(settings.data, settings.max_dropped, keep_ties).rows
    given = read_rankings(settings.eval_data, settings.max_dropped, keep_ties).rows if settings.eval_data else None
    return run.split(rows, given, lambda row: prompt_key(row.prompt))


def encode_rows(run: Runtime[RewardSettings], tokenizer: PreTrainedTokenizerBase, rows: list[Ranking]) -> list[Ranked]:
    """Token ids of the answers that fit; answers left out are counted aloud."""
    settings = run.settings
    kept, too_long, same = [], 0, 0
    for row in rows:
        ranked = Ranked([], [])
        for response, rank in zip(row.responses, row.ranks, strict=True):
            encoded = encode_example(tokenizer, row.prompt, response, settings.max_length)
            if encoded is None:
                too_long += 1
            elif encoded in ranked.answers:
                same += 1  # the same ids under another rank would only teach noise
            else:
                ranked.answers.append(encoded)
                ranked.ranks.append(float(rank))
        if len(set(ranked.ranks)) > 1 or (settings.ties == "soft" and len(ranked.ranks) > 1):
            kept.append(ranked)
    if too_long or same:
        run.say(f"left out {too_long} answers longer than max_length {settings.max_length}, {same} repeated ones")
    if not kept:
        reason = "raise reward.max_length" if too_long else "the judge or the ranks hold all answers to be equal"
        raise DataError(f"reward.data: no prompt keeps two answers of different rank; {reason}")
    if len(kept) < len(rows):
        run.say(f"left out {len(rows) - len(kept)} of {len(rows)} prompts with nothing to compare")
    return kept
