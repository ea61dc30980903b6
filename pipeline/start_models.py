"""The models that a recipe of `rlhf init` starts from, and what their configs tell of their size. No torch."""

from pathlib import Path
from typing import Any

from rlhf.pipeline.preflight import positions_in, text_config_in
from rlhf.pipeline.references import POLICIES, model_at

START_MODELS = {True: "Qwen/Qwen3-0.6B", False: "HuggingFaceTB/SmolLM2-135M"}
"""What the first stage starts from where there is no raw text, with a GPU and without."""
_PARAMETERS = {"Qwen/Qwen3-0.6B": 6e8, "HuggingFaceTB/SmolLM2-135M": 1.35e8}  # until their configs are here


def size_of(model: str) -> tuple[int | None, float | None]:
    """How many tokens a model takes, and about how many parameters it has; None for what its config does not say, and
    where that is in no folder and not in the hub's cache."""
    folder = _folder_of(model)
    if folder is None:
        return None, _PARAMETERS.get(model)
    return positions_in(folder), parameters_in(folder)


def parameters_in(model: Path) -> float | None:
    """About how many parameters the model in a folder has, in layers and embeddings; None where that is not told."""
    text = text_config_in(model)
    width: Any = text.get("hidden_size", text.get("n_embd"))  # the latter in GPT-2's
    layers: Any = text.get("num_hidden_layers", text.get("n_layer"))
    vocabulary: Any = text.get("vocab_size")
    if not all(isinstance(number, int) and number > 0 for number in (width, layers, vocabulary)):
        return None
    return float(12 * layers * width**2 + vocabulary * width)  # attention has some 4 and the MLP 8 times width²


def _folder_of(model: str) -> Path | None:
    folder = model_at(model, POLICIES, "--model")
    if Path(folder).is_dir():
        return Path(folder)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(folder, "config.json")
    except HFValidationError:  # what starts from it will say so
        return None
    return Path(cached).parent if isinstance(cached, str) else None
