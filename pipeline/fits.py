"""What a stage's settings cannot have: so many processes, models that are spread over them, a CPU, no package for it.

The stages refuse the same, for those who start one alone; here it is found before the first one trains. No torch.
"""

from collections.abc import Iterator

from rlhf.pipeline.accelerate_config import num_processes, on_cpu, read_config
from rlhf.pipeline.recipe import Recipe
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.reward.config import RewardSettings
from rlhf.stages.settings import StageSettings, why_uneven
from rlhf.stages.sft.config import SFTSettings


def misfits(settings: StageSettings, recipe: Recipe, gpus: int) -> Iterator[str]:
    """Settings that do not go with what the stage will be launched with, where `gpus` are visible on this machine."""
    stage, config = settings.stage, read_config(recipe.config_of(settings.stage))
    processes, is_on_cpu = num_processes(recipe, stage, gpus), on_cpu(recipe, stage, gpus)
    if problem := settings.why_alone(processes):
        yield problem
    if processes > 1 and config.get("distributed_type") == "FSDP":
        yield from settings.why_not_spread()
    if is_on_cpu and (settings.precision == "fp16" or (settings.precision in ("bf16", "tf32") and not gpus)):
        yield f"{stage}.precision: {settings.precision} needs a GPU, and the stage is on the CPU; use auto or fp32"
    if isinstance(settings, SFTSettings) and (problem := settings.why_no_liger(gpus > 0 and not is_on_cpu)):
        yield problem
    if isinstance(settings, PPOSettings) and processes > 1:
        here = processes // (config.get("num_machines") or 1)
        yield from _too_many(settings, processes, here, 0 if is_on_cpu else gpus)
    yield from uneven(settings, processes)


def _too_many(settings: PPOSettings, processes: int, here: int, gpus: int) -> Iterator[str]:
    """Settings of PPO that do not go with several processes, of which `here` are on this machine."""
    if settings.placement == "second_gpu" and gpus < 2 * here:
        yield (
            f"ppo.placement: second_gpu takes two GPUs for each process, {2 * here} for the {here} on this machine, "
            f"and {gpus} are seen; use fewer processes (num_processes), or leave it out"
        )
    if settings.rollout.one_step_off and settings.rollout.engine == "vllm":
        yield (
            f"ppo.rollout.one_step_off: with engine vllm it works with one process, there are {processes}, which would "
            "all wait for the server; use one, or another engine"
        )


def uneven(settings: StageSettings, processes: int) -> Iterator[str]:
    """Batches that the processes cannot share. One in tokens is the stage's to check where its blocks are as long as
    the model that is trained further takes them."""
    batches: list[tuple[str, int, int, int]] = []  # as `why_uneven` takes them
    if isinstance(settings, PPOSettings):
        num, size = settings.num_minibatches, settings.rollout_batch_size
        batches.append(("rollout_batch_size / num_minibatches", size // num, num, settings.num_samples_per_prompt))
        if settings.ptx_data is not None:
            batches.append(("ptx_batch_size", settings.ptx_batch_size, 1, 1))
    elif isinstance(settings, PretrainSettings):
        if settings.global_batch_tokens is None or settings.block_size is not None or settings.model is None:
            batches.append((*settings.global_batch(settings.block_size or settings.context_length), 1))
    elif isinstance(settings, SFTSettings | RewardSettings):
        batches.append(("global_batch_size", settings.global_batch_size, 1, 1))
    for name, size, each, also in batches:
        if problem := why_uneven(f"{settings.stage}.{name}", size, processes, each, also):
            yield problem
