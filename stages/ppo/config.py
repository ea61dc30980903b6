"""Settings of the PPO stage. Defaults follow PPO for language models as in Stiennon et al. and InstructGPT."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from rlhf.data.errors import SettingsError
from rlhf.data.sources import Source, takes_rows
from rlhf.stages.settings import MICROBATCH_TOKENS, LoraSettings, MicrobatchTokens, Settings, StageSettings


class RewardSpec(Settings):
    """One more part of the score: a reward model or a Python function."""

    model: str | None = None
    """Folder or hub id of a one-label sequence classifier; encoders, and decoders with another tokenizer, are given
    the text."""
    function: str | None = None
    """module:function (prompts, responses) or (prompts, responses, rows) -> one finite number per response; prompts
    and responses are lists of text, rows the rows of `data` that the prompts stand in, as dicts."""
    weight: float = 1.0
    """What its scores are multiplied by; negative for a cost."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if (self.model is None) == (self.function is None):
            raise ValueError("a reward is either a model or a function; set one of the two")
        if self.function is not None and ":" not in self.function:
            raise ValueError(f"function '{self.function}' is not of the form package.module:function")
        return self


class RolloutSettings(Settings):
    """What samples the responses."""

    engine: Literal["auto", "static", "transformers", "vllm"] = "auto"
    """static is built in and fast; transformers is `generate`; vllm a server; auto takes static where it can.
    [transformers]"""
    server_url: str | None = None
    """Address of the vLLM server, such as http://127.0.0.1:8000; for engine vllm alone."""
    weights_folder: str | None = None
    """Folder for the weights on their way to the server, which must see it under the same path; the stage's own by
    default."""
    timeout: float = Field(600.0, gt=0)
    """Seconds to wait for an answer of the server."""
    one_step_off: bool = False
    """Sample each rollout while the one before is scored and learned from, from the policy as it was before that. On a
    GPU it takes placement second_gpu, or a server; importance weights make up for the difference."""
    importance_cap: float | None = Field(2.0, gt=0)
    """Bound on a token's importance weight, the trainer's probability over the sampler's; null leaves them out. For
    engine vllm and one_step_off."""

    @property
    def is_off_policy(self) -> bool:
        """Whether responses come from a law beside the policy's: a server's, or that of older weights."""
        return self.one_step_off or self.engine == "vllm"

    @model_validator(mode="after")
    def _has_an_effect(self) -> Self:
        if self.engine == "vllm":
            if self.server_url is None:
                raise ValueError("engine vllm needs server_url, the address of its server")
            return self
        for name in ("server_url", "weights_folder", "timeout", "importance_cap"):
            if name == "importance_cap" and self.one_step_off:
                continue
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect with engine {self.engine}; leave it out, or set engine: vllm")
        return self


class PPOSettings(StageSettings):
    """PPO from the SFT model against the reward model; the reference is the SFT model itself."""

    stage: ClassVar[str] = "ppo"
    length_fields: ClassVar[tuple[str, ...]] = ("max_prompt_length", "max_new_tokens")
    input_fields: ClassVar[tuple[str, ...]] = ("model", "reward_model")
    data_fields: ClassVar[tuple[str, ...]] = ("data", "eval_data", "ptx_data")
    code_fields: ClassVar[tuple[str, ...]] = ("judge",)
    not_in_key: ClassVar[frozenset[str]] = StageSettings.not_in_key | {
        "on_unhealthy",
        "offload",
        "placement",
        "gradient_checkpointing",
        "microbatch_tokens",
        "packing",
        "compile",
    }

    model: str | None = None
    """Folder or hub id of the policy's start and reference; the sft stage's model by default."""
    reward_model: str | None = None
    """Folder or hub id of a one-label sequence classifier; the reward stage's model by default, if there is one."""
    rewards: list[RewardSpec] = Field(default_factory=list)
    """More rewards, models and functions; each times its weight is added to the reward model's score."""
    ensemble: Literal["mean", "lower_bound"] | None = None
    """Reward models count as one by their mean, or by mean minus penalty times std; by default they are summed. [Coste
    2023]"""
    ensemble_penalty: float = Field(1.0, ge=0)
    """Standard deviations between the reward models that lower_bound subtracts."""
    data: Source
    """Prompts; rows with prompt or messages. What else is in a row is for functions of `rewards` alone."""
    eval_data: Source | None = None
    """Prompts for the held-out evaluation; by default a share of the prompts is held out."""
    judge: str | None = None
    """module:function (prompts, responses) -> true qualities; for evaluation only, PPO never optimises them."""

    layout: Literal["separate", "shared_trunk", "adapters"] = "separate"
    """What is in memory: four models; or policy and critic on one trunk; or one base with LoRA adapters for all."""
    lora: LoraSettings = LoraSettings.model_validate({})
    """Adapters in `layout: adapters`, merged in the saved policy. A critic that starts as a reward adapter keeps it.
    [LoRA]"""
    quantization: Literal["8bit", "4bit"] | None = None
    """Keep the base of `layout: adapters` in 8 or 4 bits (bitsandbytes, NF4); `model/` is merged unrounded. [QLoRA]"""
    offload: bool = False
    """Keep reference and reward models in the CPU's memory while they are not needed."""
    placement: Literal["together", "second_gpu"] = "together"
    """Where reference and reward models are: on the policy's device, or each process has a second GPU for them, which
    scores while the first reads with policy and critic. Of n processes on a machine these are the GPUs n to 2n - 1."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, slower updates."""

    microbatch_tokens: MicrobatchTokens = MICROBATCH_TOKENS
    """Tokens per forward pass on one device, padding included where it is read; episodes of like length share one. So
    many keep a large GPU busy."""
    packing: bool | None = None
    """Read several episodes as one row, without padding; they do not see each other. By default on a GPU in bf16 or
    fp16, where attention has a kernel for it. What a step learns from stays the same."""

    weights: Literal["fp32", "bf16"] = "fp32"
    """What trained weights, their gradients and AdamW's moments are kept in. bf16 halves their memory; steps below a
    256th of a weight are lost in it."""
    compile: bool = False
    """torch.compile on a GPU (elsewhere it does nothing): a minute more at the start, then faster."""
    rollout: RolloutSettings = RolloutSettings.model_validate({})
    """What samples the responses."""

    num_iterations: int = Field(100, ge=1)
    """Rollout phases, each followed by its updates."""
    rollout_batch_size: int = Field(128, ge=1)
    """Episodes per iteration, over all processes."""
    num_samples_per_prompt: int = Field(1, ge=1)
    """Responses to each prompt of a rollout."""
    generation_batch_size: int | None = Field(None, ge=1)
    """Responses that one device samples at a time, which bounds the cache; its whole share by default."""
    num_epochs: int = Field(4, ge=1)
    """Passes over an iteration's episodes. [Ziegler 2019; N+]"""
    num_minibatches: int = Field(1, ge=1)
    """Optimiser steps per epoch."""
    max_prompt_length: int = Field(512, ge=1)
    """Longest prompt in tokens; longer ones are dropped and counted."""
    max_new_tokens: int = Field(128, ge=1)
    """Longest response in tokens."""
    temperature: float = Field(1.0, gt=0)
    """Sampling temperature; log-probabilities are taken at the same temperature everywhere."""

    learning_rate: float = Field(3e-6, ge=0)
    """Policy's peak learning rate. [N+]"""
    critic_learning_rate: float = Field(9e-6, ge=0)
    """Critic's peak learning rate."""
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    """How both learning rates fall to zero over the iterations, or stay. [N+; InstructGPT]"""
    warmup_iterations: int = Field(0, ge=0)
    """Iterations of linear warm-up of both learning rates, 10 in the paper. [InstructGPT]"""
    critic_warmup_iterations: int = Field(0, ge=0)
    """First iterations in which only the critic learns. [VC-PPO]"""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient norm to clip at, policy and critic separately."""

    kl_coef: float = Field(0.05, ge=0)
    """Weight of the KL to the reference. [Ziegler 2019; N+]"""
    kl_target: float | None = Field(None, gt=0)
    """KL in nats per response that an adaptive kl_coef steers to (the paper: 6); null keeps it fixed. [Ziegler 2019]"""
    kl_horizon: int = Field(10_000, ge=1)
    """Episodes in which an adaptive kl_coef may change by a fifth. [Ziegler 2019]"""
    kl_in: Literal["reward", "loss"] = "reward"
    """KL as part of the token rewards (k1; exact optimum), or as a term of the policy's loss."""
    kl_estimator: Literal["k1", "k2", "k3"] | None = None
    """Estimator of the KL: k1 in the reward; in the loss k2 (the gradient of a token's KL) or k3 (of the reversed). [KL
    approximations]"""
    target_kl: float | None = Field(None, gt=0)
    """Ends an iteration's updates when the policy is 1.5 times this far from the rollout (approx_kl, per token)."""

    normalise_scores: bool = False
    """Bring scores to mean 0 and deviation 1 by running moments, before clipping; they are saved. [Secrets of RLHF]"""
    score_clip: float | None = Field(None, gt=0)
    """Clip scores to plus or minus this; the KL part of the reward is never clipped. [Secrets of RLHF]"""
    missing_eos_penalty: float | None = None
    """What an answer without eos costs; null leaves its score as it is. [N+; TRL]"""
    missing_eos: Literal["replace", "subtract"] = "replace"
    """Whether the penalty replaces the score (as minus the penalty) or is subtracted from it. [N+; TRL]"""
    overlong_buffer: int = Field(0, ge=0)
    """Last tokens before max_new_tokens over which a length penalty grows. [DAPO]"""
    overlong_penalty: float = Field(1.0, ge=0)
    """Length penalty at max_new_tokens. [DAPO]"""
    score_placement: Literal["eos", "after_eos"] = "eos"
    """Score on the last token, or one after it where there is room. [N+; TRL]"""

    gamma: float = Field(1.0, gt=0, le=1)
    """Discount per token. [GAE]"""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """GAE's lambda for the policy's advantages. [GAE]"""
    critic_gae_lambda: float | None = Field(None, ge=0, le=1)
    """GAE's lambda for the critic's targets (the paper: 1); gae_lambda by default. [VC-PPO]"""
    whiten_rewards: bool = False
    """Divide token rewards by their standard deviation over the rollout; the mean is kept. [Ziegler 2019]"""
    whiten_advantages: bool = True
    """Bring advantages to mean 0 and standard deviation 1 over the rollout. [Ziegler 2019]"""

    clip_range: float = Field(0.2, gt=0)
    """Clip of the probability ratio. [PPO, eq. 7]"""
    dual_clip: float | None = Field(None, gt=1)
    """Bound on the loss of tokens with negative advantage (the paper: 3). [Ye 2020]"""
    value_clip_range: float | None = Field(0.2, gt=0)
    """Clip of the value's move since the rollout; null does not clip. [Ziegler 2019]"""
    value_coef: float = Field(0.1, ge=0)
    """Weight of the value loss beside the policy's in `layout: shared_trunk` (elsewhere each has its own optimiser).
    [Ziegler 2019]"""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of an entropy bonus. [PPO, eq. 9]"""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Policy loss over tokens: their mean, the mean of responses' means, or their sum over B · max_new_tokens. [DAPO;
    Dr. GRPO]"""
    ptx_coef: float = Field(0.0, ge=0)
    """Weight of the language-modelling loss on ptx_data, here a mean per token. [InstructGPT, eq. 2]"""
    ptx_data: Source | None = None
    """Raw text for ptx_coef, for instance ${pretrain.data}; eval_share of it is held out, as in pretrain."""
    ptx_batch_size: int = Field(32, ge=1)
    """Blocks of raw text per optimiser step, over all processes."""
    ptx_block_size: int = Field(256, ge=2)
    """Tokens per block of raw text."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Also keep a moving average of the policy per optimiser step (the paper: 0.992), saved in ema/. [InstructGPT]"""

    eval_every: int = Field(25, ge=1)
    """Iterations between two evaluations on held-out prompts; the best by score within kl_budget is kept."""
    num_eval_samples: int = Field(1, ge=1)
    """Responses per held-out prompt in an evaluation."""
    kl_budget: float = Field(50.0, gt=0)
    """KL in nats per response beyond which no checkpoint is kept and a run counts as over-optimised. [Gao 2022]"""
    on_unhealthy: Literal["warn", "stop"] = "warn"
    """What a finding of the health monitor does: say it, or end the run with the state saved."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # fp16's loss scaling does not fit two optimisers
    """Autocast type; auto takes bf16 where the device has it and fp32 elsewhere. Models that are not trained are kept
    in it; `weights` says what the others are kept in."""
    log_every: int = Field(1, ge=1)
    """Iterations between two lines of metrics."""
    save_every: int = Field(5, ge=1)
    """Iterations between two checkpoints of the full training state."""

    def inputs(self) -> dict[str, str | None]:
        found = super().inputs()
        if self.rewards and self.reward_model is None:
            del found["reward_model"]  # optional beside others
        return found | {f"rewards.{n}": spec.model for n, spec in enumerate(self.rewards) if spec.model is not None}

    def longest(self) -> tuple[str, int]:
        """The same as of every stage; here they always say."""
        found = super().longest()
        assert found is not None
        return found

    def code(self) -> dict[str, str]:
        listed = {f"rewards.{n}": spec.function for n, spec in enumerate(self.rewards) if spec.function is not None}
        return super().code() | listed

    @property
    def gives_rows(self) -> bool:
        """Whether a reward function takes the rows of the prompts. Raises DataError for one that cannot be called."""
        return any(spec.function is not None and takes_rows(spec.function) for spec in self.rewards)

    def only_whole(self) -> Iterator[tuple[str, str]]:
        if self.quantization:
            yield "quantization", "leave it out: the base is spread"
        if self.offload:
            yield "offload", "leave it out"

    def result_settings(self) -> dict[str, Any]:
        given = self.rollout
        of_rollout: dict[str, Any] = {"importance_cap": given.importance_cap} if given.is_off_policy else {}
        if given.engine == "vllm":
            of_rollout["engine"] = given.engine
        if given.one_step_off:
            of_rollout["one_step_off"] = True
        return super().result_settings() | {"rewards": [spec.weight for spec in self.rewards], "rollout": of_rollout}

    def refuse_missing_bitsandbytes(self) -> None:
        """Raises SettingsError where the base is to be quantised and there is nothing to do it with."""
        if self.quantization is not None and find_spec("bitsandbytes") is None:
            raise SettingsError(
                f"ppo.quantization: {self.quantization} needs bitsandbytes, which is not installed; "
                "`pip install rlhf-toolkit[quantization]`, or leave it out"
            )

    @field_validator("ptx_data", mode="before")
    @classmethod
    def _is_one_source(cls, value: Any) -> Any:
        if isinstance(value, list):
            raise ValueError("takes one source, not a list of them; name one, such as ${pretrain.data.0}")
        if isinstance(value, dict) and "weight" in value:
            raise ValueError(
                "takes one source, which has no weight; write its path alone, such as ${pretrain.data.path}"
            )
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.rollout_batch_size % self.num_minibatches:
            raise ValueError(
                f"rollout_batch_size {self.rollout_batch_size} must be a multiple of "
                f"num_minibatches {self.num_minibatches}"
            )
        if self.rollout_batch_size % self.num_samples_per_prompt:
            raise ValueError(
                f"rollout_batch_size {self.rollout_batch_size} must be a multiple of "
                f"num_samples_per_prompt {self.num_samples_per_prompt}"
            )
        if self.critic_warmup_iterations >= self.num_iterations:
            raise ValueError(
                f"critic_warmup_iterations {self.critic_warmup_iterations} leaves no policy update in "
                f"num_iterations {self.num_iterations}"
            )
        if self.overlong_buffer > self.max_new_tokens:
            raise ValueError(f"overlong_buffer {self.overlong_buffer} exceeds max_new_tokens {self.max_new_tokens}")
        if bool(self.ptx_coef) != (self.ptx_data is not None):
            raise ValueError("ptx_coef and ptx_data go together; set both or neither")
        return self

    def _is_set(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).model_fields[name].default)

    @model_validator(mode="after")
    def _has_an_effect(self) -> Self:
        needs = (
            ("lora", "layout", "adapters"), ("quantization", "layout", "adapters"),
            ("value_coef", "layout", "shared_trunk"), ("ensemble_penalty", "ensemble", "lower_bound"),
        )  # fmt: skip
        for name, other, value in needs:
            if getattr(self, other) != value and self._is_set(name):
                raise ValueError(
                    f"{name} has no effect with {other}: {getattr(self, other)}; leave it out, or set {other}: {value}"
                )
        for name, other in (
            ("kl_horizon", "kl_target"), ("overlong_penalty", "overlong_buffer"),
            ("missing_eos", "missing_eos_penalty"), ("ptx_batch_size", "ptx_data"), ("ptx_block_size", "ptx_data"),
        ):  # fmt: skip
            if not getattr(self, other) and self._is_set(name):
                raise ValueError(f"{name} has no effect without {other}; leave it out, or set {other}")
        if self.rollout.engine == "vllm" and self._is_set("generation_batch_size"):
            raise ValueError(
                "generation_batch_size has no effect with rollout.engine vllm, whose server decides how many responses "
                "it samples at a time (--max-num-seqs); leave it out"
            )
        if self.kl_target is not None and not self.kl_coef:
            raise ValueError("kl_target steers by multiplying kl_coef, and kl_coef is 0; start above it")
        if self.layout == "shared_trunk" and self.critic_warmup_iterations:
            raise ValueError("critic_warmup_iterations needs a critic of its own; layout shared_trunk has none")
        if self.weights == "bf16" and (self.layout == "adapters" or self.precision == "fp32"):
            raise ValueError(
                "weights: bf16 is for layouts separate and shared_trunk (adapters keeps its base in bf16 anyway) and "
                "needs precision bf16 or auto"
            )
        for name in ("offload", "placement"):
            if self.layout == "adapters" and self._is_set(name):
                raise ValueError(f"{name} is not possible in layout adapters, whose roles share one base")
        if self.offload and self.placement == "second_gpu":
            raise ValueError("offload has no effect with placement: second_gpu, which has room for them; leave it out")
        if self.auto_microbatch and self.rollout.one_step_off:
            raise ValueError(
                "auto_microbatch is not possible with rollout.one_step_off, whose sampling cannot be tried again; set "
                "microbatch_size and generation_batch_size"
            )
        if self.lora.dropout:
            raise ValueError("lora.dropout must be 0: PPO samples and scores the same distribution, without dropout")
        return self

    @model_validator(mode="after")
    def _estimator_does_its_work(self) -> Self:
        if self.kl_in == "reward" and self.kl_estimator in ("k2", "k3"):
            raise ValueError(
                f"kl_estimator {self.kl_estimator} in the reward leads to another optimum; use k1, or kl_in: loss"
            )
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "kl_estimator k1 as a loss has a gradient of zero on average and holds nothing back; use k2 or k3"
            )
        return self
