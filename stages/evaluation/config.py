"""What an evaluation is asked for."""

from typing import Literal, Self

from pydantic import Field, model_validator

from rlhf.stages.settings import ServedModel, Settings


class EvaluationSettings(Settings):
    """How much is measured; what answers are sampled with is that of the run's ppo stage, once it is finished."""

    form: Literal["full", "cheap"] = "full"
    """cheap is what a run does after a stage, and keeps what it has measured before."""
    num_prompts: int = Field(128, ge=1)
    """Held-out prompts that every model answers, if there are as many."""
    num_samples: int = Field(4, ge=1)
    """Answers of each model to each prompt."""
    best_of: int = Field(16, ge=0)
    """Answers of SFT to each prompt for the best-of-n curve; 0 for none."""
    num_tokens: int = Field(50_000, ge=1)
    """Held-out tokens, of text and of responses, that perplexities are taken of, if there are as many."""
    max_new_tokens: int = Field(128, ge=1)
    """Longest answer where the run has no finished ppo stage, which has its own; at most half of sft.max_length."""
    temperature: float = Field(1.0, gt=0)
    """What it is sampled at there."""
    judge: str | None = None
    """module:function (prompts, responses) -> qualities."""
    judge_from: ServedModel | None = None
    """A model behind a server that compares the answers of two models, in both orders."""
    tasks: list[str] = Field([])
    """Tasks of lm-eval that every model is given."""
    include_path: str | None = None
    """Folder with tasks of one's own for lm-eval."""

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.judge is not None and self.judge_from is not None:
            raise ValueError("judge and judge_from: one of the two can judge; leave the other out")
        return self


def cheap(judge: str | None) -> EvaluationSettings:
    """What a run measures after a stage, in about a second."""
    chosen = {"form": "cheap", "num_prompts": 16, "num_samples": 1, "best_of": 0, "num_tokens": 2000, "judge": judge}
    return EvaluationSettings.model_validate(chosen)
