"""The phases of a recipe's stages, with the shapes of models that are there or that earlier stages will make."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from rlhf.data.errors import RefusedError, SettingsError, first_line
from rlhf.data.hub import refuse_unknown
from rlhf.stages.budget import Case, Phase
from rlhf.stages.budget_ppo import is_adapter, ppo
from rlhf.stages.budget_stages import pretrain, reward, sft
from rlhf.stages.devices import Device
from rlhf.stages.footprint import UntraceableError
from rlhf.stages.models import load_tokenizer
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.pretrain.model import model_config
from rlhf.stages.pretrain.tokenizer import is_trained_here
from rlhf.stages.reward.config import RewardSettings
from rlhf.stages.settings import StageSettings
from rlhf.stages.sft.config import SFTSettings
from rlhf.stages.text_limits import check_positions

SECTIONS: dict[str, type[StageSettings]] = {
    "pretrain": PretrainSettings, "sft": SFTSettings, "reward": RewardSettings, "ppo": PPOSettings,
}  # fmt: skip
BUDGETS: dict[str, Callable[[Any, Case], list[Phase]]] = {
    "pretrain": pretrain, "sft": sft, "reward": reward, "ppo": ppo,
}  # fmt: skip
PROCESS = 0.15
"""GiB that a process on a CPU takes beside its tensors."""
CHARACTERS = 256
"""Taken for the vocabulary of `tokenizer: characters`, which depends on the text."""


@dataclass(frozen=True)
class Request:
    """What is asked: the sections of a recipe, their rows where they were counted, and for which device."""

    stages: dict[str, Any]
    rows: dict[str, dict[str, int]] = field(default_factory=dict)
    device: str | None = None
    num_processes: dict[str, int] = field(default_factory=dict)
    """Of each stage; one by default."""
    layouts: dict[str, str | None] = field(default_factory=dict)
    """How the processes of a stage share its models: ddp by default; None for the first of LAYOUTS that fits."""

    def section(self, stage: str) -> Any:
        """Settings of a stage, None where there is none."""
        return SECTIONS[stage].model_validate(self.stages[stage]) if stage in self.stages else None

    def processes_of(self, stage: str) -> int:
        return self.num_processes.get(stage, 1)


def refuse_too_long(request: Request) -> None:
    """Raise SettingsError, as the stages do, for sequences that their models have no positions for; all at once."""
    problems = []
    for stage in request.stages:
        settings = request.section(stage)
        config = config_of(request, stage, settings.model)
        if (longest := settings.longest()) is None:
            continue
        try:
            check_positions(longest[0], longest[1], config)
        except SettingsError as error:
            problems.append(str(error))
    if problems:
        raise SettingsError("\n".join(problems))


def phases_of(request: Request, stage: str, settings: Any, device: Device) -> tuple[list[Phase], str]:
    """The phases of a stage on a device, and the precision that it multiplies in. Raises RefusedError for settings that
    do not go with the device or the layout."""
    precision = device.precision(settings.precision, stage)
    if precision not in device.flops:
        raise RefusedError(f"{stage}.precision: {precision} is not supported by {device.name}; use auto or fp32")
    layout = request.layouts.get(stage) or "ddp"
    if layout != "ddp" and request.processes_of(stage) > 1 and (problem := next(settings.why_not_spread(), None)):
        raise RefusedError(problem)
    rows = request.rows.get(stage, {})
    case = Case(
        precision, device.is_gpu, request.processes_of(stage), config_of(request, stage, settings.model),
        num_rows=rows.get("rows"), num_answers=rows.get("answers", 2), layout=layout,
    )  # fmt: skip
    if isinstance(settings, PPOSettings):
        case = _with_rewards(request, settings, case)
    try:
        phases = BUDGETS[stage](settings, case)
    except UntraceableError as error:
        raise RefusedError(
            f"{stage}.model: a model of type {case.config.model_type} cannot be traced without its weights "
            f"({error}); run the stage for a few steps and read peak_gib in its metrics.jsonl"
        ) from error
    if not device.is_gpu:
        for phase in phases:
            phase.gib["process"] = PROCESS
    return phases, precision


def _with_rewards(request: Request, settings: PPOSettings, case: Case) -> Case:
    section = request.section("reward")
    others = [read_config(spec.model, "ppo.rewards") for spec in settings.rewards if spec.model is not None]
    if settings.reward_model is not None:
        lora = settings.lora if is_adapter(settings.reward_model) else None
        of_reward = read_config(settings.reward_model, "ppo.reward_model")
    elif section is not None:
        lora, of_reward = section.lora, config_of(request, "reward", section.model)
    elif settings.rewards:
        return replace(case, other_rewards=others)
    else:
        raise SettingsError("ppo.reward_model: not set, and the recipe has no reward section; name a folder or hub id")
    return replace(case, reward_config=of_reward, reward_lora=lora, other_rewards=others)


def config_of(request: Request, stage: str, reference: str | None) -> PreTrainedConfig:
    """The config of a stage's model: of the one that it names, or of what the stages before it will have made."""
    if reference is not None:
        return read_config(reference, f"{stage}.model")
    if stage == "pretrain":
        settings = request.section(stage)
        assert isinstance(settings, PretrainSettings)
        tokenizer: Any = _Vocabulary(_vocabulary_size(settings))
        return model_config(settings, tokenizer)
    before = "pretrain" if stage == "sft" else "sft"
    section = request.section(before)
    if section is None:
        raise SettingsError(
            f"{stage}.model: not set, and the recipe has no {before} section; name a model folder or hub id"
        )
    return config_of(request, before, section.model)


@dataclass(frozen=True)
class _Vocabulary:
    """What `model_config` wants to know of a tokenizer."""

    size: int
    eos_token_id: int = 0
    pad_token_id: int = 0

    def get_vocab(self) -> dict[str, int]:
        return {"": self.size - 1}


def _vocabulary_size(settings: PretrainSettings) -> int:
    if not is_trained_here(settings):
        return max(load_tokenizer(settings.tokenizer).get_vocab().values()) + 1
    return settings.vocab_size if settings.tokenizer == "bpe" else CHARACTERS


def read_config(reference: str, where: str) -> PreTrainedConfig:
    """The config of a model folder or hub id. Raises SettingsError naming the setting `where`."""
    refuse_unknown(reference, where)
    try:
        return AutoConfig.from_pretrained(reference, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise SettingsError(f"{where}: no config of a model in '{reference}': {first_line(error)}") from error
