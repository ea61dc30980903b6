"""Memory and work of sampling, by rollout engine; see `budget`."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from rlhf.stages.budget import Case, causal, ids_of, lengths_of
from rlhf.stages.engines.choice import is_known
from rlhf.stages.engines.prefill import PREFILL_TOKENS
from rlhf.stages.engines.sampling import draw, shaped
from rlhf.stages.engines.twin import Twin
from rlhf.stages.footprint import ATTENTION, PADDED, Footprint, Moments, traced
from rlhf.stages.models import LOGITS_AT_ONCE
from rlhf.stages.profile import Cost, cache_bytes_per_token


def sampled(case: Case, num_prompt: int, num_new: int, rows: int) -> Moments:
    """Moments of sampling from a plain model of the stage's config."""

    def run(configs: Sequence[PreTrainedConfig], footprint: Footprint) -> None:
        model = causal(configs[0]).eval()
        with footprint.of(model), torch.no_grad():
            decode(footprint, "sampling", engine_of("auto", case), model, case, num_prompt, num_new, rows)

    return traced([case.config], run)


def engine_of(asked: str, case: Case) -> str:
    """What `auto` comes to for the stage's model."""
    return asked if asked != "auto" else "static" if is_known(case.config) else "transformers"


def decode(
    footprint: Footprint, name: str, engine: str, model: PreTrainedModel, case: Case, num_prompt: int, num_new: int,
    rows: int,
) -> None:  # fmt: skip
    """What an engine holds when it reads the prompts, and when it writes the last token of the longest answer."""
    footprint.at(name)
    if engine == "static":
        _decode_in_slots(footprint, name, model, case, num_prompt, num_new, rows)
    elif engine == "transformers":
        with case.autocast:
            _decode_with_cache(footprint, name, model, num_prompt, num_new, rows)
    footprint.at()


def _decode_in_slots(
    footprint: Footprint, name: str, model: PreTrainedModel, case: Case, num_prompt: int, num_new: int, rows: int
) -> None:
    """Of the static engine, in whose steps nothing but one token of each row is read."""
    twin = Twin(model, case.low)
    config = twin.model.config.get_text_config()
    config._attn_implementation = ATTENTION
    with footprint.making("weights"):
        twin.take()
    with footprint.making("cache"):
        size = cache_bytes_per_token(config, case.low.itemsize) * rows * (num_prompt + num_new)
        slots = torch.zeros(size, dtype=torch.uint8)
    for length in (num_prompt, 1):
        footprint.at(f"{name}, last token" if length == 1 else name)
        at_once = max(min(rows, PREFILL_TOKENS // length), 1)
        hidden = twin.states(ids_of(at_once, length), ids_of(at_once, length))
        del hidden
        drawn = rows if length == 1 else min(rows, max(LOGITS_AT_ONCE // twin.vocab_size, 1))
        if case.is_gpu:  # whose product has results in float32 without weights in it
            logits = torch.zeros(drawn, twin.vocab_size)
        else:
            logits = twin.logits(torch.zeros(drawn, config.hidden_size, dtype=case.low))
        if length > 1 or not case.is_gpu:  # a GPU draws in a kernel
            draw(shaped(logits, twin.scale, twin.softcap, 1.0))
        del logits
    del slots
    twin.give_back()


def _decode_with_cache(
    footprint: Footprint, name: str, model: PreTrainedModel, num_prompt: int, num_new: int, rows: int
) -> None:
    """Of `generate`, whose cache grows, and whose prompts are padded on the left."""
    text = model.config.get_text_config()
    before, text._attn_implementation = text._attn_implementation, PADDED
    for length, known in ((num_prompt, 0), (1, num_prompt + num_new - 1)):
        footprint.at(f"{name}, last token" if known else name)
        cache = DynamicCache(config=model.config)
        if known:
            model(input_ids=ids_of(rows, 1), cache=cache, use_cache=True, logits_to_keep=1)
            with footprint.making("cache"):
                layers: Any = cache.layers
                for layer in layers:
                    shape = *layer.keys.shape[:2], known, layer.keys.shape[3]
                    layer.keys, layer.values = layer.keys.new_zeros(shape), layer.values.new_zeros(shape)
        output = model(input_ids=ids_of(rows, length), cache=cache, use_cache=True, logits_to_keep=1)
        (output.logits[:, -1].float() / 1.0).log_softmax(-1).softmax(-1)  # the engine's law, and what is drawn from
        del output, cache
    text._attn_implementation = before


def decoding(cost: Cost, num_prompt: int, num_new: int, rows: int, layers: int, engine: str) -> dict[str, float]:
    """Work of sampling one batch. A server does it elsewhere."""
    if engine == "vllm":
        return {}
    prompts, responses = lengths_of(rows, num_prompt), lengths_of(rows, num_new)
    return {
        "flops": cost.reading(prompts, torch.ones_like(prompts)),
        "num_bytes": cost.decoding(prompts, responses),
        "steps": num_new * layers,
    }
