"""Stages of fifteen steps on ten rows, and a way to end them right after a checkpoint."""

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from stages_world import byte_tokenizer, run_stage, tiny_policy, without_clock

from rlhf.stages.artifact import Artifact
from rlhf.stages.models import save_folder
from rlhf.stages.runtime import Runtime
from rlhf.stages.sft.trainer import CheckpointedTrainer

STEPS = 15
WORDS = [f"{a}{b}" for a in "abcdefg" for b in "xyz"]
FIELDS: dict[str, dict[str, Any]] = {
    "pretrain": {
        "num_steps": STEPS, "global_batch_size": 2, "block_size": 31, "schedule": "constant", "weight_decay": 0.1,
        "vocab_size": 264, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "context_length": 32,
    },
    "sft": {"num_epochs": 3, "global_batch_size": 2, "max_length": 32},
    "reward": {"num_epochs": 3, "global_batch_size": 2, "max_length": 32, "judge": None, "num_sampled_answers": 0},
    "ppo": {
        "num_iterations": STEPS, "rollout_batch_size": 2, "max_prompt_length": 16, "max_new_tokens": 4,
        "num_epochs": 2, "num_minibatches": 1, "normalise_scores": True, "ema_decay": 0.5, "kl_target": 0.1,
        "kl_horizon": 50, "critic_learning_rate": 1e-3, "judge": None,
    },
}  # fmt: skip


class Killed(BaseException):
    """Stands for kill -9: nothing catches it."""


def make_world(root: Path, shape: str, dropout: float) -> dict[str, dict[str, Any]]:
    """Ten rows, five held-out rows and models on disk; the settings of each stage."""
    root.mkdir(exist_ok=True)
    save_folder(root / "policy", tiny_policy(shape, dropout), byte_tokenizer())
    for name, words in (("rows", WORDS[:10]), ("held_out", WORDS[10:15])):
        lines = [
            {"prompt": word, "response": word * 2, "responses": [word * 3, "q" + word], "ranks": [1, 2]}
            for word in words
        ]
        (root / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (root / f"{name}.txt").write_text("\n\n".join(word + word.join("0123456789") for word in words) + "\n")
    common = {"eval_data": str(root / "held_out.jsonl"), "data": str(root / "rows.jsonl"), "learning_rate": 1e-3,
              "log_every": 3, "report_to": []}  # fmt: skip
    found: dict[str, dict[str, Any]] = {stage: {**common, **fields} for stage, fields in FIELDS.items()}
    for stage in ("pretrain", "reward", "ppo"):
        found[stage]["eval_every"] = 5
    for stage in ("sft", "reward", "ppo"):
        found[stage]["model"] = str(root / "policy")
    found["pretrain"] |= {"data": str(root / "rows.txt"), "eval_data": str(root / "held_out.txt")}
    run_stage("reward", root / "scorer", **found["reward"])
    found["ppo"]["reward_model"] = str(root / "scorer" / "model")
    return found


def run_and_watch(stage: str, folder: Path, fields: dict[str, Any], end_after: int | None = None) -> list[Any]:
    """Run a stage, or go on with it, and end it right after the checkpoint of a step; the rows of each step."""
    seen: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        watch(stage, patch, seen)
        if end_after is not None:
            end_after_saving(patch, end_after)
            with pytest.raises(Killed):
                run_stage(stage, folder, save_every=end_after, **fields)
        else:
            run_stage(stage, folder, save_every=4, **fields)
    return seen


def watch(stage: str, patch: pytest.MonkeyPatch, seen: list[Any]) -> None:
    """Note what this process takes in each step."""
    train = importlib.import_module(f"rlhf.stages.{stage}.train")
    place, name = {"ppo": (train, "collect"), "sft": (CheckpointedTrainer, "cut")}.get(stage, (train, "optimise"))
    real = getattr(place, name)

    def noting(*arguments: Any, **options: Any) -> Any:
        if stage == "pretrain":
            run, batch = arguments[0], arguments[3]
            seen.append(sorted(batch[run.shard(list(range(len(batch))))].tolist()))
        elif stage == "reward":
            run, batch = arguments[0], arguments[3]
            seen.append(sorted(batch[i].answers[0].input_ids for i in run.shard(list(range(len(batch))))))
        elif stage == "ppo":
            seen.append(sorted(arguments[5]))
        elif torch.is_grad_enabled():  # else it is an evaluation
            seen.append(sorted(row.input_ids for row in arguments[1]))
        return real(*arguments, **options)

    patch.setattr(place, name, noting)


def end_after_saving(patch: pytest.MonkeyPatch, step: int) -> None:
    """End all processes as soon as the checkpoint of a step is whole."""
    saving = Runtime.saving

    @contextmanager
    def end_afterwards(self: Runtime, at: int) -> Iterator[Path]:
        with saving(self, at) as folder:
            yield folder
        if at == step:
            raise Killed

    patch.setattr(Runtime, "saving", end_afterwards)


def rows(folder: Path) -> list[dict[str, Any]]:
    """The metrics, without what a clock or the machine decides."""
    return [without_clock(row) for row in Artifact(folder).metrics]


def weights(folder: Path) -> dict[str, str]:
    """Hashes of all weights of a sealed stage."""
    return {name: digest for name, digest in Artifact(folder).manifest["files"].items() if "safetensors" in name}
