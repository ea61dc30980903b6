"""The reward stage in small for its tests: rankings of a few letters and a run that can score them."""

import json
import random
from pathlib import Path
from typing import Any

from stages_world import byte_tokenizer, tiny_policy
from transformers import PreTrainedTokenizerBase

from rlhf.data.rows import Ranking
from rlhf.stages.models import save_folder
from rlhf.stages.reward.batches import Ranked, encode_rows
from rlhf.stages.reward.config import RewardSettings
from rlhf.stages.reward.train import train
from rlhf.stages.row_files import RowReader
from rlhf.stages.runtime import Runtime
from rlhf.stages.settings_file import write_settings

SMALL: dict[str, Any] = {
    "max_length": 48, "global_batch_size": 8, "num_epochs": 1, "learning_rate": 0.01, "eval_share": 0.3,
    "log_every": 1, "report_to": [],
}  # fmt: skip


def settings(**fields: Any) -> RewardSettings:
    return RewardSettings.load({**SMALL, **fields}, "reward")


def policy_folder(root: Path, **shape: Any) -> str:
    """A tiny language model with its tokenizer; its folder."""
    save_folder(root / "policy", tiny_policy(**shape), byte_tokenizer())
    return str(root / "policy")


def ranking(prompt: str, responses: list[str], ranks: list[float], **more: Any) -> Ranking:
    return Ranking([{"role": "user", "content": prompt}], responses, ranks, **more)


def rankings_file(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def marked(num: int, answers: int = 4, seed: int = 0) -> list[dict[str, Any]]:
    """Rankings that can be learned: the more exclamation marks the better."""
    chance = random.Random(seed)
    rows = []
    for _ in range(num):
        order = chance.sample(range(answers), answers)
        texts = ["".join(chance.choices("abcdefgh", k=6)) + "!" * marks for marks in order]
        rows.append({
            "prompt": "".join(chance.choices("abcdefgh", k=8)), "responses": texts,
            "ranks": [answers - marks for marks in order],
        })  # fmt: skip
    return rows


def run_reward(folder: Path, model: str, data: str, **fields: Any) -> dict[str, Any]:
    """The whole stage, in about half a second."""
    write_settings(folder, settings(model=model, data=data, **fields))
    return train(folder)


def new_run(folder: Path, **fields: Any) -> Runtime[RewardSettings]:
    """A run that trains nothing, for what needs one, with a model and rankings in its folder; close it."""
    folder.mkdir(exist_ok=True)
    given = {"model": policy_folder(folder), "data": rankings_file(folder / "rows.jsonl", marked(12))}
    return Runtime(settings(**{**given, **fields}), folder)


def tokenised(
    run: Runtime[RewardSettings], tokenizer: PreTrainedTokenizerBase, rows: list[Ranking], said: list[str] | None = None
) -> list[Ranked]:
    """Rankings as the stage reads them; what is said of them is added to `said`."""
    return list(encode_rows(RowReader(run.settings, [] if said is None else said), tokenizer, rows))
