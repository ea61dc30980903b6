"""LoRA adapters (through PEFT), and models that share the weights of one base in memory.

PEFT's own switch between the adapters of one model takes `requires_grad` from those that are off, so that a step of
two of them trains nothing, silently. Here nothing is switched: each role has a tree of modules of its own, whose
base weights are the same tensors in all trees, and whose adapter is its alone.
"""

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from peft import (
    LoraConfig,
    PeftModel,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)
from peft.tuners.tuners_utils import BaseTunerLayer, cast_adapter_dtype
from peft.utils.integrations import dequantize_module_weight
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel
from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer, its weight transposed

from rlhf.data.errors import RefusedError, first_line
from rlhf.stages import lora_layers
from rlhf.stages.models import SCORE_KEYS, ScalarModel, fresh_head
from rlhf.stages.settings import LoraSettings

_PREFIX = "base_model.model."  # of all names in PEFT's files
HEAD = "value_head.safetensors"


def shared_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A tree of modules of its own whose weights and buffers are the very tensors of `model`."""
    # What reads a quantised weight lies beside it, and bitsandbytes hands 8-bit scales to the first reader alone.
    states = (getattr(module, name, None) for module in model.modules() for name in ("quant_state", "state"))
    return copy.deepcopy(model, {id(part): part for part in chain(model.parameters(), model.buffers(), states)})


def classifier_on(base: PreTrainedModel) -> PreTrainedModel:
    """A one-label sequence classifier on the weights of a causal language model, with a new head."""
    config = copy.deepcopy(base.config)
    config.num_labels = 1
    try:
        with torch.device("meta"):
            classifier = AutoModelForSequenceClassification.from_config(config)
    except ValueError as error:
        raise RefusedError(f"{type(base).__name__} has no sequence classifier in transformers") from error
    setattr(classifier, classifier.base_model_prefix, shared_copy(base).base_model)
    classifier.score = fresh_head(config.get_text_config().hidden_size, bias=classifier.score.bias is not None)
    return classifier


def lora_config(model: PreTrainedModel, lora: LoraSettings, **more: Any) -> LoraConfig:
    """PEFT's config of an adapter for this model. Raises RefusedError for targets that are not there or make logits."""
    _check_targets(model, lora.target_modules)
    return LoraConfig(
        r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=lora.target_modules,
        fan_in_fan_out=any(isinstance(module, Conv1D) for module in model.modules()),
        base_model_name_or_path=model.name_or_path, **more,
    )  # fmt: skip


def add_lora(model: PreTrainedModel, lora: LoraSettings) -> None:
    """Give a model an adapter, after which only that and a classifier's head are trained."""
    heads = ["score"] if isinstance(getattr(model, "score", None), nn.Linear) else None
    config = lora_config(model, lora, exclude_modules=heads, task_type=None if heads else "CAUSAL_LM")
    try:
        _inject(config, model)
    except ValueError as error:  # it lists no layers; the names of those that there are help
        where = f"lora.target_modules: {lora.target_modules}"
        raise RefusedError(f"{where} names what LoRA cannot adapt; there are {_linear_names(model)}") from error
    if heads:
        model.score.requires_grad_(True)


def save_adapter(folder: Path, model: PreTrainedModel) -> None:
    """Write a model's adapter as PEFT does: `PeftModel.from_pretrained(the model it was made on, folder)` loads it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.copy(model.peft_config["default"])
    if not isinstance(config.target_modules, str):
        config.target_modules = sorted(config.target_modules)  # of a set, whose order differs from process to process
    config.save_pretrained(folder)
    weights = get_peft_model_state_dict(model)
    tensors = {f"{_PREFIX}{name}": tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(tensors, folder / "adapter_model.safetensors")


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Give a model the adapter in `folder`, trainable. Raises RefusedError where the two do not belong together."""
    with _refusing(folder):
        _inject(LoraConfig.from_pretrained(folder), model)
        weights = load_file(folder / "adapter_model.safetensors")
        found = set_peft_model_state_dict(model, {n.removeprefix(_PREFIX): tensor for n, tensor in weights.items()})
    missing = [name for name in found.missing_keys if "lora_" in name]
    if missing or found.unexpected_keys:
        raise RefusedError(f"{folder}: its adapter does not fit; {(missing or found.unexpected_keys)[:3]} differ")
    if isinstance(getattr(model, "score", None), nn.Linear):
        model.score.requires_grad_(True)


def merged(model: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model with the adapter in `folder` added to its weights; do it in float32."""
    return PeftModel.from_pretrained(model, str(folder)).merge_and_unload()


def merged_weight(layer: Any) -> Tensor:
    """Weight of one layer with its adapter, if it has one, added in float32; what is quantised is unpacked.

    It lies as the layer's own does: [outputs, inputs], and of embeddings and GPT-2's Conv1D [inputs, outputs].
    """
    if not isinstance(layer, BaseTunerLayer):
        return dequantize_module_weight(layer)
    return dequantize_module_weight(layer.get_base_layer()).float() + layer.get_delta_weight("default").float()


def save_scalar(folder: Path, scalar: ScalarModel, base: str) -> None:
    """Write adapter, head and reading rule of a reward model or critic on the model whose digest is `base`."""
    save_adapter(folder, scalar.classifier)
    save_head(folder, scalar.classifier.score)
    config = copy.deepcopy(scalar.classifier.config)
    setattr(config, SCORE_KEYS, {**scalar.rule, "base": base})
    config.save_pretrained(folder)


def load_scalar_on(base: PreTrainedModel, folder: Path) -> ScalarModel:
    """A reward model or critic on the weights of `base`, with adapter, head and rule as `save_scalar` wrote them."""
    classifier = classifier_on(base)
    load_adapter(classifier, folder)
    with _refusing(folder):
        classifier.score.load_state_dict(load_file(folder / HEAD))
    setattr(classifier.config, SCORE_KEYS, _rule(folder))
    return ScalarModel(classifier)


def adapter_of(reference: str, base: str) -> Path | None:
    """The adapter from which a reward model was merged, if it lies in the model's folder and belongs to the model
    whose digest is `base`."""
    folder = Path(reference) / "adapter"
    return folder if (folder / HEAD).is_file() and _rule(folder).get("base") == base else None


def save_head(folder: Path, head: nn.Linear) -> None:
    """Write a head to one number to a file of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in head.state_dict().items()}, folder / HEAD)


def _check_targets(model: PreTrainedModel, targets: list[str] | str) -> None:
    """Refuse names of no layer, and to adapt what makes the logits, whose weight alone is read here, or embeddings that
    are the same weight: the adapter would be of one use of it, and once merged of both."""
    if targets == "all-linear":  # PEFT leaves the head out by itself
        return
    head = model.get_output_embeddings()
    for target in targets:
        found = [module for name, module in model.named_modules() if f".{name}".endswith(f".{target}")]
        if not found:
            raise RefusedError(f"lora.target_modules: '{target}' names no layer; there are {_linear_names(model)}")
        if head is not None and any(getattr(module, "weight", None) is head.weight for module in found):
            raise RefusedError(
                f"lora.target_modules: '{target}': the layer that makes the logits cannot be adapted here, nor "
                "embeddings that share its weight (tie_word_embeddings); leave it out"
            )


def _linear_names(model: PreTrainedModel) -> list[str]:
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D))
    return sorted({name.rpartition(".")[2] for name in linear} - {"lm_head", "score"})


def _inject(config: LoraConfig, model: PreTrainedModel) -> None:
    inject_adapter_in_model(config, model)
    cast_adapter_dtype(model, "default")  # beside a base in bfloat16 it would be too, and small steps would be lost
    lora_layers.join(model)


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    """Damaged or missing files are refused by the adapter's folder."""
    try:
        yield
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise RefusedError(
            f"{folder}: its adapter cannot be read: {first_line(error)}; save it again, or remove it"
        ) from error


def _rule(folder: Path) -> dict[str, Any]:
    with _refusing(folder):
        rule = json.loads((folder / "config.json").read_text(encoding="utf-8")).get(SCORE_KEYS)
    return rule if isinstance(rule, dict) else {}
