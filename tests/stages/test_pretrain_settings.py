"""Presets fill in what the recipe leaves open, and have the sizes that their papers give."""

from typing import Any

import pytest
import torch
from stages_world import byte_tokenizer
from transformers import AutoModelForCausalLM

from rlhf.data.errors import SettingsError
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.pretrain.model import make_model, model_config, non_embedding_parameters
from rlhf.stages.pretrain.presets import PRESETS


def settings(**fields: Any) -> PretrainSettings:
    return PretrainSettings.load({"data": "x.txt", **fields}, "pretrain")


def on_meta(vocab_size: int, **fields: Any) -> Any:
    config = model_config(settings(**fields), byte_tokenizer())
    config.vocab_size = vocab_size
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def test_a_preset_fills_in_what_is_not_set() -> None:
    found = settings(preset="mini-gpt", num_layers=2)
    assert (found.hidden_size, found.num_layers, found.tokenizer) == (384, 2, "characters")


def test_of_several_presets_the_last_one_wins() -> None:
    found = settings(preset=["gpt3-125m", "original"])
    assert (found.hidden_size, found.norm_position, found.positions) == (768, "post", "sinusoidal")


def test_a_preset_lends_its_size_to_another_architecture() -> None:
    assert settings(preset="gpt3-125m", architecture="llama").parts["norm"] == "rmsnorm"


def test_a_preset_loaded_again_from_its_own_settings_is_the_same() -> None:
    once = settings(preset="original")
    assert PretrainSettings.load(once.model_dump(mode="json"), "pretrain") == once


def test_a_preset_is_no_part_of_the_key_but_what_it_fills_in_is() -> None:
    by_name = settings(preset="original").result_settings()
    by_hand = settings(**PRESETS["original"]).result_settings()
    assert by_name == by_hand != settings(preset="llama").result_settings()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"preset": "mini-gtp"}, "no preset 'mini-gtp'; did you mean 'mini-gpt'?"),
        ({"positions": "learned"}, "positions learned: llama has rope; architecture decoder leaves the choice"),
        ({"architecture": "gpt2", "norm": "rmsnorm"}, "norm rmsnorm: gpt2 has layernorm"),
        ({"architecture": "gpt2", "num_kv_heads": 2}, "num_kv_heads 2: gpt2 has as many as num_heads"),
        ({"model": "some/model", "hidden_size": 64}, "hidden_size is of a new model"),
        ({"data": []}, "an empty list; name at least one source"),
        ({"data": [{"path": "a", "weight": 1}, "b"]}, "some sources have a weight and some have none"),
    ],
)
def test_what_does_not_fit_together_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message.replace("(", r"\(").replace("?", r"\?")):
        settings(**fields)


# By hand: 12 · layers · width² in the blocks, plus (vocabulary 50257 + context 2048) · width in the embeddings.
@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt3-125m", 12 * 12 * 0.768**2 + 52.305 * 0.768),
        ("gpt3-350m", 12 * 24 * 1.024**2 + 52.305 * 1.024),
        ("gpt3-760m", 12 * 24 * 1.536**2 + 52.305 * 1.536),
        ("gpt3-1.3b", 12 * 24 * 2.048**2 + 52.305 * 2.048),
        ("gpt3-2.7b", 12 * 32 * 2.560**2 + 52.305 * 2.560),
        ("gpt3-6.7b", 12 * 32 * 4.096**2 + 52.305 * 4.096),
        ("gpt3-13b", 12 * 40 * 5.120**2 + 52.305 * 5.120),
        ("gpt3-175b", 12 * 96 * 12.288**2 + 52.305 * 12.288),
    ],
)
def test_gpt_3_has_the_parameters_of_its_table(name: str, millions: float) -> None:
    assert on_meta(50257, preset=name).num_parameters() / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize(
    ("name", "printed"),
    [("gpt3-125m", 125e6), ("gpt3-760m", 760e6), ("gpt3-6.7b", 6.7e9), ("gpt3-175b", 175e9)],
)
def test_gpt_3_has_the_size_that_it_is_called_by(name: str, printed: float) -> None:
    # The others' names are rounded by more than 1 %: their shapes in the table make 355.9M, 1.316B, 2.65B and 12.85B.
    assert on_meta(50257, preset=name).num_parameters() == pytest.approx(printed, rel=0.01)


def test_the_lectures_mini_gpt_has_10_79_million_parameters() -> None:
    # Embeddings, positions, logits, last norm; and a block: query, key, value; projection; feed-forward; two norms.
    block = 3 * 384**2 + 384**2 + 384 + 2 * 4 * 384**2 + 5 * 384 + 4 * 384
    model = on_meta(65, preset="mini-gpt")
    assert model.num_parameters() == (65 + 256 + 65 + 2) * 384 + 6 * block == 10_788_864
    assert non_embedding_parameters(model) == 6 * block + 2 * 384


def test_the_small_character_model_has_six_layers_of_eight_heads_in_64_dimensions() -> None:
    config = on_meta(65, preset="mini-64").config
    assert (config.num_hidden_layers, config.num_attention_heads, config.hidden_size) == (6, 8, 64)


@pytest.mark.parametrize("hidden_size", [96, 192, 768])
def test_original_and_llama_have_about_equally_many_parameters(hidden_size: int) -> None:
    sizes = [on_meta(512, preset=name, hidden_size=hidden_size).num_parameters() for name in ("original", "llama")]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "decoder"])
def test_the_embeddings_are_a_multiple_of_64(architecture: str) -> None:
    model = make_model(settings(architecture=architecture, hidden_size=32, num_layers=1, num_heads=2), byte_tokenizer())
    assert model.config.vocab_size == 320  # for 260 tokens
    assert model.get_input_embeddings().weight.shape == (320, 32)
    assert model.training
