"""Which prompts are put up for rating, where that is not all of them: some by chance, or those that a vote would tell
most about, on whose answers several reward models disagree."""

import random
from collections.abc import Iterator, Sequence
from itertools import combinations

import torch
from torch import Tensor

from rlhf.data.collate import pad_examples
from rlhf.data.errors import RefusedError, SettingsError
from rlhf.data.messages import Messages
from rlhf.data.tokens import Encoded, encode_example
from rlhf.stages.models import load_scalar, load_tokenizer
from rlhf.stages.text_limits import num_positions

AT_ONCE = 64  # answers that a reward model reads together


def by_chance(number: int, num_prompts: int, seed: int, round_: int) -> list[int]:
    """So many places of prompts, in order; others in each round."""
    return sorted(random.Random(f"prompts {seed} {round_}").sample(range(num_prompts), min(number, num_prompts)))


def most_disputed(
    number: int,
    prompts: Sequence[Messages],
    answers: Sequence[Sequence[str]],
    models: Sequence[str],
    device: torch.device,
) -> list[int]:
    """The places of the prompts on whose answers the reward models disagree most, in order."""
    scores = [list(score(model, prompts, answers, device)) for model in models]
    disputes = [disagreement(torch.stack(of_prompt)) for of_prompt in zip(*scores, strict=True)]
    return sorted(sorted(range(len(prompts)), key=lambda place: -disputes[place])[:number])


def disagreement(scores: Tensor) -> float:
    """How far apart models are, from their scores [M,K] of a prompt's answers: the standard deviation, over the models,
    of the probability that one answer beats another, on average over the pairs. 0 where there is no pair."""
    pairs = list(combinations(range(scores.shape[1]), 2))
    if not pairs:
        return 0.0
    first, second = map(list, zip(*pairs, strict=True))
    return float((scores[:, first] - scores[:, second]).sigmoid().std(0, correction=0).mean())


@torch.no_grad()
def score(
    reference: str, prompts: Sequence[Messages], answers: Sequence[Sequence[str]], device: torch.device
) -> Iterator[Tensor]:
    """A reward model's scores [K] of each prompt's answers; one that it has no room for scores 0, its mean."""
    try:
        tokenizer = load_tokenizer(reference)
        model = load_scalar(reference, tokenizer).to(device).eval()
    except RefusedError as error:
        raise SettingsError(f"feedback.choose_by: {error}") from error
    positions = num_positions(model.classifier)
    places = [(prompt, place) for prompt, texts in enumerate(answers) for place in range(len(texts))]
    read: list[tuple[tuple[int, int], Encoded]] = []
    for prompt, place in places:
        found = encode_example(tokenizer, prompts[prompt], answers[prompt][place], positions)
        if found is not None:
            read.append(((prompt, place), found))
    read.sort(key=lambda item: len(item[1].input_ids))
    scores = [torch.zeros(len(texts)) for texts in answers]
    for start in range(0, len(read), AT_ONCE):
        batch = read[start : start + AT_ONCE]
        ids, attention, response = pad_examples([encoded for _, encoded in batch], tokenizer.pad_token_id)
        values = model(ids.to(device), attention.to(device))
        pooled = model.pool(values, response.to(device)).cpu()  # [B]
        if not pooled.isfinite().all():
            raise SettingsError(f"feedback.choose_by: {reference} gives scores that are not finite numbers")
        for ((prompt, place), _), value in zip(batch, pooled, strict=True):
            scores[prompt][place] = value
    yield from scores
