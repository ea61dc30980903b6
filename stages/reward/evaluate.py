"""How good the reward model is, from its scores of the held-out answers: each read once, shared by the processes."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlhf.data.errors import DataError, RefusedError, SettingsError
from rlhf.data.rows import prompt_key, prompt_text
from rlhf.data.tokens import encode_examples
from rlhf.stages.disk import replace_text
from rlhf.stages.models import ScalarModel, load_scalar, load_tokenizer
from rlhf.stages.out_of_memory import doing
from rlhf.stages.reward.batches import Batch, Ranked, collate, padded, passes
from rlhf.stages.reward.card import Scored, accuracy_of, agreement, ordered_pairs, report_card, worst_pairs
from rlhf.stages.reward.config import RewardSettings
from rlhf.stages.reward.objective import ranking_accuracy
from rlhf.stages.runtime import Runtime
from rlhf.stages.text_limits import num_positions

Others = dict[str, list[list[float] | None]]
"""Scores of each held-out ranking's answers by other reward models; None where one has no room for an answer, or a
score that is not finite."""


def refuse_nothing_to_measure(data: Sequence[Ranked]) -> None:
    """Held-out rankings are of use where two answers differ in rank; with `ties: soft` there may be no such one."""
    if all(len(set(row.ranks)) == 1 for row in data):
        raise DataError(
            "reward.eval_data: no held-out prompt has two answers of different rank, so there is no accuracy to "
            "measure; hold out more prompts (eval_share) or give an eval_data with fewer ties"
        )


@torch.no_grad()
def scored(
    run: Runtime[RewardSettings], model: ScalarModel, data: Sequence[Ranked], pad: int
) -> Iterator[tuple[list[int], Tensor, Batch]]:
    """This process's share of the data in forward passes: (row numbers, scores [N,K], what was read)."""
    model.eval()
    settings = run.settings
    mine = run.shard(list(range(len(data))))
    for rows in passes(data, mine, run.microbatch_size, settings.microbatch_tokens):
        part = collate([data[i] for i in rows], pad, run.device)
        doing("evaluation", part.ids, len(rows))
        yield rows, part.by_prompt(model.pool(model(part.ids, part.attention), part.response)), part


def accuracy(run: Runtime[RewardSettings], model: ScalarModel, data: Sequence[Ranked], pad: int) -> float:
    """Share of held-out pairs in the right order, each counted once; equal scores count one half."""
    total = torch.zeros(2, dtype=torch.float64)
    for _, scores, part in scored(run, model, data, pad):
        refuse_no_numbers(scores)
        total += torch.stack(ranking_accuracy(scores, part.ranks, part.mask)).cpu()
    correct, pairs = run.sum(total).tolist()
    return correct / pairs


def refuse_no_numbers(scores: Tensor) -> None:
    """Scores that are not finite must neither be averaged nor compared."""
    if bad := int((~scores.isfinite()).sum()):
        raise RuntimeError(
            f"{bad} of {scores.numel()} scores are no finite numbers: training diverged; lower reward.learning_rate"
        )


def longer_wins_accuracy(data: Sequence[Ranked]) -> float:
    """What always preferring the longer answer would reach on the same pairs: the figure to beat."""
    ranks, mask = padded([row.ranks for row in data])
    tokens, _ = padded([[float(length) for length in lengths(row)] for row in data])
    correct, pairs = ranking_accuracy(tokens, ranks, mask)
    return (correct / pairs).item()


def grade(
    run: Runtime[RewardSettings], model: ScalarModel, data: Sequence[Ranked], pad: int, others: Others
) -> dict[str, Any]:
    """The figures of the report card; the rest goes into card.json and worst_pairs.jsonl of the stage's folder."""
    rows = [
        Scored(
            scores, row.ranks, lengths(row), row.strengths, row.source, prompt_text(row.prompt), row.responses,
            key=prompt_key(row.prompt),
        )
        for row, scores in zip(data, all_scores(run, model, data, pad), strict=True)
    ]  # fmt: skip
    figures, card = report_card(rows, scale=model.std)
    card |= compare(rows, others)
    worst = "".join(json.dumps(line) + "\n" for line in worst_pairs(rows))
    if run.is_main:
        replace_text(run.folder / "card.json", json.dumps(card, indent=1))
        replace_text(run.folder / "worst_pairs.jsonl", worst)
    return figures


def all_scores(run: Runtime[RewardSettings], model: ScalarModel, data: Sequence[Ranked], pad: int) -> list[list[float]]:
    """Scores of each ranking's answers, in every process."""
    found: list[tuple[int, list[float]]] = []
    for rows, scores, part in scored(run, model, data, pad):
        scores, mask = scores.cpu(), part.mask.cpu()
        found += [(i, scores[place][mask[place]].tolist()) for place, i in enumerate(rows)]
    return [scores for _, scores in sorted(run.gather_objects(found))]


def scores_of_others(run: Runtime[RewardSettings], data: Sequence[Ranked]) -> Others:
    """What the reward models of `compare_with` say; asked before training, so that a wrong name costs no training."""
    found: Others = {}
    for reference in run.settings.compare_with:
        try:
            tokenizer = load_tokenizer(reference)
            model = load_scalar(reference, tokenizer).to(run.device)
        except RefusedError as error:
            raise SettingsError(f"reward.compare_with: {error}") from error
        positions = num_positions(model.classifier)
        read: list[Ranked] = []
        places = []
        pairs = ((row.prompt, text) for row in data for text in row.responses)
        examples = encode_examples(tokenizer, pairs, positions)
        for place, row in enumerate(data):
            encoded = [next(examples) for _ in row.responses]
            answers = [answer for answer in encoded if answer is not None]
            if len(answers) == len(encoded):
                read.append(replace(row, answers=answers))
                places.append(place)
        scores: list[list[float] | None] = [None] * len(data)
        bad = 0
        with run.watched():
            read_scores = all_scores(run, model, read, tokenizer.pad_token_id)
        for place, its_scores in zip(places, read_scores, strict=True):
            if all(map(math.isfinite, its_scores)):
                scores[place] = its_scores
            else:
                bad += 1
        if len(read) < len(data):
            run.say(f"{reference} has no room for answers in {len(data) - len(read)} of {len(data)} held-out rankings")
        if bad:
            run.say(
                f"{reference} gives no finite scores to answers in {bad} of {len(data)} held-out rankings; left out"
            )
        found[reference] = scores
    return found


def compare(rows: list[Scored], others: Others) -> dict[str, Any]:
    """Accuracy of this and each other model, and how far all agree, on the rankings that all have read."""
    common = [place for place in range(len(rows)) if all(scores[place] for scores in others.values())]
    pairs = ordered_pairs([rows[place] for place in common])
    if not others or not pairs:
        return {}
    models = [[rows[place].scores for place in common]]
    compared = [{"model": "this one", "accuracy": accuracy_of(pairs)}]
    for reference, scores in others.items():
        models.append([scores[place] or [] for place in common])
        own = [replace(rows[place], scores=found) for place, found in zip(common, models[-1], strict=True)]
        compared.append({"model": reference, "accuracy": accuracy_of(ordered_pairs(own))})
    return {"compared": compared, "agreement": agreement(models, pairs)}


def lengths(row: Ranked) -> list[int]:
    """Tokens of each answer, eos included."""
    return [len(answer.input_ids) - answer.prompt_length for answer in row.answers]
