"""Held-out evaluation while PPO trains: the same prompts answered by SFT and PPO, scored by reward model and judge."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf.data.rows import prompt_text
from rlhf.stages.disk import replace_text
from rlhf.stages.engines import Engine
from rlhf.stages.judge import judge_answers
from rlhf.stages.models import PolicyModel
from rlhf.stages.out_of_memory import within_memory
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.ppo.prompts import Asked
from rlhf.stages.ppo.rewards import Rewards, response_texts
from rlhf.stages.ppo.rollout import Rollout, collect, give_room
from rlhf.stages.runtime import Runtime
from rlhf.stages.text_limits import stops_of


@dataclass
class Answer:
    """One response to one held-out prompt."""

    prompt: str
    response: str
    score: float
    quality: float | None  # the judge's, where there is one
    kl: float  # nats, to the reference
    ended: bool
    length: int  # tokens


class Evaluator:
    """Answers the held-out prompts with a policy, from a random stream of its own."""

    def __init__(
        self,
        run: Runtime[PPOSettings],
        tokenizer: PreTrainedTokenizerBase,
        reference: PolicyModel,
        rewards: Rewards,
        prompts: list[Asked],
        engines: dict[PolicyModel, Engine],
    ) -> None:
        self.engines = engines
        """What samples from each policy that is to be evaluated."""
        self.run, self.tokenizer, self.reference, self.rewards = run, tokenizer, reference, rewards
        repeats = run.settings.num_eval_samples
        self.asked = [asked for asked in prompts for _ in range(repeats)]
        self.prompts = [prompt_text(asked.prompt.messages) for asked in self.asked]

    def __call__(self, policy: PolicyModel) -> list[Answer]:
        """Answers in the order of the prompts, `num_eval_samples` each; all processes get all of them."""
        settings = self.run.settings
        found: list[tuple[int, Answer]] = []
        cuda = [self.run.device.index or 0] if self.run.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):  # the training stream goes on as if nothing had happened
            torch.manual_seed(settings.seed + 500 + self.run.rank)
            mine = self.run.shard(list(range(len(self.prompts))))
            size = max(settings.rollout_batch_size // self.run.num_processes, 1)  # as many as in a rollout
            most = -(-len(self.prompts) // self.run.num_processes)  # as often in every process: a server asks for it
            num = len(mine)
            if self.run.sharding:  # and sharded models ask for as many rows
                mine += [0] * (most - num)
            for rows in (mine[start : start + size] for start in range(0, most, size)):
                found += zip(rows, self._answers(policy, rows), strict=True)
        answers = [answer for _, answer in sorted(self.run.gather_objects(found[:num]), key=lambda pair: pair[0])]
        if judge := settings.judge:
            responses = [answer.response for answer in answers]
            qualities = self.run.from_main(lambda: judge_answers(judge, self.prompts, responses))
            for answer, quality in zip(answers, qualities, strict=True):
                answer.quality = quality
        return answers

    def _answers(self, policy: PolicyModel, rows: list[int]) -> list[Answer]:
        run, settings = self.run, self.run.settings
        engine = self.engines[policy]
        if not rows:
            engine.generate([], settings.max_new_tokens, settings.temperature, [], 0)
            return []
        stops = stops_of(policy.model, self.tokenizer)

        def answer() -> Rollout:
            give_room(run, engine)
            return collect(
                engine, policy, self.reference, self.rewards, None, [self.asked[i].ids for i in rows],
                [self.asked[i].prompt for i in rows], settings, stops, self.tokenizer, run.microbatch_size,
            )  # fmt: skip

        with run.accelerator.autocast():
            rollout = within_memory(run, len(rows), answer)
        texts = response_texts(self.tokenizer, rollout.responses, rollout.mask, stops)
        columns = (rollout.scores, rollout.kl, rollout.ended, rollout.lengths)
        return [
            Answer(self.prompts[i], text, score, None, kl, ended, length)
            for i, text, score, kl, ended, length in zip(
                rows, texts, *(column.tolist() for column in columns), strict=True
            )
        ]


def comparison(sft: list[Answer], ppo: list[Answer]) -> dict[str, float]:
    """The final figures: means over the answers, and PPO's win rate against SFT (ties count half)."""
    figures = {
        "score": _mean([a.score for a in ppo]),
        "sft_score": _mean([a.score for a in sft]),
        "score_win_rate": _win_rate([a.score for a in ppo], [a.score for a in sft]),
        "kl": _mean([a.kl for a in ppo]),
        "eos_share": _mean([a.ended for a in ppo]),
        "sft_eos_share": _mean([a.ended for a in sft]),
        "length": _mean([a.length for a in ppo]),
        "sft_length": _mean([a.length for a in sft]),
    }
    ppo_quality = [a.quality for a in ppo if a.quality is not None]
    sft_quality = [a.quality for a in sft if a.quality is not None]
    if ppo_quality:
        figures["true_quality"] = _mean(ppo_quality)
        figures["sft_true_quality"] = _mean(sft_quality)
        figures["win_rate"] = _win_rate(ppo_quality, sft_quality)
    return figures


def write_gallery(path: Path, sft: list[Answer], ppo: list[Answer], number: int = 40) -> None:
    """samples.jsonl: `number` prompts answered by SFT and PPO, one answer each, for people to compare."""
    lines: list[str] = []
    seen: set[str] = set()
    for before, after in zip(sft, ppo, strict=True):
        if before.prompt in seen or len(seen) == number:
            continue
        seen.add(before.prompt)
        row = {
            "prompt": before.prompt, "sft": before.response, "ppo": after.response,
            "sft_score": before.score, "ppo_score": after.score,
            "sft_quality": before.quality, "ppo_quality": after.quality,
        }  # fmt: skip
        lines.append(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n")
    replace_text(path, "".join(lines))


def _mean(values: list[Any]) -> float:
    return sum(values) / len(values)


def _win_rate(ours: list[float], theirs: list[float]) -> float:
    return _mean([(a > b) + (a == b) / 2 for a, b in zip(ours, theirs, strict=True)])
