"""What bounds the texts of a model: the tokens at which its answers end, and how many tokens it takes."""

import sys

from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from rlhf.data.errors import RefusedError, SettingsError


def stops_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids at which the model's answers end: the tokenizer's eos, then those of its generation_config, each once.

    A chat model may list others there, at which it ends a turn. Ids outside its vocabulary are left out: none is ever
    drawn, and a server would refuse them.
    """
    own = model.generation_config.eos_token_id
    found = dict.fromkeys([tokenizer.eos_token_id, *(own if isinstance(own, list) else [own])])
    vocab_size = model.config.get_text_config().vocab_size
    return [id for id in found if id is not None and 0 <= id < vocab_size]


def num_positions(model: PreTrainedModel | PreTrainedConfig) -> int:
    """How many tokens a decoder, or one of that config, takes; a very large number where its positions have no end."""
    config = model if isinstance(model, PreTrainedConfig) else model.config
    return getattr(config.get_text_config(), "max_position_embeddings", None) or sys.maxsize


def check_positions(where: str, length: int, model: PreTrainedModel | PreTrainedConfig) -> None:
    """Refuse sequences that are longer than the model has positions for; `where` names the settings."""
    positions = num_positions(model)
    if length > positions:
        raise SettingsError(f"{where} is {length}, but the model has {positions} positions; lower it")


def check_sampled(where: str, length: int, model: PreTrainedModel) -> None:
    """Refuse texts that are not sampled, token by token, from the law that they are then read with as a whole.

    Beyond a threshold RoPE of type longrope turns all tokens as those of a long text, also those that were sampled
    while it was short; the threshold of type dynamic is the number of positions. `where` names the settings.
    """
    check_positions(where, length, model)
    config = model.config.get_text_config()
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        raise RefusedError("the model's tokens see later ones (use_bidirectional_attention), so it cannot be sampled")
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in (rope, *(part for part in rope.values() if isinstance(part, dict))):  # of all layers, or of a type each
        short = kind.get("original_max_position_embeddings", length) if kind.get("rope_type") == "longrope" else length
        if length > short:
            raise SettingsError(
                f"{where} is {length}, but beyond original_max_position_embeddings, {short}, this model (rope_type "
                f"longrope) does not read a text as it was sampled; lower it to {short}"
            )
