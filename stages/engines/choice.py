"""Which engine samples from a model in this process."""

from typing import Literal

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from rlhf.data.errors import SettingsError
from rlhf.stages.engines import Engine
from rlhf.stages.engines.static import FAMILIES, StaticEngine
from rlhf.stages.engines.stock import TransformersEngine


def make_engine(
    model: PreTrainedModel,
    name: Literal["auto", "static", "transformers"] = "auto",
    dtype: torch.dtype | None = None,
    batch_size: int | None = None,
    compiled: bool = False,
) -> Engine:
    """An engine for `model`: `auto` takes static for what it knows, and else transformers.

    `dtype` is what static computes in, by default the model's own; `batch_size` bounds how many rows are written at a
    time. `compiled` is worth its seconds on a GPU where much is sampled. Raises SettingsError where `static` is asked
    for and does not know the model.
    """
    if name == "transformers" or (name == "auto" and not is_known(model.config)):
        return TransformersEngine(model, batch_size)
    if not is_known(model.config):
        raise SettingsError(
            f"engine static reads models of type {', '.join(sorted(FAMILIES))}, not quantised; this one is of type "
            f"{model.config.get_text_config().model_type}; use transformers, or auto"
        )
    return StaticEngine(model, dtype, batch_size, compiled)


def is_known(config: PreTrainedConfig) -> bool:
    """Whether the static engine reads models with this config."""
    known = config.get_text_config().model_type in FAMILIES
    return known and getattr(config, "quantization_config", None) is None
