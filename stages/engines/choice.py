"""Which engine samples from a model in this process."""

from typing import Literal

import torch
from transformers import PreTrainedModel

from rlhf.data.errors import SettingsError
from rlhf.stages.engines import Engine
from rlhf.stages.engines.static import FAMILIES, StaticEngine
from rlhf.stages.engines.stock import TransformersEngine


def make_engine(
    model: PreTrainedModel,
    name: Literal["auto", "static", "transformers"] = "auto",
    dtype: torch.dtype | None = None,
    num_rows: int | None = None,
    compiled: bool = False,
) -> Engine:
    """An engine for `model`: `auto` takes static for the families that it knows, and else transformers.

    `dtype` is what static computes in, by default the model's own; `num_rows` bounds how many rows are written at a
    time. `compiled` is worth its seconds on a GPU where much is sampled. Raises SettingsError where `static` is asked
    for and does not know the model.
    """
    family = model.config.get_text_config().model_type
    if name == "static" and family not in FAMILIES:
        raise SettingsError(
            f"engine static does not know models of type '{family}' (but {', '.join(sorted(FAMILIES))}); "
            "use transformers, or auto"
        )
    if name == "transformers" or family not in FAMILIES:
        return TransformersEngine(model, num_rows)
    return StaticEngine(model, dtype, num_rows, compiled)
