"""What an evaluation leaves in the run folder, evaluation.json and evaluation.jsonl, and how it is read. No torch."""

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, FiniteFloat, ValidationError

from rlhf.data.errors import plain_words

FIGURES, ANSWERS = "evaluation.json", "evaluation.jsonl"
"""In the run folder: the figures, and the answers of the models side by side."""
NAMES = ("base", "sft", "ppo")

Name = Literal["base", "sft", "ppo"]
Number = FiniteFloat | None
Interval = tuple[FiniteFloat, FiniteFloat] | None


class EvaluationFailed(RuntimeError):
    """A judge or a disk that failed while models were compared; the message says what, to people."""


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
    left_out: list[str] = []
    """What could not be measured, each with the stage's setting, its path and why."""
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


class Damaged(ValueError):
    """What is wrong with a file of the evaluation and where, in words that follow on the file's name."""


def load_figures(run_dir: Path) -> dict[str, Any] | None:
    """The run's evaluation with every key of `Figures`, models in the order of NAMES; None if there is none.

    Raises Damaged for one that cannot be taken: it is cut short, edited by hand, or of another version.
    """
    if not (run_dir / FIGURES).exists():
        return None
    _, figures = _parse(_read(run_dir / FIGURES), Figures)
    found = figures.model_dump(mode="json")
    return found | {"models": {name: found["models"][name] for name in NAMES if name in found["models"]}}


def load_answers(run_dir: Path, digest: str | None) -> list[dict[str, Any]]:
    """The rows of answers of the evaluation whose `answers_digest` is given. Raises Damaged as `load_figures` does.

    Of the two files one may be newer, after a kill or beside another evaluation: rows of another one are not taken.
    """
    if digest in (None, short_hash([])):
        return []
    lines = enumerate(_read(run_dir / ANSWERS).split(b"\n"), start=1)  # and not at U+2028, which texts may hold
    found = [_parse(line, Row, number) for number, line in lines if line.strip()]
    if short_hash([content for content, _ in found]) != digest:
        raise Damaged(f" is not of the same evaluation as {FIGURES}")
    return [row.model_dump() for _, row in found]


def read_figures(run_dir: Path) -> dict[str, Any] | None:
    """As `load_figures`, but None too for an evaluation that cannot be taken."""
    try:
        return load_figures(run_dir)
    except Damaged:
        return None


def read_answers(run_dir: Path, digest: str | None) -> list[dict[str, Any]]:
    """As `load_answers`, but empty where the rows cannot be taken."""
    try:
        return load_answers(run_dir, digest)
    except Damaged:
        return []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Damaged(f": cannot be read ({error.strerror or error})") from error


def _parse(text: bytes, kind: type[BaseModel], number: int | None = None) -> tuple[Any, BaseModel]:
    """JSON as it is, and as a `kind`; `number` is that of a line, None for a whole file. Raises Damaged."""
    first = number or 1
    try:
        content = json.loads(text.decode())
        return content, kind.model_validate(content)
    except UnicodeDecodeError as error:
        raise Damaged(f" line {first + text[: error.start].count(10)}: is damaged (not UTF-8)") from error
    except json.JSONDecodeError as error:
        raise Damaged(f" line {first - 1 + error.lineno}: is damaged ({error.msg})") from error
    except ValidationError as error:
        worst = error.errors()[0]
        key = ".".join(map(str, worst["loc"])) or ("the whole line" if number else "the whole file")
        place = f" line {number}: {key}" if number else f": {key}"
        raise Damaged(f"{place} is damaged, or of another version ({plain_words(worst)})") from error
    except (ValueError, RecursionError) as error:  # more digits or deeper nesting than Python reads
        raise Damaged(f" line {number}: is damaged ({error})" if number else f": is damaged ({error})") from error


def short_hash(content: Any) -> str:
    """Of anything that is JSON."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
