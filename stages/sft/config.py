"""Settings of the SFT stage."""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field, field_validator

from rlhf.data.sources import Source
from rlhf.stages.settings import MICROBATCH_TOKENS, LoraSettings, MicrobatchTokens, StageSettings, nearest


class SFTSettings(StageSettings):
    """Supervised fine-tuning with TRL's SFTTrainer; the loss counts response tokens only."""

    stage: ClassVar[str] = "sft"
    not_in_key: ClassVar[frozenset[str]] = StageSettings.not_in_key | {"microbatch_tokens", "packing", "compile"}

    model: str | None = None
    """Folder or hub id of the base model; the pretrain stage's by default."""
    data: Source
    """Demonstrations: rows with prompt and response, or messages that end with an assistant turn."""
    eval_data: Source | None = None
    """Demonstrations for the held-out loss; by default a share of the prompts is held out."""
    max_length: int = Field(1024, ge=4)
    """Longest prompt + response in tokens; longer prompts are cut from the left."""
    num_epochs: float = Field(1.0, gt=0)
    """Passes over the demonstrations."""
    global_batch_size: int = Field(32, ge=1)
    """Demonstrations per optimiser step, over all processes."""
    learning_rate: float = Field(2e-5, ge=0)
    """Peak learning rate; cosine to zero."""
    warmup_share: float = Field(0.03, ge=0, lt=1)
    """Share of the steps spent in linear warm-up."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient norm to clip at."""
    lora: LoraSettings | None = None
    """Train low-rank adapters instead of all weights; the saved model has them merged, so that every stage loads it.
    [LoRA]"""
    microbatch_tokens: MicrobatchTokens = MICROBATCH_TOKENS
    """Tokens per forward pass on one device, padding included where it is read; rows of like length share one. So many
    keep a large GPU busy."""
    packing: bool | None = None
    """Read several rows as one, without padding; they do not see each other. By default on a GPU in bf16 or fp16, where
    attention has a kernel for it. What a step learns from stays the same."""
    compile: bool = False
    """torch.compile on a GPU (elsewhere it does nothing): a minute more at the start, then faster."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Further fields of trl.SFTConfig, passed on as they are. [TRL]"""

    @field_validator("args")
    @classmethod
    def _known_to_the_trainer(cls, args: dict[str, Any]) -> dict[str, Any]:
        known = _trainer_fields() if args else set()
        ours = {
            "output_dir", "num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size",
            "gradient_accumulation_steps", "learning_rate", "warmup_steps", "weight_decay", "max_grad_norm",
            "max_length", "seed", "bf16", "fp16", "use_cpu", "logging_steps", "save_steps", "report_to",
            "packing", "padding_free", "torch_compile", "train_sampling_strategy", "max_steps", "dataset_kwargs",
            "remove_unused_columns", "disable_tqdm", "logging_nan_inf_filter", "logging_strategy", "save_strategy",
        }  # fmt: skip
        of_others = {
            "eval_strategy", "eval_steps", "eval_on_start", "load_best_model_at_end", "metric_for_best_model",
            "save_total_limit", "save_only_model", "resume_from_checkpoint", "auto_find_batch_size", "push_to_hub",
            "hub_model_id", "hub_strategy", "hub_private_repo", "hub_always_push", "hub_revision", "deepspeed", "fsdp",
            "fsdp_config", "parallelism_config", "accelerator_config", "enable_jit_checkpoint", "torch_compile_backend",
            "torch_compile_mode",
        }  # fmt: skip
        for name in args:
            if name == "hub_token":
                raise ValueError(
                    "'hub_token' would be written into settings.yaml; set HF_TOKEN in the environment instead"
                )
            if name in ours:
                raise ValueError(f"'{name}' has a setting of its own in this section or follows from one")
            if name in of_others:
                raise ValueError(
                    f"'{name}' is not for this stage, which evaluates, saves, compiles and spreads models over "
                    "processes in its own way; leave it out"
                )
            if name not in known:
                listed = "TRL's page on SFTConfig lists them"
                raise ValueError(f"trl.SFTConfig has no field '{name}'; {nearest(name, sorted(known), listed)}")
        of_liger = args.get("liger_kernel_config")
        if isinstance(of_liger, dict) and of_liger.get("fused_linear_cross_entropy"):
            raise ValueError("'liger_kernel_config': leave fused_linear_cross_entropy out; the stage has its own loss")
        return args

    def why_no_liger(self, on_gpu: bool) -> str | None:
        """Why Liger's kernels cannot be had for the stage; None where they can, or are not asked for."""
        where, cure = "sft.args.use_liger_kernel", "or leave it out"
        if not self.args.get("use_liger_kernel"):
            return None
        if not on_gpu:
            return f"{where}: Liger's kernels need a GPU, and the stage is on the CPU; use one, {cure}"
        if find_spec("liger_kernel") is None:
            return f"{where}: needs liger-kernel, which is not installed; `pip install rlhf-toolkit[liger]`, {cure}"
        return None


def _trainer_fields() -> set[str]:
    """Field names of the installed SFTConfig, read from the sources: importing TRL takes seconds."""
    names: set[str] = set()
    for package, file in (
        ("trl", "trainer/base_config.py"), ("trl", "trainer/sft_config.py"), ("transformers", "training_args.py"),
    ):  # fmt: skip
        spec = find_spec(package)
        path = Path(spec.origin).parent / file if spec and spec.origin else None
        if path is None or not path.exists():
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                names |= {
                    item.target.id
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }
    return names
