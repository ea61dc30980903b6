"""Held-out evaluation: the same prompts answered by SFT and PPO, scored by reward model and judge.

Run by hand on a finished stage: `python -m rlhf.stages.ppo.evaluate FOLDER`.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers import PreTrainedTokenizerBase

from rlhf.data.errors import RefusedError
from rlhf.data.rows import Prompt, prompt_text
from rlhf.stages.artifact import Artifact, read_settings
from rlhf.stages.disk import replace_text
from rlhf.stages.engines import Engine
from rlhf.stages.judge import judge_answers
from rlhf.stages.models import PolicyModel, load_policy, load_tokenizer
from rlhf.stages.out_of_memory import within_memory
from rlhf.stages.ppo.config import PPOSettings, RolloutSettings
from rlhf.stages.ppo.prompts import encode_prompts, read_rows
from rlhf.stages.ppo.rewards import Rewards, load_rewards, response_texts
from rlhf.stages.ppo.rollout import Rollout, collect, give_room, policy_engine
from rlhf.stages.runtime import Runtime


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
        prompts: list[Prompt],
        encoded: list[list[int]],
        engines: dict[PolicyModel, Engine],
    ) -> None:
        self.engines = engines
        """What samples from each policy that is to be evaluated."""
        self.run, self.tokenizer, self.reference, self.rewards = run, tokenizer, reference, rewards
        repeats = run.settings.num_eval_samples
        self.asked = [prompt for prompt in prompts for _ in range(repeats)]
        self.prompts = [prompt_text(prompt.messages) for prompt in self.asked]
        self.encoded = [ids for ids in encoded for _ in range(repeats)]

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
        answers = [answer for _, answer in sorted(gather_object(found[:num]), key=lambda pair: pair[0])]
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

        def answer() -> Rollout:
            give_room(run, engine)
            return collect(
                engine, policy, self.reference, self.rewards, None, [self.encoded[i] for i in rows],
                [self.asked[i] for i in rows], settings, [self.tokenizer.eos_token_id], self.tokenizer,
                run.microbatch_size,
            )  # fmt: skip

        with run.accelerator.autocast():
            rollout = within_memory(run, len(rows), answer)
        texts = response_texts(self.tokenizer, rollout.responses, rollout.mask)
        columns = (rollout.scores, rollout.kl, rollout.ended, rollout.lengths)
        return [
            Answer(self.prompts[i], text, score, None, kl, ended, length)
            for i, text, score, kl, ended, length in zip(
                rows, texts, *(column.tolist() for column in columns), strict=True
            )
        ]


def evaluate_folder(folder: Path) -> dict[str, float]:
    """Answer the held-out prompts again with the models of a finished stage; the figures of `comparison`."""
    if not Artifact(folder).sealed:
        raise RefusedError(f"{folder}: not a finished ppo stage; it has no manifest.json")
    # Neither a server is needed for this, nor a second GPU.
    here = {"rollout": RolloutSettings.model_validate({}), "placement": "together"}
    settings = read_settings(folder, PPOSettings).model_copy(update=here)
    assert settings.model is not None
    run = Runtime(settings, folder, evaluate_only=True)
    tokenizer = load_tokenizer(str(folder / "model"))
    encoded, prompts = encode_prompts(run, tokenizer, read_rows(run)[1])
    policy, reference = (
        PolicyModel(load_policy(model, tokenizer)) for model in (str(folder / "model"), settings.model)
    )
    rewards = load_rewards(settings, tokenizer, policy.model)
    for model in (policy, reference, rewards):
        model.to(run.device).eval()
    engines = {model: policy_engine(run, model) for model in (policy, reference)}
    evaluator = Evaluator(run, tokenizer, reference, rewards, prompts, encoded, engines)
    figures = comparison(evaluator(reference), evaluator(policy))
    run.close()
    return figures


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


if __name__ == "__main__":
    try:
        for name, figure in evaluate_folder(Path(sys.argv[1])).items():
            print(f"{name:24} {figure:.4f}")
    except RefusedError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
