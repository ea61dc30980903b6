"""The built-in engine on a GPU: its kernels, graphs and compiled code say what the model's own forward pass says.

Run it where there is a CUDA device: `pytest tests/stages/engines/test_on_gpu.py`.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engines_world import (
    CONFIGS,
    PROMPTS,
    STOPS,
    adapted,
    assert_drawn_from,
    assert_sampled,
    drawn,
    new_model,
    read,
)
from stages_world import tiny_policy
from torch import Tensor

from rlhf.stages.engines import Responses, slots
from rlhf.stages.engines.static import StaticEngine
from rlhf.stages.lora_layers import SAME_INPUT

DEVICE = torch.device("cuda")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # PyTorch's advice on what would be faster
]
kernels = pytest.mark.skipif(not slots.HAS_TRITON, reason="there is no Triton")
GAP = 1e-3
MANY = 20_000


@pytest.fixture(autouse=True)
def _exact_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def mean_gap(model: Any, responses: Responses, prompts: list[list[int]] = PROMPTS) -> float:
    """Nats per token between the engine's log-probabilities and the model's."""
    return (responses.logprobs - read(model, prompts, responses, 0.7)).abs()[responses.mask].mean().item()


# --- every family, as it reads itself


@pytest.mark.parametrize("family", CONFIGS)
def test_a_family_is_read_as_it_reads_itself(family: str) -> None:
    model = new_model(family).to(DEVICE)
    prompts = PROMPTS * 6  # so that some responses are long, whatever a device draws
    for num_slots in (None, 3):  # all at once; and with prompts that wait for a slot
        responses = drawn(StaticEngine(model, batch_size=num_slots), prompts)
        assert_sampled(model, prompts, responses, 0.7, STOPS, 20, gap=GAP)
        assert responses.mask.sum(-1).max() > 7  # as long as a window


@pytest.mark.parametrize("family", CONFIGS)
def test_a_family_is_sampled_in_bfloat16(family: str) -> None:
    model = new_model(family, std=None).to(DEVICE)
    assert 0 < mean_gap(model, drawn(StaticEngine(model, torch.bfloat16))) < 0.02


@pytest.mark.parametrize(("family", "heads", "groups", "size"), [
    ("llama", 4, 1, 64), ("llama", 4, 4, 128), ("gemma2", 6, 2, 128), ("gemma2", 4, 2, 256),
])  # fmt: skip
def test_heads_of_many_sizes(family: str, heads: int, groups: int, size: int) -> None:
    changes = {"head_dim": size, "num_attention_heads": heads, "num_key_value_heads": groups}
    model = new_model(family, std=0.1, **changes).to(DEVICE)
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (heads * size, 48)
    assert_sampled(model, PROMPTS, drawn(StaticEngine(model)), 0.7, STOPS, 20, gap=GAP)
    model = new_model(family, std=None, **changes).to(DEVICE)
    assert 0 < mean_gap(model, drawn(StaticEngine(model, torch.bfloat16))) < 0.02


@pytest.mark.parametrize(("family", "lora"), [
    ("llama", {}), ("gpt2", {}), ("llama with biases", {}), ("mistral", {"target_modules": ["q_proj", "up_proj"]}),
    ("llama", {"target_modules": ["embed_tokens", "v_proj"]}), ("gpt2", {"target_modules": ["wpe", "c_attn"]}),
])  # fmt: skip
def test_an_adapter_takes_part(family: str, lora: dict[str, Any]) -> None:
    model = adapted(new_model(family), **lora).to(DEVICE)
    responses = drawn(StaticEngine(model))
    assert_sampled(model, PROMPTS, responses, 0.7, STOPS, 20, gap=GAP)
    assert mean_gap(new_model(family).to(DEVICE), responses) > 0.1
    model = adapted(new_model(family, std=None), **lora).to(DEVICE)
    assert 0 < mean_gap(model, drawn(StaticEngine(model, torch.bfloat16))) < 0.02


@pytest.mark.parametrize("num_slots", [2, 12, 24])
@pytest.mark.parametrize("same", [False, True])
def test_prompts_of_many_lengths_or_equal_ones_wait_for_slots(num_slots: int, same: bool) -> None:
    """Each response stands beside its own prompt; passes over prompts that came late are recorded, and used again."""
    model = new_model("mistral").to(DEVICE)
    prompts = [[3 + i // 3, 4] if same else [3 + i, 4] * (1 + i % 5) * (4 if i % 2 else 1) for i in range(90)]
    responses = drawn(StaticEngine(model, batch_size=num_slots), prompts, 16)
    assert_sampled(model, prompts, responses, 0.7, STOPS, 16, gap=GAP)
    assert len(set(responses.mask.sum(-1).tolist())) > 5


@pytest.mark.parametrize("stops", [[], [10], [10, 11, 12]])
def test_any_number_of_stop_tokens(stops: list[int]) -> None:
    model = new_model("llama", std=None).to(DEVICE)
    torch.manual_seed(0)
    responses = StaticEngine(model).generate([[5, 6]] * 50, 20, 1.0, stops, 0)
    assert_sampled(model, [[5, 6]] * 50, responses, 1.0, stops, 20, gap=GAP)
    assert (responses.mask.sum(-1) < 20).any() == bool(stops)


# --- weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [False, True])
def test_the_weights_after_a_step_of_the_optimiser_are_sampled(dtype: torch.dtype, lora: bool) -> None:
    model = new_model("llama", std=0.1)
    model = (adapted(model) if lora else model).to(DEVICE)
    engine = StaticEngine(model, dtype)
    before = drawn(engine)
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=0.05, fused=True)
    model(torch.tensor([[5, 6, 7, 8]], device=DEVICE)).logits[..., 30].sum().backward()
    optimizer.step()
    after = drawn(engine)
    assert mean_gap(model, before) > 0.5
    assert mean_gap(model, after) < (GAP if dtype == torch.float32 else 0.05)


@pytest.mark.filterwarnings("ignore")
def test_compiled_layers_change_nothing() -> None:
    linear = [name for names in SAME_INPUT for name in names] + ["o_proj", "down_proj"]
    model = adapted(new_model("llama"), target_modules=["embed_tokens", *linear]).to(DEVICE)
    engine = StaticEngine(model, batch_size=9, compiled=True)
    for prompts in (PROMPTS, [[3 + i, 4] * (1 + i % 5) for i in range(20)]):
        assert_sampled(model, prompts, drawn(engine, prompts), 0.7, STOPS, 20, gap=GAP)


# --- what is drawn


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@torch.no_grad()
def test_tokens_follow_the_softmax_at_the_temperature(temperature: float) -> None:
    """The first is drawn as on a CPU, the second by the kernel."""
    model = tiny_policy().to(DEVICE)
    torch.manual_seed(3)
    tokens = StaticEngine(model).generate([[7, 8, 9]] * MANY, 2, temperature, [], 0).tokens
    first = (model(torch.tensor([[7, 8, 9]], device=DEVICE)).logits[0, -1] / temperature).softmax(-1)
    assert_drawn_from(first, tokens[:, 0])
    texts = torch.tensor([[7, 8, 9, token] for token in range(260)], device=DEVICE)
    second = (model(texts).logits[:, -1] / temperature).softmax(-1)  # [260,260] after each first token
    assert_drawn_from(first @ second, tokens[:, 1])


@kernels
@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("size", [97, 4096, 9001])  # a part of a chunk, one chunk, and three
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_kernel_draws_from_the_law_and_writes_it_down(temperature: float, size: int, softcap: float | None) -> None:
    from rlhf.stages.engines import decode_kernels

    torch.manual_seed(0)
    logits = torch.randn(size, device=DEVICE)
    logits[1::3] = -torch.inf  # ruled out
    meant = 1.5 * logits if softcap is None else softcap * (1.5 * logits / softcap).tanh()
    law = (meant / temperature).log_softmax(-1)
    stops = torch.tensor([0, 6], device=DEVICE)
    last, made, lengths = (torch.zeros(MANY, dtype=torch.long, device=DEVICE) for _ in range(3))
    made[:], lengths[:] = 1, 5
    made[10:20] = 2  # for whom this is the last one
    ended = torch.where(torch.arange(MANY, device=DEVICE) < 10, 3, -1)
    tokens = torch.full((MANY, 4), -1, device=DEVICE)
    logprobs, seed, steps = torch.zeros(MANY, 4, device=DEVICE), *torch.tensor([[7], [40]], device=DEVICE)
    told = torch.zeros(MANY, dtype=torch.long).pin_memory()
    state = last, made, ended, told, lengths, tokens, logprobs
    decode_kernels.take(logits.expand(MANY, -1), seed, steps, 1.5, softcap, temperature, stops, *state)
    going = torch.arange(MANY, device=DEVICE) >= 10
    places = 3 - 2 * going.long()  # a row that is done has a column for what it still makes
    places[10:20] = 2
    found = tokens.gather(-1, places[:, None])[:, 0]
    assert (tokens >= 0).sum() == MANY
    assert torch.equal(last, found)
    assert torch.equal(made, torch.where(going, places + 1, 1))
    assert torch.equal(lengths, 5 + going)
    ends = torch.isin(found, stops) | (places == 2)
    assert torch.equal(ended, torch.where(going, torch.where(ends, 41, -1), 3))
    assert torch.equal(told, ended.cpu())
    torch.testing.assert_close(logprobs.gather(-1, places[:, None])[:, 0], law[found], rtol=0, atol=1e-4)
    bins = torch.arange(size, device=DEVICE) * 97 // size  # few, each with many tokens where there are many
    shares = torch.zeros(97, device=DEVICE).index_add_(0, bins, law.exp())
    assert_drawn_from(shares, bins[found])
    assert (seed.item(), steps.item()) == (7, 41)


# --- the attention of a step


@kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "groups", "size", "window", "softcap"), [
    *((4, 2, 12, window, softcap) for window in (None, 1, 1000) for softcap in (None, 2.0)),
    *((*heads, window, softcap)
      for heads in ((2, 1, 8), (4, 1, 64), (9, 3, 80), (20, 1, 128), (4, 2, 256))
      for window, softcap in ((None, None), (40, 2.0))),
])  # fmt: skip
def test_the_kernel_attends_to_what_a_row_has(
    dtype: torch.dtype, heads: int, groups: int, size: int, window: int | None, softcap: float | None
) -> None:
    """Rows of 1 token, of all that fit and of some between, whose places beyond hold no numbers."""
    from rlhf.stages.engines import decode_kernels

    torch.manual_seed(0)
    num_tokens = 83  # a multiple of no block
    before = torch.tensor([0, 1, 15, 16, 17, 63, 64, 65, num_tokens - 1], device=DEVICE)
    query, key, value = (
        torch.randn(len(before), 1, n, size, device=DEVICE).to(dtype).transpose(1, 2)[:, :, 0]
        for n in (heads, groups, groups)
    )
    keys, values = torch.randn(2, len(before) + 2, groups, num_tokens, size, device=DEVICE).to(dtype)  # two rows wait
    places = torch.arange(num_tokens, device=DEVICE)
    unseen = places >= before[:, None]  # [n,S]
    if window is not None:
        unseen |= places <= before[:, None] - window
    for cache in (keys, values):
        cache[: len(before)].masked_fill_(unseen[:, None, :, None], torch.nan)
    kept = keys.clone(), values.clone()
    scaling = size**-0.5
    found = decode_kernels.attend(query, key, value, keys, values, before, scaling, window, softcap)
    for row, length in enumerate(before.tolist()):
        for cache, new in zip(kept, (key, value), strict=True):
            cache[row, :, length] = new[row]
        seen = ~unseen[row]
        seen[length] = True
        expected = attention(query[row], *(cache[row][:, seen] for cache in kept), scaling, softcap)
        error = 1e-4 if dtype == torch.float32 else 0.03
        torch.testing.assert_close(found[row].float(), expected, rtol=0, atol=error)
    for cache, old in zip((keys, values), kept, strict=True):
        assert torch.equal(cache.nan_to_num(1e4), old.nan_to_num(1e4))  # only the new ones were written


def attention(query: Tensor, keys: Tensor, values: Tensor, scaling: float, softcap: float | None) -> Tensor:
    """[H,D] in float32, of queries [H,D] that see all of the keys [G,S,D]."""
    groups = len(query) // len(keys)
    keys, values = (x.float().repeat_interleave(groups, 0) for x in (keys, values))  # [H,S,D]
    scores = (keys @ query.float()[:, :, None])[..., 0] * scaling
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    return (scores.softmax(-1)[:, None] @ values)[:, 0]
