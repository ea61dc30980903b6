"""Attention weights of every kind of decoder, and the page that draws them."""

import re
from base64 import b64decode
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from stages_world import byte_tokenizer, tiny_policy

from rlhf.data.errors import RefusedError
from rlhf.stages import attention
from rlhf.stages.attention import MAX_TOKENS, AttentionMaps, attention_maps, draw_page
from rlhf.stages.decoder import DecoderConfig, DecoderForCausalLM

TEXT = "a fox\neats"


def decoder(**parts: Any) -> Any:
    torch.manual_seed(0)
    config = DecoderConfig(
        vocab_size=260, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, initializer_range=0.5, **parts,
    )  # fmt: skip
    return DecoderForCausalLM(config)


MODELS = {
    "llama": tiny_policy,
    "gpt2": lambda: tiny_policy("gpt2"),
    "decoder": decoder,
    "original": lambda: decoder(norm_position="post", norm="layernorm", feed_forward="relu", positions="sinusoidal"),
}


@pytest.mark.parametrize("name", MODELS)
def test_each_head_shares_out_its_look_over_the_tokens_so_far(name: str) -> None:
    model = MODELS[name]().train()
    maps = attention_maps(model, TEXT, byte_tokenizer())
    assert maps.tokens == ["a", " ", "f", "o", "x", "\n", "e", "a", "t", "s"]
    assert maps.weights.shape == (2, 2, 10, 10)
    assert (maps.weights.dtype, maps.weights.device.type) == (torch.float32, "cpu")
    torch.testing.assert_close(maps.weights.sum(-1), torch.ones(2, 2, 10))
    assert maps.weights.triu(1).abs().max() == 0
    assert model.config._attn_implementation == "sdpa"  # as it was
    assert model.training


@pytest.mark.parametrize("name", MODELS)
def test_the_weights_are_those_that_the_model_computes_with(name: str) -> None:
    """The values of the first layer, mixed by its weights, are what goes into its output projection."""
    model = MODELS[name]()
    caught: dict[str, torch.Tensor] = {}
    first = model.transformer.h[0].attn if name == "gpt2" else model.model.layers[0].self_attn
    output = first.c_proj if name == "gpt2" else first.o_proj
    values = first.c_attn if name == "gpt2" else first.v_proj
    output.register_forward_pre_hook(lambda _, arguments: caught.update(mixed=arguments[0]))
    values.register_forward_hook(lambda *arguments: caught.update(values=arguments[2]))
    maps = attention_maps(model, TEXT, byte_tokenizer())
    size = 16 if name == "gpt2" else 8  # one value head for both, but for GPT-2
    found = caught["values"][0, :, -size:].view(10, -1, 8).expand(10, 2, 8)  # [T,H,D]
    mixed = torch.einsum("hts,shd->thd", maps.weights[0], found).reshape(10, 16)
    torch.testing.assert_close(mixed, caught["mixed"][0])


def test_a_saved_model_is_read_by_its_folder(policy_folder: Path, tokenizer: Any) -> None:
    maps = attention_maps(str(policy_folder), TEXT)
    torch.testing.assert_close(maps.weights, attention_maps(tiny_policy(), TEXT, tokenizer).weights)


def test_texts_that_are_too_long_or_empty_are_refused(tokenizer: Any) -> None:
    with pytest.raises(RefusedError, match="the text has 65 tokens, and the model takes 1 to 64"):
        attention_maps(tiny_policy(), "a" * 65, tokenizer)
    with pytest.raises(RefusedError, match="the text has 0 tokens"):
        attention_maps(tiny_policy(), "", tokenizer)
    with pytest.raises(RefusedError, match="a model in memory needs its tokenizer"):
        attention_maps(tiny_policy(), TEXT)
    many = MAX_TOKENS + 1
    with pytest.raises(RefusedError, match=f"the text has {many} tokens, and up to {MAX_TOKENS} can be drawn"):
        draw_page(AttentionMaps(["a"] * many, torch.zeros(1, 1, many, many)), "")


def test_the_page_has_a_map_per_head_and_its_tokens_as_they_are() -> None:
    tokens = ["<b>", " fox\n", "a" * 20]
    html = draw_page(AttentionMaps(tokens, torch.full((2, 3, 3, 3), 1 / 3)), "Attention: <x>")
    assert html.count("<figure id=") == 6
    assert html.count("data:image/png;base64,") == 6  # once each, though it is shown small and large
    assert re.findall(r"<text x[^>]*>([^<]*)</text>", html) == ["&lt;b&gt;", "·fox↵", "aaaaaaaaaa…"]
    assert "<title>Attention: &lt;x&gt;</title>" in html
    assert "http" not in html


def test_a_map_is_the_bluer_the_more_weight() -> None:
    html = draw_page(AttentionMaps(["a", "b"], torch.tensor([[[[1.0, 0.0], [0.25, 0.75]]]])), "")
    found = re.search(r"base64,([^\"]*)", html)
    assert found is not None
    image = Image.open(BytesIO(b64decode(found[1]))).convert("RGBA")
    opacities = [image.getpixel((x, y))[3] for y in (0, 1) for x in (0, 1)]  # type: ignore[index]
    assert opacities == [255, 0, 128, 221]  # 255 times the square roots 1, 0, 1/2 and 0.866


def test_the_command_writes_the_page_and_says_where(
    policy_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "attention.html"
    attention.main([str(policy_folder), str(page), "--a fox"])
    assert capsys.readouterr().out == f"{page}\n"
    assert page.read_text(encoding="utf-8").count("<figure id=") == 4
