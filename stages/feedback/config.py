"""Settings of the feedback step."""

from typing import Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from rlhf.data.feedback.resolve import Rule, Who
from rlhf.data.sources import Source
from rlhf.stages.settings import ServedModel, StageSettings

RANKINGS = "rankings.jsonl"
"""In the step's folder: what came of it, rankings of all rounds so far."""
OF_RATING = ("target", "overlap", "rule", "raters")
"""Settings that change what becomes of the answers, and not the answers."""


class FeedbackSettings(StageSettings):
    """Several answers to each prompt are sampled, and ranked by people or by a judge, for the reward stage."""

    stage: ClassVar[str] = "feedback"
    data_fields: ClassVar[tuple[str, ...]] = ("prompts", "earlier")
    code_fields: ClassVar[tuple[str, ...]] = ("judge",)

    model: str | None = None
    """Folder or hub id of the model that answers; the sft stage's by default, and from the second round on the policy
    of the round before."""
    prompts: Source
    """Prompts to answer; the reward stage holds out its share of them itself."""
    num_prompts: int | None = Field(None, ge=1)
    """How many of them are put up for rating, others in each round; all by default."""
    choose_by: list[str] = Field([])
    """Two or more reward models (folders or hub ids): all prompts are answered, and those are put up on whose answers
    they disagree most. Without, num_prompts are drawn by chance."""
    num_answers: int = Field(4, ge=2)
    """Different answers per prompt; one that says what another says is drawn again a few times."""
    temperatures: list[float] = Field([1.0], min_length=1)
    """Of the sampled answers; several take turns."""
    max_new_tokens: int = Field(256, ge=1)
    """Length limit of the sampled answers in tokens."""
    max_length: int = Field(1024, ge=4)
    """Longest prompt + answer in tokens; longer prompts are cut from the left."""
    judge: str | None = None
    """module:function (prompts, responses) -> qualities that ranks the answers. It is not taken over from the recipe's
    top: without a judge, people rank."""
    judge_from: ServedModel | None = None
    """A model behind a server that ranks them: every pair is shown in both orders, and tied where it does not name the
    same answer both times."""
    target: int = Field(1, ge=1)
    """People that each prompt is to be rated by before the run goes on; who skips or flags a prompt is counted."""
    overlap: int = Field(0, ge=0)
    """How many of the prompts are for all people who come, whatever the target; who agrees with whom is seen there."""
    rule: Rule = "majority"
    """How several raters become one ranking: majority, mean_rank or bradley_terry."""
    raters: Who = "people-first"
    """Whose rankings count: people-first (judges' where there are none), people, judges or all."""
    round: int = Field(1, ge=1)
    """Which round it is; the pipeline counts."""
    earlier: Source | None = None
    """Rankings of the round before, beside whose store this one begins; the pipeline fills it in."""

    @property
    def by_people(self) -> bool:
        """Whether the step waits for people."""
        return self.judge is None and self.judge_from is None

    def inputs(self) -> dict[str, str | None]:
        return super().inputs() | {f"choose_by.{number}": model for number, model in enumerate(self.choose_by)}

    def result_settings(self) -> dict[str, Any]:
        found = super().result_settings() | {"judge_from": self.judge_from and self.judge_from.model}
        del found["choose_by"]  # the models' digests stand for it
        return found

    @field_validator("temperatures")
    @classmethod
    def _above_zero(cls, values: list[float]) -> list[float]:
        if min(values) <= 0:
            raise ValueError(f"{min(values)} is no temperature to sample with; they are above 0")
        return values

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.judge is not None and self.judge_from is not None:
            raise ValueError("judge and judge_from: one of the two can judge; leave the other out")
        if self.choose_by and (len(self.choose_by) < 2 or self.num_prompts is None):
            raise ValueError("choose_by takes two reward models or more, which can disagree, and num_prompts to choose")
        if self.max_new_tokens >= self.max_length:
            raise ValueError(
                f"max_new_tokens {self.max_new_tokens} leaves no room for a prompt in max_length {self.max_length}"
            )
        return self
