"""Answers sampled from the backbone, or from a model behind a server, and ranked by a judge with the written ones."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf.data.errors import SettingsError
from rlhf.data.rows import Messages, Ranking, prompt_key, prompt_text
from rlhf.data.tokens import answer_texts, encode_prompts
from rlhf.stages.checkpoints import saying_what_cannot_be_written
from rlhf.stages.disk import replace_text, sync
from rlhf.stages.endpoint import ChatModel
from rlhf.stages.engines.choice import make_engine
from rlhf.stages.judge import judge_answers
from rlhf.stages.models import load_policy
from rlhf.stages.out_of_memory import doing
from rlhf.stages.reward.config import RewardSettings
from rlhf.stages.row_files import RowReader
from rlhf.stages.runtime import Runtime
from rlhf.stages.text_limits import stops_of

ANSWERS = "answers.jsonl"
SAMPLED = "sampled.jsonl"
AT_ONCE = 128  # answers sampled together by each process


def add_sampled_answers(
    run: Runtime[RewardSettings],
    tokenizer: PreTrainedTokenizerBase,
    reader: RowReader[RewardSettings],
    rows: list[Ranking],
    eval_rows: list[Ranking],
) -> None:
    """Add `num_sampled_answers` per prompt and let the judge rank all; noise goes into training ranks only.

    The result lies in answers.jsonl of the stage's folder, so that a resumed run trains on the same answers; so does
    what the reader of the rows was told, so that they need not be read again.
    """
    settings = run.settings
    assert settings.judge is not None
    judge = settings.judge
    sampled = sample_answers(run, tokenizer, [row.prompt for row in [*rows, *eval_rows]])
    grown = [
        replace(row, responses=_distinct([*row.responses, *more]), ranks=[], strengths=None)
        for row, more in zip([*rows, *eval_rows], sampled, strict=True)
    ]
    if run.is_main:
        train = judged(judge, grown[: len(rows)], settings.judge_noise, settings.seed)
        held_out = judged(judge, grown[len(rows) :], 0.0, settings.seed)
        with saying_what_cannot_be_written(run.folder, ANSWERS):
            _write(run.folder / ANSWERS, reader, train, held_out)
    run.wait_for_all()


def read_answers(reader: RowReader[RewardSettings], folder: Path) -> tuple[list[Ranking], list[Ranking]]:
    """Training and held-out rankings as `add_sampled_answers` left them; `reader` is told what its reader was."""
    lines = [json.loads(line) for line in (folder / ANSWERS).read_text(encoding="utf-8").splitlines()]
    for line in lines:
        reader.said += line.get("said", [])
        reader.rows |= line.get("rows", {})
    train, held_out = ([Ranking(**line[side]) for line in lines if side in line] for side in ("train", "eval"))
    return train, held_out


def sample_answers(
    run: Runtime[RewardSettings], tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Messages]
) -> list[list[str]]:
    """`num_sampled_answers` texts per prompt from backbone or server; the work is shared by the processes.

    Those that are there already lie in sampled.jsonl of the stage's folder, [number of the prompt, text] in each line:
    a run that was stopped, or whose server failed, goes on from them.
    """
    settings = run.settings
    answer = _from_backbone(run, tokenizer, prompts) if settings.answers_from is None else _from_server(run, prompts)
    every = [i for i in range(len(prompts)) for _ in range(settings.num_sampled_answers)]
    path = run.folder / SAMPLED
    found = run.from_main(lambda: _read_sampled(path))
    if found:
        run.say(f"{len(found)} of {len(every)} answers were sampled before")
    while len(found) < len(every):
        if run.stop_requested():
            run.stop(0)
        batch = every[len(found) : len(found) + AT_ONCE * run.num_processes]
        mine = run.shard(batch)
        run.seed(per_process=True, step=len(found))
        with run.watched():
            texts = [text.strip() for text in answer(mine)] if mine else []
            rows = sorted(run.gather_objects(list(zip(mine, texts, strict=True))))
            run.on_main(partial(_append, path, rows), SAMPLED)
        found += rows
        run.say(f"sampled {len(found)} of {len(every)} answers", now_and_then=True)
    run.say(f"sampled {len(every)} answers to {len({prompt_key(prompt) for prompt in prompts})} prompts")
    del answer
    torch.cuda.empty_cache()
    answers: list[list[str]] = [[] for _ in prompts]
    for i, text in found:
        answers[i].append(text)
    return answers


def _read_sampled(path: Path) -> list[tuple[int, str]]:
    """The whole rows of sampled.jsonl; what a kill left of one is removed."""
    if not path.exists():
        return []
    whole, _, part = path.read_bytes().rpartition(b"\n")
    if part:
        replace_text(path, whole.decode() + "\n" * bool(whole))
    return [(i, text) for i, text in map(json.loads, whole.splitlines())]


def _append(path: Path, rows: list[tuple[int, str]]) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    sync([path])


def _from_backbone(
    run: Runtime[RewardSettings], tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Messages]
) -> Callable[[list[int]], list[str]]:
    settings = run.settings
    assert settings.model is not None
    policy = load_policy(settings.model, tokenizer).to(run.device).eval()
    room = settings.max_length - settings.max_new_tokens
    encoded = list(encode_prompts(tokenizer, prompts, max_length=room))
    engine = make_engine(policy, dtype=run.low_precision, compiled=True)
    stops = stops_of(policy, tokenizer)
    law = settings.max_new_tokens, settings.temperature, stops, tokenizer.pad_token_id

    def answer(rows: list[int]) -> list[str]:
        doing("sampling")
        return answer_texts(tokenizer, engine.generate([encoded[i] for i in rows], *law).tokens.tolist(), stops)

    return answer


def _from_server(run: Runtime[RewardSettings], prompts: Sequence[Messages]) -> Callable[[list[int]], list[str]]:
    settings = run.settings
    assert settings.answers_from is not None
    given = settings.answers_from
    try:
        model = ChatModel(given.url, given.model, given.key_variable)
    except ValueError as error:
        raise SettingsError(f"reward.answers_from.url: {error}") from error
    return lambda rows: model.answers([prompts[i] for i in rows], settings.max_new_tokens, settings.temperature)


def judged(judge: str, rows: list[Ranking], noise: float, seed: int) -> list[Ranking]:
    """The rows with ranks from the judge's qualities, which are the strengths too; rank 1 is best, equal ones tie.

    A share `noise` of the answers is graded blindly: with the quality of a random one, so that ties stay ties.
    """
    prompts = [prompt_text(row.prompt) for row in rows for _ in row.responses]
    responses = [response for row in rows for response in row.responses]
    qualities = judge_answers(judge, prompts, responses)
    chance = random.Random(seed)
    given = iter([chance.choice(qualities) if chance.random() < noise else quality for quality in qualities])
    ranked = []
    for row in rows:
        own = [next(given) for _ in row.responses]
        ranks = [1.0 + sum(other > quality for other in own) for quality in own]
        ranked.append(replace(row, ranks=ranks, strengths=own))
    return ranked


def _distinct(texts: list[str]) -> list[str]:
    """Non-empty texts, each once, in order."""
    return [text for text in dict.fromkeys(texts) if text.strip()]


def _write(path: Path, reader: RowReader[RewardSettings], rows: list[Ranking], eval_rows: list[Ranking]) -> None:
    lines: list[dict[str, Any]] = [{"said": reader.said, "rows": reader.rows}]
    lines += [{"train": asdict(row)} for row in rows] + [{"eval": asdict(row)} for row in eval_rows]
    replace_text(path, "".join(json.dumps(line) + "\n" for line in lines))
