"""Settings of the reward stage."""

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from rlhf.data.sources import Source
from rlhf.stages.settings import MICROBATCH_TOKENS, LoraSettings, MicrobatchTokens, ServedModel, StageSettings


class RewardSettings(StageSettings):
    """A scalar head on the SFT backbone, trained on ranked answers."""

    stage: ClassVar[str] = "reward"
    code_fields: ClassVar[tuple[str, ...]] = ("judge",)
    not_in_key: ClassVar[frozenset[str]] = StageSettings.not_in_key | {
        "eval_every", "microbatch_tokens", "packing", "compile", "min_accuracy", "min_over_longer_wins", "compare_with",
    }  # fmt: skip

    model: str | None = None
    """Folder or hub id of the backbone; the sft stage's model by default. A reward model keeps its head."""
    data: Source | None = None
    """Rankings: rows with chosen and rejected, or K responses with their ranks; those of the feedback step by default.
    [InstructGPT]"""
    eval_data: Source | None = None
    """Rankings for the held-out accuracy; by default a share of the prompts is held out."""
    judge: str | None = None
    """module:function (prompts, responses) -> qualities; ranks sampled answers and gives noiseless held-out ranks."""
    num_sampled_answers: int = Field(0, ge=0)
    """Answers per prompt that are sampled from the backbone and ranked by the judge with the written ones."""
    answers_from: ServedModel | None = None
    """Sample the answers from a model behind a server, which is sent the messages, instead of the backbone."""
    judge_noise: float = Field(0.0, ge=0, lt=1)
    """Share of the training answers that the judge grades blindly."""
    temperature: float = Field(1.0, gt=0)
    """Temperature of the sampled answers."""
    max_new_tokens: int = Field(64, ge=1)
    """Length limit of the sampled answers in tokens."""
    max_length: int = Field(1024, ge=4)
    """Longest prompt + response in tokens; longer prompts are cut from the left."""
    pooling: Literal["last", "mean"] = "last"
    """Where the score is read: at the last token, or averaged over the response's tokens."""
    loss: Literal["pairs", "plackett_luce", "best_of_k"] = "pairs"
    """Ranking loss: mean over all pairs of a ranking, listwise, or best against the rest. [InstructGPT, eq. 1; Luce
    1959, Plackett 1975; Ziegler 2019]"""
    ties: Literal["drop", "soft"] = "drop"
    """Equal ranks: no pair, or a pair with label one half (not with plackett_luce)."""
    margin_scale: float = Field(0.0, ge=0)
    """Margin of a pair per unit by which one answer's strength exceeds the other's; with loss pairs alone. [Llama 2]"""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Chance that a label is wrong."""
    centering: float = Field(0.0, ge=0)
    """Weight of the squared sum of a pair's scores, which keeps scores near zero. [Eisenstein 2023]"""
    lm_coef: float = Field(0.0, ge=0)
    """Weight of the language-modelling loss, a mean per token, on the best answers. [Secrets of RLHF]"""
    normalise: Literal["answers", "reference", "none"] = "answers"
    """Which training answers score 0 on average: all, the best of each prompt, or neither: scores stay as they were
    learned. [InstructGPT; N+]"""
    unit_scale: bool = True
    """Divide normalised scores by the standard deviation over all training answers. [Ziegler 2019]"""
    num_epochs: float = Field(1.0, gt=0)
    """Passes over the rankings; more than one overfits with large models. [InstructGPT]"""
    global_batch_size: int = Field(64, ge=1)
    """Rankings per optimiser step, over all processes; all answers of one stay together. [InstructGPT]"""
    learning_rate: float = Field(9e-6, ge=0)
    """Peak learning rate; cosine to a tenth. [InstructGPT]"""
    warmup_share: float = Field(0.03, ge=0, lt=1)
    """Share of the steps spent in linear warm-up."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient norm to clip at."""
    lora: LoraSettings | None = None
    """Train low-rank adapters and the head instead of all weights; model/ has them merged, and model/adapter/ as they
    are, for ppo's `layout: adapters`. [LoRA]"""
    microbatch_tokens: MicrobatchTokens = MICROBATCH_TOKENS
    """Tokens per forward pass on one device, padding included where it is read; rankings whose answers are of like
    length share one. So many keep a large GPU busy."""
    packing: bool | None = None
    """Read several answers as one row, without padding; they do not see each other. By default on a GPU in bf16 or
    fp16, where attention has a kernel for it. What a step learns from stays the same."""
    compile: bool = False
    """torch.compile on a GPU (elsewhere it does nothing): a minute more at the start, then faster."""
    eval_every: int = Field(100, ge=1)
    """Steps between two held-out accuracies."""
    min_accuracy: float | None = Field(None, gt=0, le=1)
    """Held-out accuracy below which the run stops before ppo; asked anew by every run, without training again."""
    min_over_longer_wins: float | None = Field(None, ge=0, le=1)
    """By how much accuracy has to exceed longer_wins_accuracy, or the run stops before ppo."""
    compare_with: list[str] = Field([])
    """Other reward models (folders or hub ids), scored on the same held-out rankings when this one is finished; the
    report card tells how far they agree."""

    def result_settings(self) -> dict[str, Any]:
        return super().result_settings() | {"answers_from": self.answers_from and self.answers_from.model}

    @model_validator(mode="after")
    def _options_of_pairs(self) -> Self:
        for name in ("margin_scale", "label_smoothing"):
            if getattr(self, name) and self.loss != "pairs":
                raise ValueError(f"{name} works with loss 'pairs', not with '{self.loss}'; set it to 0")
        if self.ties == "soft" and self.loss == "plackett_luce":
            raise ValueError("loss 'plackett_luce' works with ties 'drop' only")
        return self

    @model_validator(mode="after")
    def _samples_have_a_judge(self) -> Self:
        if self.num_sampled_answers and not self.judge:
            raise ValueError("num_sampled_answers needs a judge (module:function) to rank the answers")
        if self.answers_from and not self.num_sampled_answers:
            raise ValueError("answers_from has no effect without num_sampled_answers; leave it out, or set that")
        if self.num_sampled_answers and self.max_new_tokens >= self.max_length:
            raise ValueError(
                f"max_new_tokens {self.max_new_tokens} leaves no room for a prompt in max_length {self.max_length}"
            )
        return self
