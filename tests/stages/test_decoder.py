"""Our own decoder: each part does what its paper says, whatever it is combined with."""

import itertools
import math
from typing import Any

import pytest
import torch
from decoder_world import GPT, LLAMA, ORIGINAL, each_place, some_ids, tiny_config, tiny_decoder
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf.data.collate import pad_left
from rlhf.stages import decoder
from rlhf.stages.decoder import DecoderConfig, DecoderForCausalLM, LayerNorm, RMSNorm, rotate, rotations, sinusoids


def position_ids(mask: torch.Tensor) -> torch.Tensor:
    """Positions [B,T] that count real tokens alone."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


# --- parts, by numbers


def test_layer_norm_of_worked_numbers() -> None:
    norm = LayerNorm(tiny_config(hidden_size=4, positions="none", bias=True))
    got = norm(torch.tensor([100.0, 200.0, 100.0, 0.0]))  # mean 100, variance 20000 / 4, its root 70.711
    assert got.tolist() == pytest.approx([0, 1.41421, 0, -1.41421], abs=1e-4)


def test_rms_norm_of_worked_numbers_in_any_dtype() -> None:
    norm = RMSNorm(tiny_config(hidden_size=4, positions="none"))
    x = torch.tensor([100.0, 200.0, 100.0, 0.0])  # mean square 60000 / 4, its root 122.474
    assert norm(x).tolist() == pytest.approx([0.81650, 1.63299, 0.81650, 0], abs=1e-4)
    assert norm(x.bfloat16()).dtype == torch.bfloat16
    assert norm.half()(x.half() * 100)[1].item() == pytest.approx(1.63299, abs=1e-2)  # 20000² does not fit float16


def test_sinusoids_of_worked_numbers() -> None:
    got = sinusoids(torch.tensor([[0, 1], [100, 3]]), 4)  # columns: sin p, cos p, sin p/100, cos p/100
    assert got.shape == (2, 2, 4)
    assert got[0, 0].tolist() == [0, 1, 0, 1]
    assert got[0, 1].tolist() == pytest.approx([0.841471, 0.540302, 0.0099998, 0.99995], abs=1e-5)
    assert got[1, 0, 2:].tolist() == pytest.approx([0.841471, 0.540302], abs=1e-5)


def test_rotated_scores_depend_on_the_distance_alone() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)

    def score(at: int, to: int) -> float:
        turned = (rotate(x, *rotations(torch.tensor([[p]]), 8, 10000.0)) for x, p in ((query, at), (key, to)))
        return _dot(*turned)

    assert score(3, 1) == pytest.approx(score(40, 38), abs=1e-4)
    assert score(5, 5) == pytest.approx(_dot(query, key), abs=1e-5)
    assert abs(score(3, 1) - score(3, 3)) > 0.05


def _dot(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one * other).sum().item()


def test_token_embeddings_are_scaled_where_sinusoids_are_added() -> None:
    model = tiny_decoder(**ORIGINAL, num_hidden_layers=0).model
    ids = some_ids()
    got = model(ids, use_cache=False).last_hidden_state
    expected = model.embed_tokens(ids) * 4 + sinusoids(torch.arange(9), 16)  # 4 = √16
    assert torch.allclose(got, expected, atol=1e-6)
    embedded = model.embed_tokens(ids)
    assert torch.equal(model(inputs_embeds=embedded, use_cache=False).last_hidden_state, got)


def test_the_lectures_mini_gpt_has_as_many_weights_as_worked_out_by_hand() -> None:
    with torch.device("meta"):
        model = DecoderForCausalLM(
            DecoderConfig(
                vocab_size=65, hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=6,
                max_position_embeddings=256, **GPT | {"feed_forward": "relu"},
            )
        )  # fmt: skip
    attention = 3 * 384**2 + 384**2 + 384  # query, key, value without biases; output with
    feed_forward = 384 * 1536 + 1536 + 1536 * 384 + 384
    norms = 4 * 384  # two weights, two biases
    expected = 65 * 384 + 256 * 384 + 6 * (attention + feed_forward + norms) + 2 * 384 + 65 * 384
    assert expected == 10_788_864
    assert sum(p.numel() for p in model.parameters()) == expected


@pytest.mark.parametrize("bias", [True, False])
def test_biases_are_where_they_should_be(bias: bool) -> None:
    names = [n for n, _ in tiny_decoder(**GPT | {"bias": bias}).named_parameters() if n.endswith(".bias")]
    last = {name.split(".")[-2] for name in names}
    norms = {"norm", "input_layernorm", "post_attention_layernorm"}
    assert last == ({"o_proj", "up_proj", "down_proj", *norms} if bias else set())


def test_weights_begin_small_and_smaller_where_they_add_to_the_residual_stream() -> None:
    model = tiny_decoder(**GPT, hidden_size=128, intermediate_size=128, num_hidden_layers=8, initializer_range=0.02)
    layer = model.model.layers[3]
    for weight in (layer.self_attn.q_proj.weight, layer.mlp.up_proj.weight, model.model.embed_positions.weight):
        assert weight.std().item() == pytest.approx(0.02, rel=0.05)
    for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
        assert weight.std().item() == pytest.approx(0.005, rel=0.05)  # 0.02 / √(2 · 8)
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith(".bias"))
    assert (model.model.norm.weight == 1).all()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"norm_position": "sandwich"}, "norm_position is 'sandwich'; choose one of pre, post"),
        ({"feed_forward": "geglu"}, "feed_forward is 'geglu'; choose one of relu, gelu, silu, swiglu"),
        ({"hidden_size": 18}, "hidden_size 18 is no multiple of the 4 attention heads"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is no multiple of the 3 key/value heads"),
        ({"hidden_size": 12}, "a head of 3 numbers cannot be rotated in pairs"),
        ({"positions": "sinusoidal", "hidden_size": 9, "num_attention_heads": 3, "num_key_value_heads": 3}, "9; sinus"),
    ],
)
def test_what_does_not_fit_together_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tiny_config(**fields)


# --- the whole, against others' models


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_with_llamas_parts_it_is_llama(tied: bool, groups: int) -> None:
    ours = tiny_decoder(**LLAMA, tie_word_embeddings=tied, num_key_value_heads=groups)
    sizes = {name: getattr(ours.config, name) for name in (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "max_position_embeddings", "tie_word_embeddings",
    )}  # fmt: skip
    llama = LlamaForCausalLM(LlamaConfig(**sizes, rms_norm_eps=1e-6, pad_token_id=0)).eval()
    llama.load_state_dict(ours.state_dict())  # the names are the same
    ids, mask = pad_left([[7, 8, 9, 10, 11, 12], [20, 21, 22]], 0)
    inputs = {"input_ids": ids, "attention_mask": mask.long(), "position_ids": position_ids(mask)}
    got, expected = ours(**inputs).logits, llama(**inputs).logits
    assert expected[mask].std() > 0.3
    assert (got - expected)[mask].abs().max() < 1e-5
    assert (got[1, 3:] - ours(torch.tensor([[20, 21, 22]])).logits[0]).abs().max() < 1e-5


@pytest.mark.parametrize("feed_forward", ["relu", "gelu"])
@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_with_the_originals_parts_its_layer_is_torchs(feed_forward: str, norm_position: str) -> None:
    parts = {"norm_position": norm_position, "norm": "layernorm", "feed_forward": feed_forward, "bias": True}
    ours = tiny_decoder(**parts, positions="none", num_hidden_layers=1, num_key_value_heads=4).model
    for name, weight in ours.named_parameters():
        if "norm" in name or name.endswith("bias"):
            nn.init.normal_(weight)
    pre, layer = norm_position == "pre", ours.layers[0]
    theirs = nn.TransformerEncoderLayer(
        16, 4, 32, dropout=0, activation=feed_forward, layer_norm_eps=1e-6, batch_first=True, norm_first=pre
    )
    attention = layer.self_attn
    theirs.self_attn.in_proj_weight = nn.Parameter(
        torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    )
    second = layer.post_attention_layernorm if pre else layer.post_feedforward_layernorm
    for to, source in (
        (theirs.self_attn.out_proj, attention.o_proj), (theirs.linear1, layer.mlp.up_proj),
        (theirs.linear2, layer.mlp.down_proj), (theirs.norm2, second),
        (theirs.norm1, layer.input_layernorm if pre else layer.post_attention_layernorm),
    ):  # fmt: skip
        to.load_state_dict(source.state_dict())
    mask = nn.Transformer.generate_square_subsequent_mask(9)
    expected = theirs(ours.embed_tokens(some_ids()), src_mask=mask, is_causal=True)
    expected = ours.norm(expected) if pre else expected
    assert (ours(some_ids()).last_hidden_state - expected).abs().max() < 1e-5


# --- attention


@each_place
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_later_token_changes_nothing_before_it(norm_position: str, positions: str, attention: str) -> None:
    for norm, feed_forward in itertools.product(("layernorm", "rmsnorm"), ("relu", "gelu", "silu", "swiglu")):
        model = tiny_decoder(norm_position=norm_position, positions=positions, norm=norm, feed_forward=feed_forward)
        model.set_attn_implementation(attention)
        ids = some_ids()
        other = ids.clone()
        other[:, 5] = ids[:, 5] % 49 + 1
        before, after = model(ids).logits, model(other).logits
        assert (before - after)[:, :5].abs().max() < 1e-5
        assert ((before - after)[:, 5:].abs().amax((0, 2)) > 1e-3).all()


def test_positions_shifted_together_matter_where_they_are_absolute() -> None:
    ids, at = some_ids(), torch.arange(9)[None]
    for positions, matters in (("sinusoidal", True), ("learned", True), ("rope", False), ("none", False)):
        model = tiny_decoder(positions=positions)
        gap = (model(ids, position_ids=at).logits - model(ids, position_ids=at + 20).logits).abs().max()
        assert (gap > 0.01) == matters
        spread = (model(ids, position_ids=at).logits - model(ids, position_ids=at * 2).logits).abs().max()
        assert (spread > 0.01) == (positions != "none")


@each_place
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_cache_changes_nothing_with_left_padding_either(norm_position: str, positions: str, attention: str) -> None:
    model = tiny_decoder(norm_position=norm_position, positions=positions)
    model.set_attn_implementation(attention)
    ids, mask = pad_left([some_ids()[0].tolist(), some_ids()[1, :6].tolist()], 0)
    at, attended = position_ids(mask), mask.long()
    whole = model(ids, attention_mask=attended, position_ids=at, use_cache=False)
    assert whole.cache is None
    first = model(ids[:, :5], attention_mask=attended[:, :5], position_ids=at[:, :5], use_cache=True)
    logits, cache = [first.logits], first.cache
    for t, end in ((5, 7), (7, 8), (8, 9)):  # two tokens at once, then one by one
        output = model(ids[:, t:end], attention_mask=attended[:, :end], position_ids=at[:, t:end], cache=cache)
        logits.append(output.logits)
    assert (torch.cat(logits, 1) - whole.logits)[mask].abs().max() < 1e-4
    one = model(some_ids()[:1, :5]).cache
    counted_on = model(some_ids()[:1, 5:], cache=one).logits  # positions go on from the cache where none are given
    assert (counted_on - whole.logits[:1, 5:]).abs().max() < 1e-4


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("additive", [True, False])
def test_a_ready_mask_keeps_documents_apart(attention: str, additive: bool) -> None:
    model = tiny_decoder(**GPT)
    model.set_attn_implementation(attention)
    ids = some_ids(1)
    document = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1])
    mask = (document[:, None] == document) & torch.ones(9, 9).tril().bool()
    ready = torch.where(mask, 0.0, torch.finfo(torch.float32).min) if additive else mask
    at = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    got = model(ids, attention_mask=ready[None, None], position_ids=at).logits
    assert (got[:, :4] - model(ids[:, :4]).logits).abs().max() < 1e-5
    assert (got[:, 4:] - model(ids[:, 4:]).logits).abs().max() < 1e-5


@pytest.mark.parametrize("groups", [2, 4])
def test_eager_attention_shows_its_weights(groups: int) -> None:
    model = tiny_decoder(num_key_value_heads=groups)
    fused = model(some_ids()).logits
    model.set_attn_implementation("eager")
    output = model(some_ids(), output_attentions=True, use_cache=False)
    assert [x.shape for x in output.attentions] == [(2, 4, 9, 9)] * 2
    for weights in output.attentions:
        assert torch.allclose(weights.sum(-1), torch.ones(2, 4, 9))
        assert not weights.triu(1).any()
        assert weights.std() > 0.01
    assert (output.logits - fused).abs().max() < 1e-5


def test_without_padding_no_mask_is_made_and_nothing_breaks_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "create_causal_mask", None)  # calling it would fail
    for parts in (ORIGINAL, LLAMA):
        model = tiny_decoder(**parts, num_hidden_layers=1)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        got = compiled(some_ids(), use_cache=False).logits
        assert (got - model(some_ids(), use_cache=False).logits).abs().max() < 1e-5


# --- training


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("parts", [ORIGINAL, LLAMA, GPT])
def test_it_begins_as_if_all_tokens_were_equally_likely(norm_position: str, parts: dict[str, Any]) -> None:
    sizes = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.02}
    for tied in (True, False):
        model = tiny_decoder(**parts | sizes | {"norm_position": norm_position, "tie_word_embeddings": tied})
        ids = torch.randint(0, 500, (8, 32))
        assert model(ids, labels=ids).loss.item() == pytest.approx(math.log(500), rel=0.05)


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("parts", [ORIGINAL, LLAMA, GPT])
def test_a_batch_is_learned_by_heart(norm_position: str, parts: dict[str, Any]) -> None:
    model = tiny_decoder(**parts | {"norm_position": norm_position, "initializer_range": 0.1}).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(120):
        loss = model(some_ids(), labels=some_ids(), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.05


def test_the_loss_is_the_next_tokens_cross_entropy_and_fewer_logits_can_be_asked_for() -> None:
    model, ids = tiny_decoder(), some_ids()
    labels = ids.clone()
    labels[0, :4] = -100
    output = model(ids, labels=labels)
    expected = cross_entropy(output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    assert output.loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert torch.allclose(model(ids, logits_to_keep=2).logits, output.logits[:, -2:], atol=1e-6)
    at = torch.tensor([1, 6])
    assert torch.allclose(model(ids, logits_to_keep=at).logits, output.logits[:, at], atol=1e-6)


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_dropout_is_on_in_three_places_and_off_in_eval(norm_position: str) -> None:
    model, plain = (tiny_decoder(norm_position=norm_position, dropout=dropout) for dropout in (0.5, 0.0))
    assert torch.equal(model(some_ids()).logits, plain(some_ids()).logits)
    places = [model.model, *model.model.layers, *(layer.self_attn for layer in model.model.layers)]
    model.train()
    for place in places:
        for other in places:
            other.dropout.p = 0.5 if other is place else 0.0
        assert (model(some_ids()).logits - plain(some_ids()).logits).abs().max() > 0.01
    for other in places:
        other.dropout.p = 0.0
    assert (model(some_ids()).logits - plain(some_ids()).logits).abs().max() < 1e-6
    for layer in model.model.layers:
        layer.dropout.p = 1.0  # of both sublayers' outputs nothing is left: what went in comes out, normed
    expected = RMSNorm(model.config)(model.model.embed_tokens(some_ids()))
    assert torch.allclose(model.model(some_ids()).last_hidden_state, expected, atol=1e-3)


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_checkpointed_gradients_are_the_same_with_dropout_too(norm_position: str) -> None:
    gradients = []
    passes = [0, 0]
    for checkpointed in (False, True):
        model = tiny_decoder(norm_position=norm_position, dropout=0.3).train()
        if checkpointed:
            model.activation_checkpointing_enable()

        def count(*_: Any, checkpointed: bool = checkpointed) -> None:
            passes[checkpointed] += 1

        model.model.layers[0].mlp.register_forward_hook(count)
        torch.manual_seed(5)
        model(some_ids(), labels=some_ids(), use_cache=False).loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert passes == [1, 2]
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-6)


def test_padding_on_the_left_leaves_gradients_finite() -> None:
    model = tiny_decoder().train()
    ids, mask = pad_left([some_ids()[0].tolist(), [3, 4]], 0)
    labels = torch.where(mask, ids, -100)
    model(ids, attention_mask=mask.long(), position_ids=position_ids(mask), labels=labels).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("parts", [ORIGINAL, LLAMA, GPT])
@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_under_autocast_the_residual_stream_keeps_its_dtype(parts: dict[str, Any], norm_position: str) -> None:
    model = tiny_decoder(**parts | {"norm_position": norm_position}).model
    seen: list[torch.dtype] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _m, _a, out: seen.append(out.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        model(inputs_embeds=model.embed_tokens(some_ids()).bfloat16(), use_cache=False)
    assert seen == [torch.bfloat16] * 2
