"""Texts that share a row are read as if each were alone, and a model that does not do so is found out."""

import shutil
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from decoder_world import tiny_decoder
from stages_world import tiny_policy
from transformers import BloomConfig, BloomForCausalLM, Gemma2Config, Gemma2ForCausalLM, MistralConfig
from transformers import MistralForCausalLM as Mistral

from rlhf.data.collate import pack, pad_right
from rlhf.stages import packing
from rlhf.stages.models import compile_layers
from rlhf.stages.packing import Pack, packs_here, reads_packs, states

TEXTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20, 21], [30, 31, 32, 33, 34]]
CPU = torch.device("cpu")


def mistral() -> Any:
    """Whose tokens see themselves and three before."""
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=260, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, sliding_window=4, max_position_embeddings=64, initializer_range=0.5, pad_token_id=0,
    )  # fmt: skip
    return Mistral(config).eval()


def packed(texts: list[list[int]], multiple: int = 1) -> Pack:
    return Pack(*pack(texts, 0, multiple), 16)


@pytest.mark.parametrize("make", [tiny_policy, lambda: tiny_policy("gpt2"), mistral, tiny_decoder])
def test_states_and_gradients_in_a_pack_are_those_of_each_text_alone(make: Any) -> None:
    model = make()
    model.eval()
    assert reads_packs(model, nullcontext())
    weights = list(model.base_model.parameters())
    found = states(model.base_model, model.config, packed(TEXTS, 8))[0, :16]
    alone = [model.base_model(input_ids=torch.tensor([text])).last_hidden_state[0] for text in TEXTS]
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-4, atol=1e-5)
    ours, theirs = (torch.autograd.grad(x.square().sum(), weights) for x in (found, torch.cat(alone)))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_a_model_that_sees_beyond_its_text_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaks(*arguments: Any, cu_seq_lens_q: torch.Tensor, **named: Any) -> Any:
        ends = torch.stack([cu_seq_lens_q[0], cu_seq_lens_q[-1]])
        return attend(*arguments, cu_seq_lens_q=ends, **named)

    attend = packing.attend
    monkeypatch.setitem(packing.AttentionInterface._global_mapping, packing.PACKED, leaks)
    assert not reads_packs(tiny_policy(), nullcontext())


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


@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler needs g++")
@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_read_padded_rows_as_they_are_written() -> None:
    plain, compiled = tiny_policy(), tiny_policy()
    compile_layers(compiled)
    for texts in (TEXTS, TEXTS[1:], [[7] * 12, [8] * 3]):
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
        found = states(model.base_model, model.config, packed(TEXTS, 128).to(torch.device("cuda")))[0, :16]
        alone = [model.base_model(input_ids=torch.tensor([text]).cuda()).last_hidden_state[0] for text in TEXTS]
    torch.testing.assert_close(found, torch.cat(alone), rtol=0.05, atol=0.05)
