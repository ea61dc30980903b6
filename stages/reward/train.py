"""The reward model: a scalar head on the SFT backbone, trained on all pairs of a prompt's ranked answers.

Run by hand: `accelerate launch -m rlhf.stages.reward FOLDER`, where FOLDER holds a settings.yaml.
"""

import math
import shutil
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf.data.collate import batch_indices
from rlhf.data.errors import RefusedError
from rlhf.data.rows import Ranking, prompt_key, read_rankings
from rlhf.stages import adapters
from rlhf.stages.artifact import model_digest
from rlhf.stages.bad_numbers import count_step
from rlhf.stages.late import Late, step_if_fine
from rlhf.stages.models import (
    PolicyModel,
    ScalarModel,
    compile_layers,
    hand_over,
    load_policy,
    load_scalar,
    load_tokenizer,
    save_folder,
)
from rlhf.stages.optimizers import adamw, learning_rate_at, set_learning_rate, trained
from rlhf.stages.out_of_memory import doing, explained, weights_in_memory, within_memory
from rlhf.stages.packing import MULTIPLE, as_written, packs_here, reads_packs
from rlhf.stages.profile import cost_of
from rlhf.stages.reward.answers import ANSWERS, SAMPLED, add_sampled_answers, judged, read_answers
from rlhf.stages.reward.batches import Batch, Ranked, collate, encode_rows, padded, passes
from rlhf.stages.reward.config import RewardSettings
from rlhf.stages.reward.evaluate import (
    accuracy,
    grade,
    longer_wins_accuracy,
    refuse_no_numbers,
    refuse_nothing_to_measure,
    scored,
    scores_of_others,
)
from rlhf.stages.reward.objective import comparable, margins, ranking_loss
from rlhf.stages.row_files import RowReader, rows_of
from rlhf.stages.runtime import Runtime
from rlhf.stages.settings_file import read_settings
from rlhf.stages.sharding import gathered
from rlhf.stages.text_limits import check_positions


@explained
def train(folder: str | Path) -> dict[str, Any]:
    """Run the stage in `folder` (resuming if it was interrupted) and seal it; returns the final metrics."""
    folder = Path(folder)
    settings = read_settings(folder, RewardSettings)
    assert settings.model is not None
    tokenizer = load_tokenizer(settings.model)
    run = Runtime(settings, folder)
    if settings.num_sampled_answers:
        if not (folder / ANSWERS).exists():
            reader = RowReader(settings)
            add_sampled_answers(run, tokenizer, reader, *read_rows(reader))
        run.on_main(lambda: (folder / SAMPLED).unlink(missing_ok=True))  # a kill may have left it beside the answers
    answers = folder / ANSWERS if settings.num_sampled_answers else None
    data, eval_data, noted = rows_of(run, lambda reader: make_rows(reader, tokenizer, folder), Ranked.of, answers)
    refuse_nothing_to_measure(eval_data)
    others = scores_of_others(run, eval_data)
    batch_size = run.batch_size("global_batch_size", settings.global_batch_size, len(data))
    run.num_steps = math.ceil(settings.num_epochs * len(data) / batch_size)
    run.seed()  # the head is the same whether the answers were sampled now or before an interruption
    model = starting_model(run, tokenizer)
    lm_head = language_head(settings.model, tokenizer).to(run.device) if settings.lm_coef else None
    if settings.lora:
        adapters.add_lora(model.classifier, settings.lora)
    run.in_memory = weights_in_memory(model, *([lm_head] if lm_head else []))
    cost = cost_of(model.classifier, 2)
    run.spread(model)
    with gathered(model):
        model.packed = packs_here(settings.packing, run.device, run.accelerator.mixed_precision) and reads_packs(
            model.classifier, run.accelerator.autocast()
        )
    if settings.packing and not model.packed:
        run.say("reward.packing has no effect: this model, or its attention on this device, does not keep texts apart")
    compiled = settings.compile and run.device.type == "cuda"
    if compiled:
        compile_layers(model)
    multiple = MULTIPLE if compiled else 1
    optimizer = adamw(trained(model).values(), settings.learning_rate, settings.weight_decay)
    model, optimizer = run.accelerator.prepare(model, optimizer)
    pad = tokenizer.pad_token_id
    run.say(
        f"{noted['prompts']} prompts with {len(data)} rankings of {noted['answers']} answers; "
        f"{noted['held_out_prompts']} prompts with {len(eval_data)} rankings held out"
    )
    if settings.margin_scale and not noted["strengths"]:
        run.say("reward.margin_scale has no effect: no answer in the data has a strength")
    start, late = run.resume(), Late(run)
    for step in range(start, run.num_steps):
        learning_rate = learning_rate_at(
            step, run.num_steps, settings.learning_rate, math.ceil(settings.warmup_share * run.num_steps), 0.1
        )
        set_learning_rate(optimizer, learning_rate)
        batch = [data[i] for i in batch_indices(len(data), batch_size, step, settings.seed)]
        late.add(step + 1, optimise(run, model, optimizer, batch, pad, lm_head, multiple))
        read = [len(answer.input_ids) for ranked in run.shard(batch) for answer in ranked.answers]
        lengths = torch.tensor(read, dtype=torch.float64)
        run.count_tokens(int(lengths.sum()))
        run.phases.count("update", float(lengths.sum()), flops=cost.learning(lengths, torch.zeros_like(lengths)))
        done, last = step + 1, step + 1 == run.num_steps
        evaluate_now = last or done % settings.eval_every == 0
        told_now = evaluate_now or any(done % every == 0 for every in (settings.log_every, settings.save_every))
        for number, found in late.read(all_steps=told_now):
            taken = count_step(run, number, found)
        if not told_now and not late.must_end:
            continue
        row = {**(found if taken else {}), "learning_rate": learning_rate}
        if evaluate_now:
            with as_written(compiled), gathered(run.unwrap(model)):
                row["accuracy"] = accuracy(run, run.unwrap(model), eval_data, pad)
        run.log(done, row, force=evaluate_now)
        run.checkpoint(done, good=taken)
    scorer = run.unwrap(model)
    with as_written(compiled), gathered(scorer):
        scorer.mean, scorer.std = normaliser(run, scorer, data, pad)
        grades = grade(run, scorer, eval_data, pad, others)
    with run.whole(scorer) as whole:
        whole.mean, whole.std = scorer.mean, scorer.std
        run.on_main(lambda: save(folder, whole, settings, tokenizer))
    metrics = {
        **grades,
        "longer_wins_accuracy": longer_wins_accuracy(eval_data),
        "num_prompts": noted["prompts"],
        "score_mean": scorer.mean,
        "score_std": scorer.std,
    }
    return run.finish(metrics, hand_over(tokenizer, scorer.classifier))


def starting_model(run: Runtime[RewardSettings], tokenizer: PreTrainedTokenizerBase) -> ScalarModel:
    """The backbone with a new head, or a reward model with its own; scores are not normalised while it learns."""
    settings = run.settings
    assert settings.model is not None
    model = load_scalar(settings.model, tokenizer, new_head=True, spread=run.sharding is not None)
    check_positions("reward.max_length", settings.max_length, model.classifier)
    if not model.has_new_head:
        run.say(f"{settings.model} is a reward model already: training goes on from its own head")
        if model.pooling != settings.pooling:
            run.say(
                f"its scores were read with pooling '{model.pooling}', and are read with '{settings.pooling}' from now "
                f"on; set reward.pooling={model.pooling} to go on as it was"
            )
    model.pooling, model.mean, model.std = settings.pooling, 0.0, 1.0
    return model


class LanguageHead(torch.nn.Module):
    """The output embeddings of a language model without the rest of it."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.config, self.embeddings = model.config, model.get_output_embeddings()

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.embeddings


def language_head(reference: str, tokenizer: PreTrainedTokenizerBase) -> PolicyModel:
    """Reads log-probabilities from states with the output embeddings of the language model at the start.

    They stay as they are and are not saved: they hold the reward model's states near what says the next token.
    """
    try:
        policy = load_policy(reference, tokenizer)
    except RefusedError as error:
        raise RefusedError(f"reward.lm_coef: {error}") from error
    return PolicyModel(LanguageHead(policy)).requires_grad_(False)


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
    lm_head: PolicyModel | None = None,
    multiple: int = 1,
) -> dict[str, Tensor]:
    """One optimiser step; every answer is read once, and each prompt weighs the same however many it has.

    Padded rows are as wide as a multiple of `multiple`. Returns the losses, that of the ranking without margins, and
    the gradient's norm, still on the device. Where one of them is not finite, the step was not taken.
    """
    settings = run.settings
    model.train()
    ranks, mask = padded([row.ranks for row in batch])
    num_prompts = comparable(ranks, mask, settings.ties).sum().clamp(min=1).item()  # over all processes
    num_tokens = sum(row.num_best_tokens for row in batch)  # likewise
    of_ranking = partial(
        ranking_loss, loss=settings.loss, ties=settings.ties, label_smoothing=settings.label_smoothing,
        centering=settings.centering, num_prompts=num_prompts,
    )  # fmt: skip
    mine = run.shard(list(range(len(batch))))

    def gradients() -> Tensor:
        """Of this process's share; its losses."""
        totals = torch.zeros(2, device=run.device)
        cut = passes(batch, mine, run.microbatch_size, settings.microbatch_tokens, packed=run.unwrap(model).packed)
        for rows in run.accumulate(cut, model):
            part = collate([batch[i] for i in rows], pad, run.device, multiple=multiple)
            doing("the update", part.ids, len(rows))
            lm_loss = torch.zeros((), device=run.device)
            if lm_head is None:
                values = model(part.ids, part.attention)
            else:
                values, hidden = model(part.ids, part.attention, with_hidden=True)
                lm_loss = language_loss(lm_head, hidden, part, num_tokens)
            scores = part.by_prompt(run.unwrap(model).pool(values, part.response))
            plain = loss = of_ranking(scores, part.ranks, part.mask)
            if settings.margin_scale:
                loss = of_ranking(scores, part.ranks, part.mask, margin=margins(part.strengths, settings.margin_scale))
            loss = loss + settings.lm_coef * lm_loss
            run.backward(loss)
            totals += torch.stack([plain.detach(), lm_loss.detach()])
        return totals

    of_ranks, of_language = run.sum(within_memory(run, len(mine), gradients, model))
    found = {"loss": of_ranks, "grad_norm": run.clip_gradients(model, settings.max_grad_norm)}
    found |= {} if lm_head is None else {"lm_loss": of_language}
    return step_if_fine(run, [optimizer], found)


def language_loss(lm_head: PolicyModel, hidden: Tensor, part: Batch, num_tokens: int) -> Tensor:
    """Language-modelling loss on the best answers, from states [A,T,d]; a mean over the `num_tokens` of the step."""
    counted = part.response[:, 1:] & part.best[:, None]  # the state before a token judges it
    logprobs, _ = lm_head.read(hidden[:, :-1][counted], part.ids[:, 1:][counted], 1.0, with_entropy=False)
    return -logprobs.sum() / num_tokens


def normaliser(
    run: Runtime[RewardSettings], model: ScalarModel, data: Sequence[Ranked], pad: int
) -> tuple[float, float]:
    """What becomes 0, and what 1: by `normalise` the mean score of all training answers or of each prompt's best,
    and by `unit_scale` the standard deviation of all."""
    settings = run.settings
    if settings.normalise == "none":
        return 0.0, 1.0
    total = torch.zeros(5, dtype=torch.float64)
    for _, scores, part in scored(run, model, data, pad):
        refuse_no_numbers(scores)
        kept = scores[part.mask].cpu().double()
        best = kept[part.best.cpu()]
        counts = torch.tensor([float(len(kept)), float(len(best))])
        total += torch.stack([kept.sum(), kept.square().sum(), best.sum(), *counts])
    first, second, of_best, count, num_best = run.sum(total).tolist()
    mean = first / count
    std = max(second / count - mean**2, 1e-12) ** 0.5
    return of_best / num_best if settings.normalise == "reference" else mean, std if settings.unit_scale else 1.0


def read_rows(reader: RowReader[RewardSettings]) -> tuple[list[Ranking], list[Ranking]]:
    """Training and held-out rankings."""
    settings = reader.settings
    assert settings.data is not None  # the pipeline fills it in
    keep_ties = settings.ties == "soft" or settings.judge is not None  # a judge ranks anew
    loaded = read_rankings(settings.data, settings.max_dropped, keep_ties)
    reader.count_report("data", loaded.report)
    given = None
    if settings.eval_data:
        held_out = read_rankings(settings.eval_data, settings.max_dropped, keep_ties)
        reader.count_report("eval_data", held_out.report)
        given = held_out.rows
    return reader.split(loaded.rows, given, lambda row: prompt_key(row.prompt))


def ranked_rows(reader: RowReader[RewardSettings], folder: Path) -> tuple[list[Ranking], list[Ranking]]:
    """The same as they are learned from: with sampled answers, held-out ones as the judge ranks them."""
    settings = reader.settings
    if settings.num_sampled_answers:
        return read_answers(reader, folder)
    rows, eval_rows = read_rows(reader)
    if settings.judge:
        eval_rows = judged(settings.judge, eval_rows, noise=0.0, seed=settings.seed)
    return rows, eval_rows


def make_rows(
    reader: RowReader[RewardSettings], tokenizer: PreTrainedTokenizerBase, folder: Path
) -> Iterator[Iterator[Ranked]]:
    """Token ids of training and held-out rankings."""
    rows, eval_rows = ranked_rows(reader, folder)
    yield noting(reader, "", encode_rows(reader, tokenizer, rows))
    yield noting(reader, "held_out_", encode_rows(reader, tokenizer, eval_rows))


def noting(reader: RowReader[RewardSettings], side: str, rows: Iterable[Ranked]) -> Iterator[Ranked]:
    """The rows; how many prompts and answers they have, and how many of them strengths, is noted."""
    prompts, num_answers, num_with_strengths = set(), 0, 0
    for row in rows:
        prompts.add(prompt_key(row.prompt))
        num_answers += len(row.answers)
        num_with_strengths += row.strengths is not None
        yield row
    found = {"prompts": len(prompts), "answers": num_answers, "strengths": num_with_strengths}
    reader.noted |= {f"{side}{name}": number for name, number in found.items()}
