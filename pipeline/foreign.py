"""What a launcher around `rlhf` (torchrun, `accelerate launch`, Kubeflow, Ray, MPI) left in the environment for workers
of its own. A stage of a run is none of them: it would wait for others that never come, or take their settings.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_NAMES = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_RANK",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FORK_LAUNCHED",
)  # fmt: skip
_BEGINNINGS = (
    "TORCHELASTIC_", "PET_", "ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_", "PMI_", "OMPI_COMM_WORLD_",
    "MV2_COMM_WORLD_", "MPI_LOCAL",
)  # fmt: skip
_OF_PEOPLE = (
    "ACCELERATE_USE_CPU", "ACCELERATE_TORCH_DEVICE", "ACCELERATE_CPU_AFFINITY", "ACCELERATE_DEBUG_MODE",
    "ACCELERATE_LOG_LEVEL",
)  # fmt: skip
"""What Accelerate lets people set by hand."""


def without(variables: Mapping[str, str]) -> dict[str, str]:
    """All variables but those of another launcher."""
    return {name: value for name, value in variables.items() if not _is_foreign(name)}


@contextmanager
def put_away() -> Iterator[None]:
    """Inside, this process's environment has none of them."""
    foreign = {name: os.environ.pop(name) for name in list(os.environ) if _is_foreign(name)}
    try:
        yield
    finally:
        os.environ.update(foreign)


def _is_foreign(name: str) -> bool:
    return name in _NAMES or (name.startswith(_BEGINNINGS) and name not in _OF_PEOPLE)
