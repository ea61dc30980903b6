"""What the files of a run have to look like to be drawn. Each shape takes what JSON holds, and raises ValueError.

What comes out has the types, the keys and the range that all code of the report takes for granted.
"""

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, FiniteFloat, model_validator

from rlhf.pipeline.scaling import PowerLaw
from rlhf.pipeline.summary import LARGEST, Entry, FolderName, Metrics, Seconds, Summary, entries_in
from rlhf.stages.evaluation.records import Damaged
from rlhf.stages.metric_names import NAMES, SHARES

ROUNDING = 1e-6
_NUMBERS = {*NAMES, "guessing_loss"}
_LISTS = ("findings", "gates_failed")

Number = Annotated[FiniteFloat, Field(ge=-LARGEST, le=LARGEST)]
Positive = Annotated[float, Field(gt=0, le=LARGEST)]
Share = Annotated[float, Field(ge=-ROUNDING, le=1 + ROUNDING)]
Count = Annotated[int, Field(ge=0, le=10**18)]


def is_told(value: Any) -> bool:
    """False for None, and for numbers that are not finite."""
    return value is not None and (not isinstance(value, int | float) or abs(value) <= LARGEST)


Loss = Annotated[Number | None, BeforeValidator(lambda value: value if is_told(value) else None)]
"""None where it is not finite."""


def logged(content: Any) -> dict[str, Any]:
    """A line of metrics.jsonl: its step, and the numbers that are finite."""
    if not isinstance(content, dict):
        raise Damaged(": the whole line is damaged (no object)")
    for name, value in content.items():
        if value is not None and not isinstance(value, int | float):
            raise Damaged(f": {name} is damaged (no number)")
    found = {name: value for name, value in content.items() if is_told(value)}
    if not 0 <= found.get("step", -1) <= 10**18:
        raise Damaged(": step is damaged (no number of a step)")
    return found


def final(metrics: dict[str, Any]) -> dict[str, Any]:
    """Final metrics of a stage: those that are calculated with are numbers, shares lie between 0 and 1."""
    for name, value in metrics.items():
        if name in _LISTS:
            right, wanted = isinstance(value, list) and all(isinstance(one, str) for one in value), "a list of texts"
        elif name == "over_optimised_because":
            right, wanted = isinstance(value, str), "a text"
        elif value is None or not (name in _NUMBERS or name.startswith("num_")):
            continue
        elif isinstance(value, bool) or not isinstance(value, int | float):
            right, wanted = False, "a number"
        elif name in SHARES:
            right, wanted = not is_told(value) or -ROUNDING <= value <= 1 + ROUNDING, "a share between 0 and 1"
        else:
            counts = name.startswith(("num_", "vocab_size", "best_step"))
            right, wanted = not counts or not value < 0, "0 or more"
        if not right:
            raise ValueError(f"{name} should be {wanted}")
    return metrics


def summary(content: Any) -> dict[str, Entry]:
    """summary.json as `read_summary` reads it, with final metrics that can be calculated with."""
    found = entries_in(Summary.model_validate(content))
    for name, entry in found.items():
        try:
            final(entry.metrics)
        except ValueError as error:
            raise Damaged(f": metrics of {name} are damaged, or of another version ({error})") from None
    return found


def of_evaluation(content: Any, place: str = "") -> None:
    """Raises Damaged where a number of what `records` read is too large to be drawn, or a spread is none."""
    if isinstance(content, dict | list):
        if place.endswith(".quantiles") and len(content) != 5:
            raise Damaged(f": {place[1:]} is damaged, or of another version ({len(content)} of 5 numbers)")
        for key, value in content.items() if isinstance(content, dict) else enumerate(content):
            of_evaluation(value, f"{place}.{key}")
    elif content is not None and not is_told(content):
        raise Damaged(f": {place[1:]} is damaged (a number that large is none that was measured)")


class Kept(BaseModel):
    """Rows of a source."""

    kept: Count
    of: Count
    left_out: dict[str, Count]


class Made(BaseModel):
    """With what a stage was made."""

    versions: dict[str, str] = {}
    commit: str | None = None
    processes: Annotated[Count, Field(ge=1)] | None = None
    finished: str | None = None


class Settings(BaseModel):
    """Of a stage, shown as they are."""

    model_config = ConfigDict(extra="allow")
    rollout_batch_size: Count | None = None


class Manifest(BaseModel):
    """manifest.json."""

    files: dict[str, str]
    sizes: dict[str, int] = {}
    key: str | None = None
    inputs: dict[str, str] = {}
    data: dict[str, str] = {}
    rows: dict[str, Kept] = {}
    settings: Settings = Settings()
    made_with: Made = Made()
    metrics: Annotated[Metrics, AfterValidator(final)] = {}


class Text(BaseModel):
    """What a base model wrote: a line of the pretrain stage's samples.jsonl."""

    step: Count
    prompt: str
    text: str


class Sample(BaseModel):
    """A line of the ppo stage's samples.jsonl."""

    prompt: str
    sft: str | None = None
    ppo: str | None = None
    sft_score: Number | None = None
    ppo_score: Number | None = None
    sft_quality: Number | None = None
    ppo_quality: Number | None = None


class Documents(BaseModel):
    """A source of pretraining."""

    name: str
    path: str
    documents: Count
    unusable_rows: dict[str, Count] = {}
    left_out: dict[str, Count] = {}
    tokens: Count | None = None
    held_out_tokens: Count | None = None


class Corpus(BaseModel):
    """corpus.json."""

    sources: list[Documents]


class Group(BaseModel):
    """Pairs of a reward model's report card."""

    name: str
    pairs: Count
    accuracy: Share
    prompts: Count | None = None
    prompt_accuracy: Share | None = None


class Bin(BaseModel):
    """Pairs of which it is about as sure."""

    confidence: Share
    accuracy: Share
    pairs: Annotated[Count, Field(ge=1)]


class Histogram(BaseModel):
    """How many answers have which score."""

    edges: list[Number]
    chosen: list[Number]
    rejected: list[Number]

    @model_validator(mode="after")
    def _fits(self) -> "Histogram":
        if not 0 < len(self.chosen) == len(self.rejected) == len(self.edges) - 1:
            raise ValueError("edges, chosen and rejected do not fit together")
        return self


class Compared(BaseModel):
    """Another reward model on the same pairs."""

    model: str
    accuracy: Share


class Agreement(BaseModel):
    """Of several reward models."""

    all_agree: Share
    mean_pairwise: Share
    score_std: Number


class Card(BaseModel):
    """card.json."""

    num_pairs: Count
    num_prompts: Count
    by_length: list[Group]
    by_margin: list[Group]
    by_source: list[Group]
    reliability: list[Bin]
    reliability_after_temperature: list[Bin]
    histogram: Histogram
    compared: list[Compared] | None = None
    agreement: Agreement | None = None

    @model_validator(mode="after")
    def _compares(self) -> "Card":
        if self.compared and not self.agreement:
            raise ValueError("compared has no agreement beside it")
        return self


class Worst(BaseModel):
    """A line of worst_pairs.jsonl."""

    prompt: str
    better: str
    better_score: Number
    better_rank: Number
    worse: str
    worse_score: Number
    worse_rank: Number


class Variant(BaseModel):
    """A variant of a sweep."""

    name: str
    settings: dict[str, Any]
    folder: FolderName | None = None
    num_parameters: Count | None = None
    num_non_embedding_parameters: Count | None = None
    num_tokens: Count | None = None
    vocab_size: Count | None = None
    val_loss: Loss = None
    best_step: Count | None = None
    seconds: Seconds | None = None
    error: str | None = None


def _of_usual_size(law: PowerLaw) -> PowerLaw:
    for name, value in asdict(law).items():
        if not is_told(value):
            raise ValueError(f"{name} is too large, or no number")
    return law


class Part(BaseModel):
    """Losses over parameters, tokens or compute, and the line through them."""

    points: list[tuple[Positive, Positive]]
    fit: Annotated[PowerLaw, AfterValidator(_of_usual_size)] | None = None

    @model_validator(mode="after")
    def _can_be_drawn(self) -> "Part":
        """No point of the line is too high."""
        law = self.fit
        if law and not all(abs(law.exponent * (law.log10_constant - math.log10(x))) < 100 for x, _ in self.points):
            raise ValueError("its fit is far from its points")
        return self


class Scaling(BaseModel):
    """A scaling study."""

    parameters: Part
    tokens: Part
    compute: Part


class Sweep(BaseModel):
    """sweep.json."""

    rows: list[Variant]
    scaling: Scaling | None = None


def shape(kind: type[BaseModel]) -> Callable[[Any], dict[str, Any]]:
    """Takes what has the shape of a `kind`: a dict with what is there and not None."""
    return lambda content: kind.model_validate(content).model_dump(exclude_none=True, exclude_unset=True)


def sweep(content: Any) -> dict[str, Any]:
    """sweep.json with all its keys."""
    return Sweep.model_validate(content).model_dump()
