"""Texts that share a row are read as if each were alone, and a model that does not do so is found out."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_world import tiny_decoder
from stages_world import tiny_policy
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from rlhf.data.collate import pack, pad_left, pad_right
from rlhf.stages import packing
from rlhf.stages.models import PolicyModel, compile_layers
from rlhf.stages.packing import (
    ATTENTION,
    Pack,
    laid_out,
    no_mask,
    pack_of,
    packs_here,
    read,
    read_pack,
    reads_packs,
    reads_without_mask,
)
from rlhf.stages.ppo.layout import recompute_layers

TEXTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21], [30, 31, 32, 33, 34]]
CPU = torch.device("cpu")


def mistral() -> Any:
    """Whose tokens see themselves and three before."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=260, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=4, max_position_embeddings=64, initializer_range=0.5, pad_token_id=0,
    )  # fmt: skip
    return MistralForCausalLM(config).eval()


def packed(texts: list[list[int]], multiple: int = 1) -> Pack:
    return Pack(*pack(texts, 0, multiple), 16)


def states_alone(model: Any) -> torch.Tensor:
    """Of TEXTS, one after the other [16,d], by the model itself."""
    return torch.cat([model.base_model(input_ids=torch.tensor([text])).last_hidden_state[0] for text in TEXTS])


def slopes(model: Any, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(states.square().sum(), list(model.base_model.parameters()))


each_model = pytest.mark.parametrize("make", [tiny_policy, lambda: tiny_policy("gpt2"), mistral, tiny_decoder])


@each_model
def test_states_and_gradients_in_a_pack_are_those_of_each_text_alone(make: Any) -> None:
    model, untouched = make(), make()
    assert reads_packs(model, nullcontext())
    found, alone = read_pack(model, packed(TEXTS, 8))[0, :16], states_alone(untouched)
    torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(slopes(model, found), slopes(untouched, alone), rtol=1e-3, atol=1e-3)


@each_model
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_computed_again_read_the_pack_again(make: Any, reentrant: bool) -> None:
    model = make()
    assert reads_packs(model, nullcontext())
    model.train()
    expected = slopes(model, read_pack(model, packed(TEXTS))[0])
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    (read_pack(model, packed(TEXTS))[0]).square().sum().backward()  # after which nothing says that it was a pack
    found = tuple(weight.grad for weight in model.base_model.parameters())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@each_model
def test_a_model_that_reads_packs_reads_all_else_as_before(make: Any, tmp_path: Path) -> None:
    model, untouched = make(), make()
    assert reads_packs(model, nullcontext())
    assert model.config._attn_implementation == ATTENTION
    ids, mask = pad_left(TEXTS, 0)
    whole = {"input_ids": ids, "attention_mask": mask.long(), "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    for inputs in ({"input_ids": ids}, whole):
        assert torch.equal(model(**inputs).logits, untouched(**inputs).logits)
    options = {"attention_mask": mask.long(), "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **options), untouched.generate(ids, **options))
    model.save_pretrained(tmp_path)
    assert ATTENTION not in (tmp_path / "config.json").read_text()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"


@each_model
def test_rows_without_a_mask_are_read_causally(make: Any) -> None:
    model, untouched = make(), make()
    assert reads_without_mask(model)
    ids, _ = pad_right(TEXTS, 0)
    found = read(model, ids, attention_mask=no_mask(ids))
    expected = untouched.base_model(input_ids=ids).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_model_that_sees_beyond_its_text_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaks(*arguments: Any, cu_seq_lens_q: torch.Tensor, **named: Any) -> Any:
        ends = torch.stack([cu_seq_lens_q[0], cu_seq_lens_q[-1]])
        return packing.attend(*arguments, cu_seq_lens_q=ends, **named)

    model = tiny_policy()
    monkeypatch.setitem(AttentionInterface._global_mapping, ATTENTION, leaks)
    assert not reads_packs(model, nullcontext())
    assert model.config._attn_implementation == "sdpa"  # as it was


def test_padded_rows_as_a_pack_and_back_by_hand() -> None:
    ids = torch.tensor([[0, 0, 5, 6], [0, 7, 8, 0], [0, 0, 0, 0], [9, 0, 0, 0]])
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0]]).bool()
    packed = pack_of(ids, mask)
    found, places = packed.pack, packed.places
    assert found.ids.tolist() == [[5, 6, 7, 8, 9]]
    assert found.positions.tolist() == [[0, 1, 0, 1, 0]]
    assert found.borders.tolist() == [0, 2, 4, 4, 5]  # the third row is empty
    assert found.longest >= 2
    assert places.tolist() == [2, 3, 5, 6, 12]
    assert torch.equal(laid_out(found.ids[0], places, mask.shape), ids)
    model = tiny_policy()
    assert reads_packs(model, nullcontext())
    assert read_pack(model, found).shape == (1, 5, 16)


def test_models_of_other_kinds_of_attention_are_not_packed() -> None:
    bloom = BloomForCausalLM(BloomConfig(vocab_size=40, hidden_size=8, n_layer=1, n_head=2))
    assert not reads_packs(bloom, nullcontext())  # it has an attention of its own
    config = Gemma2Config(
        vocab_size=40, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, attn_logit_softcapping=50.0, max_position_embeddings=32, pad_token_id=0,
    )  # fmt: skip
    gemma = Gemma2ForCausalLM(config).train()
    assert not reads_packs(gemma, nullcontext())  # it caps its logits
    assert gemma.training


def test_texts_are_packed_by_default_where_a_kernel_is_for_it() -> None:
    assert not packs_here(None, CPU, "no")
    assert packs_here(True, CPU, "no")
    assert not packs_here(False, CPU, "no")
    assert not packs_here(True, torch.device("cuda"), "no")  # the kernel takes 16 bits alone


@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_read_padded_rows_as_they_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler takes them for; making code of it takes a minute."""
    plain, compiled = tiny_policy(), tiny_policy()
    for model in (plain, compiled):
        del model.model.layers[1:]
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    compile_layers(compiled)
    for texts in (TEXTS, [[7] * 12, [8] * 3]):
        ids, _ = pad_right(texts, 0, 4)
        one, other = (model.base_model(input_ids=ids, use_cache=False).last_hidden_state for model in (plain, compiled))
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-5)
        ours, theirs = (
            torch.autograd.grad(x.square().sum(), list(model.base_model.parameters()))
            for x, model in ((other, compiled), (one, plain))
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert list(compiled.state_dict()) == list(plain.state_dict())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel is a GPU's")
def test_the_kernel_of_a_gpu_reads_packs_too() -> None:
    model = tiny_policy().cuda()
    with torch.autocast("cuda", torch.bfloat16):
        alone = [read(model, torch.tensor([text]).cuda())[0] for text in TEXTS]
        assert reads_packs(model, nullcontext())
        found = read_pack(model, packed(TEXTS, 128).to(torch.device("cuda")))[0, :16]
    torch.testing.assert_close(found, torch.cat(alone), rtol=0.05, atol=0.05)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel is a GPU's")
@pytest.mark.parametrize(
    "compiled",
    [False, pytest.param(True, marks=pytest.mark.filterwarnings("ignore"))],  # torch's compiler warns
)
def test_on_a_gpu_a_policy_without_padding_says_and_learns_the_same(compiled: bool) -> None:
    """In bf16, and with layers that are computed again."""
    ids, mask = (x.cuda() for x in pad_left(TEXTS, 0))
    found = []
    for is_packed in (False, True):
        reader = PolicyModel(tiny_policy().cuda())
        with torch.autocast("cuda", torch.bfloat16):
            reader.packed = is_packed and reads_packs(reader.model, torch.autocast("cuda", torch.bfloat16))
            assert reader.packed == is_packed
            if compiled:
                compile_layers(reader.model)
            recompute_layers(reader.model)
            logprobs = reader(ids, mask, 3, 0.7)[0].where(mask[:, -4:-1], 0.0)  # nothing foretells a first token
        logprobs.sum().backward()
        found.append([logprobs.detach(), *(p.grad for p in reader.parameters())])
    for padded, without in zip(*found, strict=True):
        assert (without - padded).norm() <= 0.05 * padded.norm()
