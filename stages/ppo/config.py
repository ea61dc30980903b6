"""Settings of the PPO stage. Defaults follow PPO for language models as in Stiennon et al. and InstructGPT."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlhf.data.sources import Source
from rlhf.stages.settings import StageSettings


class PPOSettings(StageSettings):
    """PPO from the SFT model against the reward model; the reference is the SFT model itself."""

    stage: ClassVar[str] = "ppo"
    input_fields: ClassVar[tuple[str, ...]] = ("model", "reward_model")
    code_fields: ClassVar[tuple[str, ...]] = ("judge",)
    not_in_key: ClassVar[frozenset[str]] = StageSettings.not_in_key | {"num_gallery"}

    model: str | None = None
    """Folder or hub id of the policy's start and reference; the sft stage's model by default."""
    reward_model: str | None = None
    """Folder or hub id of a one-label sequence classifier; the reward stage's model by default."""
    data: Source
    """Prompts; rows with prompt or messages (answers in the rows are ignored)."""
    eval_data: Source | None = None
    """Prompts for the held-out evaluation; by default a share of the prompts is held out."""
    judge: str | None = None
    """module:function (prompts, responses) -> true qualities that the reward model never saw; evaluation only."""
    num_iterations: int = Field(100, ge=1)
    """Rollout phases, each followed by its updates."""
    rollout_batch_size: int = Field(128, ge=1)
    """Episodes per iteration, over all processes."""
    num_epochs: int = Field(4, ge=1)
    """Passes over an iteration's episodes."""
    num_minibatches: int = Field(1, ge=1)
    """Optimiser steps per epoch."""
    microbatch_size: int | None = Field(None, ge=1)
    """Episodes per forward pass on one device; the whole share of the minibatch by default."""
    max_prompt_length: int = Field(512, ge=1)
    """Longest prompt in tokens; longer ones are dropped and counted."""
    max_new_tokens: int = Field(128, ge=1)
    """Longest response in tokens."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; log-probabilities are taken at the same temperature everywhere."""
    learning_rate: float = Field(3e-6, ge=0)
    """Policy's learning rate; linear to zero."""
    critic_learning_rate: float = Field(9e-6, ge=0)
    """Critic's learning rate; linear to zero."""
    critic_warmup_iterations: int = Field(0, ge=0)
    """First iterations in which only the critic learns."""
    kl_coef: float = Field(0.05, ge=0)
    """Weight of the KL to the reference in the token rewards."""
    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token."""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """GAE's lambda."""
    clip_range: float = Field(0.2, gt=0)
    """Clip of the probability ratio."""
    value_clip_range: float = Field(0.2, gt=0)
    """Clip of the value's move since the rollout."""
    whiten_rewards: bool = False
    """Divide token rewards by their standard deviation over the rollout; the mean is kept."""
    missing_eos_penalty: float | None = None
    """What an answer without eos costs; None leaves its score as it is."""
    missing_eos: Literal["replace", "subtract"] = "replace"
    """Whether the penalty replaces the score (as minus the penalty) or is subtracted from it."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient norm to clip at, policy and critic separately."""
    eval_every: int = Field(25, ge=1)
    """Iterations between two evaluations on held-out prompts."""
    num_eval_samples: int = Field(1, ge=1)
    """Responses per held-out prompt in an evaluation."""
    num_gallery: int = Field(40, ge=0)
    """Held-out prompts whose SFT and PPO answers are kept side by side for the report."""

    @model_validator(mode="after")
    def _minibatches_fit(self) -> Self:
        if self.rollout_batch_size % self.num_minibatches:
            raise ValueError(
                f"rollout_batch_size {self.rollout_batch_size} must be a multiple of "
                f"num_minibatches {self.num_minibatches}"
            )
        if self.critic_warmup_iterations >= self.num_iterations:
            raise ValueError(
                f"critic_warmup_iterations {self.critic_warmup_iterations} leaves no policy update in "
                f"num_iterations {self.num_iterations}"
            )
        return self
