"""The built-in engine reads every family as the family's own forward pass does, and leaves nothing in the model."""

from typing import Any

import pytest
import torch
from engines_world import CONFIGS, PROMPTS, STOPS, adapted, assert_sampled, drawn, new_model, read
from stages_world import tiny_policy
from torch import Tensor, nn

from rlhf.stages import adapters
from rlhf.stages.engines import Responses, slots, static
from rlhf.stages.engines.static import FAMILIES, StaticEngine
from rlhf.stages.engines.twin import Twin, _Product
from rlhf.stages.ppo.layout import recompute_layers
from rlhf.stages.settings import LoraSettings


def test_every_family_is_tested() -> None:
    assert {name.split()[0] for name in CONFIGS} == FAMILIES


@pytest.mark.parametrize("family", CONFIGS)
def test_a_family_is_read_as_it_reads_itself(family: str) -> None:
    model = new_model(family)
    for num_slots in (None, 3):  # all at once; and with prompts that wait for a slot
        responses = drawn(StaticEngine(model, batch_size=num_slots))
        assert_sampled(model, PROMPTS, responses, 0.7, STOPS, 20)
        lengths = responses.mask.sum(-1)
        assert lengths.max() > lengths.min()
        assert lengths.max() > 7  # as long as a window


@pytest.mark.parametrize("num_slots", [None, 1, 2, 4])
def test_responses_of_one_token(num_slots: int | None) -> None:
    model = new_model("llama")
    assert_sampled(model, PROMPTS, drawn(StaticEngine(model, batch_size=num_slots), length=1), 0.7, STOPS, 1)


@pytest.mark.parametrize("num_slots", [1, 2, 5, 16])
def test_many_prompts_share_few_slots(num_slots: int) -> None:
    """Each response stands beside its own prompt, whatever slot it was written in, and wherever that moved."""
    model = new_model("mistral")
    prompts = [[3 + i, 4] * (1 + i % 5) for i in range(40)]
    responses = drawn(StaticEngine(model, batch_size=num_slots), prompts)
    assert_sampled(model, prompts, responses, 0.7, STOPS, 20)
    assert (responses.mask.sum(-1) == 20).any()


@pytest.mark.parametrize(("num_slots", "lag"), [(2, 1), (5, 1), (1, 4), (16, 4)])
def test_what_has_ended_may_be_seen_late(num_slots: int, lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, whose steps are under way when those before are looked at: no row is taken for the one before it,
    and how far the steps to come are does not matter, so that one seed is one rollout."""
    model = new_model("mistral")
    prompts = [[3 + i, 4] * (1 + i % 5) for i in range(40)]

    def late(fresh: bool) -> tuple[Responses, Tensor]:
        class Late(static._Writing):
            def __init__(self, *given: Any) -> None:
                super().__init__(*given)
                self.lag = lag

            def look(self) -> static._Look:
                return static._Look(self.told if fresh else self.told.clone(), self.num_steps, None)

        monkeypatch.setattr(static, "_Writing", Late)
        responses = drawn(StaticEngine(model, batch_size=num_slots), prompts)
        monkeypatch.undo()
        return responses, torch.rand(1)

    (responses, drawn_next), (others, others_next) = late(fresh=False), late(fresh=True)
    assert_sampled(model, prompts, responses, 0.7, STOPS, 20)
    assert (responses.mask.sum(-1) == 20).any()
    assert torch.equal(responses.tokens, others.tokens)
    assert torch.equal(drawn_next, others_next)


# --- what is computed


def passes(model: Any, num_slots: int | None, prompts: list[list[int]]) -> tuple[list[int], list[int]]:
    """Rows of each pass that read prompts, and of each pass that made a token."""
    shapes: list[Any] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    drawn(StaticEngine(model, batch_size=num_slots), prompts)
    return [rows for rows, width in shapes if width > 1], [rows for rows, width in shapes if width == 1]


def test_equal_prompts_are_read_once_and_rows_that_have_ended_are_not_written_on() -> None:
    read_rows, written = passes(new_model("llama"), None, PROMPTS)
    assert read_rows == [5]  # of 7
    assert written[0] <= 7
    assert written == sorted(written, reverse=True)
    assert written[-1] < 7


def test_prompts_that_wait_take_the_slots_of_rows_that_have_ended_and_at_the_end_rows_move_up() -> None:
    prompts = [[3 + i, 4] for i in range(12)]
    read_rows, written = passes(new_model("llama"), 3, prompts)
    assert sum(read_rows) == 12
    assert len(read_rows) > 3
    assert max(written) == 3
    assert min(written) < 3
    assert written == sorted(written, reverse=True)


# --- adapters


def traces(model: nn.Module) -> list[Any]:
    """What a model is made of, beside the values of its weights."""
    return [(name, type(module), sorted(vars(module)), module.training) for name, module in model.named_modules()]


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_an_adapter_takes_part_in_the_rollout_and_the_model_stays_as_it_was(shape: str) -> None:
    model = adapted(tiny_policy(shape))
    weights = {name: (x, x.clone(), x.requires_grad) for name, x in model.state_dict(keep_vars=True).items()}
    before, config, attention = traces(model), model.config.to_dict(), model.config._attn_implementation
    responses = drawn(StaticEngine(model))
    assert_sampled(model, PROMPTS, responses, 0.7, STOPS, 20)
    after = model.state_dict(keep_vars=True)
    assert after.keys() == weights.keys()
    for name, (tensor, value, learns) in weights.items():
        assert after[name] is tensor
        assert torch.equal(tensor, value)
        assert tensor.requires_grad == learns
    assert traces(model) == before
    assert model.config.to_dict() == config
    assert model.config._attn_implementation == attention
    plain = read(tiny_policy(shape), PROMPTS, responses, 0.7)
    assert (responses.logprobs - plain).abs().max() > 0.1  # the adapter has a say


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_recomputed_layers_change_nothing(shape: str) -> None:
    model = adapted(tiny_policy(shape))
    engine = StaticEngine(model)
    plain = drawn(engine)
    recompute_layers(model)
    for other in (engine, StaticEngine(model)):
        found = drawn(other)
        assert torch.equal(found.tokens, plain.tokens)
        assert torch.equal(found.logprobs, plain.logprobs)


def test_an_adapter_that_learns_is_followed() -> None:
    model = adapted(tiny_policy())
    engine = StaticEngine(model)
    before = drawn(engine)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(-1.5)
    after = drawn(engine)
    assert_sampled(model, PROMPTS, after, 0.7, STOPS, 20)
    assert not torch.equal(before.logprobs[:, 0], after.logprobs[:, 0])


def test_where_some_projections_alone_are_adapted_the_others_are_as_they_were() -> None:
    model = adapted(tiny_policy(), target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    assert_sampled(model, PROMPTS, drawn(StaticEngine(model)), 0.7, STOPS, 20)


EMBEDDINGS = [
    ("llama", ["embed_tokens", "q_proj"]), ("gemma3_text", ["embed_tokens"]), ("gpt2", ["wte", "wpe", "c_attn"]),
    ("rlhf_decoder pre learned 2", ["embed_positions", "v_proj"]),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "names"), EMBEDDINGS)
def test_adapted_embeddings_are_looked_up_in_their_adapter_too(
    family: str, names: list[str], dtype: torch.dtype
) -> None:
    plain = new_model(family, std=None, tie_word_embeddings=False)
    model = adapted(adapters.shared_copy(plain), target_modules=names)
    engine = StaticEngine(model, dtype)
    for _ in range(2):
        responses = drawn(engine)
        of_model, of_plain = (read(x, PROMPTS, responses, 0.7) for x in (model, plain))
        gap, least = (responses.logprobs - of_model).abs(), (responses.logprobs - of_plain).abs().mean()
        assert least > 0.05
        assert gap.max() < (1e-5 if dtype == torch.float32 else 0.02)
        assert_nothing_kept(engine, model)
        for name, parameter in model.named_parameters():  # it learns between two rollouts
            if "lora_embedding_A" in name:
                parameter.data *= -0.7


def test_an_adapter_takes_part_where_projections_have_biases() -> None:
    model = adapted(new_model("llama with biases"))
    assert any("base_layer.bias" in name for name, _ in model.named_parameters())
    assert_sampled(model, PROMPTS, drawn(StaticEngine(model)), 0.7, STOPS, 20)


def test_on_a_base_in_bfloat16_an_adapter_counts_as_it_does_in_the_update() -> None:
    """Merged into weights of some .5, changes below half a step of bfloat16 would be lost: the start would sample."""
    base = new_model("llama", std=0.5).to(torch.bfloat16)
    policy = adapters.shared_copy(base)
    adapters.add_lora(policy, LoraSettings(r=16, alpha=32))
    torch.manual_seed(4)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=3e-3)
    twin = Twin(policy, torch.bfloat16)
    twin.take()
    hidden = torch.randn(512, 1, 48).to(torch.bfloat16)
    start, learned, sampled = (model.model.layers[0].self_attn.q_proj for model in (base, policy, twin.model))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        of_start, of_policy = start(hidden).float(), learned(hidden).float()
        merged = (start.weight + learned.get_delta_weight("default")).to(torch.bfloat16)
        of_merged, of_twin = nn.functional.linear(hidden, merged).float(), sampled(hidden).float()
    change = (of_policy - of_start).norm()
    assert (of_twin - of_policy).norm() < 0.1 * change
    assert (of_merged - of_policy).norm() > 0.3 * change


# --- another type, and memory


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "rlhf_decoder post sinusoidal 4"])
def test_a_model_in_float32_is_sampled_in_bfloat16(family: str) -> None:
    model = new_model(family, std=None)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    responses = drawn(StaticEngine(model, torch.bfloat16))
    gap = (responses.logprobs - read(model, PROMPTS, responses, 0.7)).abs()[responses.mask]
    assert 0 < gap.mean() < 0.02
    after = model.state_dict()
    assert all(after[name].dtype == torch.float32 and torch.equal(after[name], before[name]) for name in before)


def assert_nothing_kept(engine: StaticEngine, model: nn.Module) -> None:
    products = [module for module in engine.twin.model.modules() if isinstance(module, _Product)]
    assert products
    for product in products:
        assert product.weight is None
        assert product.bias is None
        assert product.up is None
        assert not product.parts
    own = {id(parameter) for parameter in model.parameters()}
    assert all(id(parameter) in own for parameter in engine.twin.model.parameters())
    assert not slots._current.slots


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("lora", [False, True])
def test_nothing_of_a_rollout_is_kept(dtype: torch.dtype | None, lora: bool) -> None:
    model = adapted(tiny_policy()) if lora else new_model("llama with biases")
    engine = StaticEngine(model, dtype)
    drawn(engine)
    assert_nothing_kept(engine, model)


@pytest.mark.parametrize("lora", [False, True])
def test_gathered_weights_that_are_put_together_do_not_lie_there_twice(lora: bool) -> None:
    model = adapted(tiny_policy()) if lora else new_model("llama with biases")
    plain, engine = StaticEngine(model), StaticEngine(model)
    expected = drawn(plain)
    engine.twin.owns_weights = True
    responses = drawn(engine)
    assert torch.equal(responses.tokens, expected.tokens)
    assert torch.equal(responses.logprobs, expected.logprobs)
    sizes = {name: weight.untyped_storage().nbytes() for name, weight in model.named_parameters()}
    gone = {name.split(".")[-2 - ("base_layer" in name)] for name, size in sizes.items() if not size}
    assert gone >= {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert sizes["model.embed_tokens.weight"]


def test_nothing_of_a_rollout_that_failed_is_kept_and_the_next_one_works(monkeypatch: pytest.MonkeyPatch) -> None:
    model = new_model("llama")
    engine = StaticEngine(model)
    plain = drawn(engine)
    silu, calls = nn.functional.silu, []

    def full(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise MemoryError
        return silu(*arguments, **named)

    monkeypatch.setattr(nn.functional, "silu", full)
    with pytest.raises(MemoryError):
        drawn(engine)
    assert_nothing_kept(engine, model)
    assert torch.equal(drawn(engine).tokens, plain.tokens)
