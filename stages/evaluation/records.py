"""What an evaluation leaves in the run folder, evaluation.json and evaluation.jsonl, and how it is read. No torch."""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, FiniteFloat

FIGURES, ANSWERS = "evaluation.json", "evaluation.jsonl"
"""In the run folder: the figures, and the answers of the models side by side."""
NAMES = ("base", "sft", "ppo")

Name = Literal["base", "sft", "ppo"]
Number = FiniteFloat | None
Interval = tuple[FiniteFloat, FiniteFloat] | None


class Spread(BaseModel):
    """A number of every answer."""

    mean: FiniteFloat
    std: FiniteFloat
    quantiles: list[FiniteFloat]
    """The 5th, 25th, 50th, 75th and 95th percentile."""


class Model(BaseModel):
    """What was measured of one model."""

    model: str
    digest: str | None = None
    keys: dict[str, str] = {}
    """Of text, response and answers: what the figures depend on, so that the cheap form knows what it has measured."""
    text_perplexity: Number = None
    num_text_tokens: int = 0
    text_bits_per_byte: Number = None
    response_perplexity: Number = None
    num_response_tokens: int = 0
    response_bits_per_byte: Number = None
    score: Spread | None = None
    quality: Spread | None = None
    length: Number = None
    eos_share: Number = None
    distinct_1: Number = None
    distinct_2: Number = None
    repetition: Number = None
    refusal_share: Number = None
    kl: Number = None
    kl_interval: Interval = None


class Pair(BaseModel):
    """How often one model's answers are better than the other's."""

    one: Name
    other: Name
    by: Literal["score", "judge"]
    wins: int
    ties: int
    losses: int
    win_rate: FiniteFloat
    interval: tuple[FiniteFloat, FiniteFloat]
    length_controlled: Number = None
    length_controlled_interval: Interval = None


class BestOf(BaseModel):
    """What the best of n answers of SFT reaches."""

    n: int
    score: FiniteFloat
    score_interval: Interval = None
    quality: Number = None
    kl: FiniteFloat


class Asked(BaseModel):
    """What was asked for, and how answers were sampled."""

    num_samples: int | None = None
    best_of: int | None = None
    num_tokens: int | None = None
    seed: int | None = None
    temperature: Number = None
    max_new_tokens: int | None = None
    num_prompts: int | None = None


class Figures(BaseModel):
    """evaluation.json."""

    form: Literal["full", "cheap"]
    settings: Asked = Asked()
    reward_model: str | None = None
    judge: str | None = None
    models: dict[Name, Model]
    pairs: list[Pair] = []
    best_of_n: list[BestOf] | None = None
    tasks: dict[str, dict[str, dict[str, Number]]] | None = None
    answers_digest: str | None = None
    """`short_hash` of the rows of evaluation.jsonl that belong to it."""


class Row(BaseModel):
    """A line of evaluation.jsonl: a prompt, and by model what was answered first."""

    prompt: str
    answers: dict[Name, str]
    scores: dict[Name, FiniteFloat] = {}
    qualities: dict[Name, FiniteFloat] = {}
    lengths: dict[Name, int] = {}
    ended: dict[Name, bool] = {}
    kl: dict[Name, Number] = {}


def read_figures(run_dir: Path) -> dict[str, Any] | None:
    """The run's evaluation with every key of `Figures`, models in the order of NAMES.

    None if there is none that can be read: one that is cut short, edited by hand, or of another version.
    """
    try:
        content = json.loads((run_dir / FIGURES).read_text(encoding="utf-8"))
        found = Figures.model_validate(content).model_dump(mode="json")
        return found | {"models": {name: found["models"][name] for name in NAMES if name in found["models"]}}
    except (OSError, ValueError):  # of which ValidationError is one
        return None


def read_answers(run_dir: Path, digest: str | None) -> list[dict[str, Any]]:
    """The rows of answers of the evaluation whose `answers_digest` is given; empty if there are none that can be read.

    Of the two files one may be newer, after a kill or beside another evaluation: rows of another one are not read.
    """
    try:
        lines = (run_dir / ANSWERS).read_text(encoding="utf-8").split("\n")  # and not at U+2028, which texts may hold
        rows = [json.loads(line) for line in lines if line]
        return [Row.model_validate(row).model_dump() for row in rows] if short_hash(rows) == digest else []
    except (OSError, ValueError):
        return []


def short_hash(content: Any) -> str:
    """Of anything that is JSON."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
