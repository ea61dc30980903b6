"""What passes are said to take: traced bytes by hand, beside a whole trace, and beside what torch allocates."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from estimate_world import most, ppo_settings, shape
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaForCausalLM, LlamaForSequenceClassification

from rlhf.stages import budget
from rlhf.stages.adapters import add_lora
from rlhf.stages.footprint import ATTENTION, Footprint, at_depth, layers_of, learn, traced
from rlhf.stages.head_loss import head_loss
from rlhf.stages.models import PolicyModel, ScalarModel, compile_layers
from rlhf.stages.packing import read
from rlhf.stages.settings import LoraSettings


def gpt2_shape(num_layers: int) -> GPT2Config:
    return GPT2Config(n_layer=num_layers, vocab_size=2048, n_embd=64, n_head=4, n_positions=256,
                      resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)  # fmt: skip


def linear(size: int = 256) -> nn.Linear:
    with torch.device("meta"):
        return nn.Linear(size, size, bias=False)


def test_the_most_that_is_alive_at_one_time_counts_and_weights_do_not() -> None:
    layer, footprint = linear(), Footprint(vocabulary=0)
    with footprint.of(layer), torch.no_grad():
        footprint.at("it")
        x = torch.zeros(4, 256)  # 4096 bytes
        y = layer(x)  # and 4096 more
        del x
        del y
        torch.zeros(1, 256)
    assert footprint.moments["it"] == {"activations": 8192}


def test_what_autograd_keeps_is_alive_until_the_backward_pass() -> None:
    layer, footprint = linear(), Footprint(vocabulary=0)
    with footprint.of(layer):
        footprint.at("forward")
        loss = layer(torch.zeros(4, 256)).square().sum()
        footprint.at("kept")
        torch.zeros(())
        loss.backward()
        del loss
        footprint.at("after")
    # The input, the output, the loss; squares are gone.
    assert footprint.moments["kept"]["activations"] >= 2 * 4096 + 512
    assert {kind: size for kind, size in footprint.moments["after"].items() if size} == {"gradients": 4 * 256 * 256}


def test_copies_of_weights_for_autocast_are_told_as_weights_and_take_half() -> None:
    layer, footprint = linear(), Footprint(vocabulary=0)
    with footprint.of(layer):
        footprint.at("it")
        with torch.autocast("cpu", torch.bfloat16):
            kept = layer(torch.zeros(4, 256))
        del kept
    assert footprint.moments["it"]["weights"] == 2 * 256 * 256


def test_what_has_the_width_of_the_vocabulary_is_told_as_logits() -> None:
    layer, footprint = linear(), Footprint(vocabulary=256)
    with footprint.of(layer):
        footprint.at("it")
        layer(torch.zeros(8, 256, device="cpu")[:, :256])
    assert footprint.moments["it"]["logits"] == 2 * 8 * 256 * 4  # the input is as wide


def test_shares_of_a_weights_gradient_are_added_in_place() -> None:
    """As autograd does with tensors that have contents."""
    layer, footprint = linear(1024), Footprint(vocabulary=0)
    with footprint.of(layer):
        loss = sum(layer(torch.zeros(1, 1024)).sum() for _ in range(4))
        footprint.at("backward")
        loss.backward()  # type: ignore[union-attr]
    weight = 4 * 1024 * 1024
    assert 2 * weight <= sum(footprint.moments["backward"].values()) < 2.2 * weight  # the sum, and the newest share


def update_of(num: int, recompute: bool = False) -> Callable[[Any, Footprint], None]:
    def run(configs: Any, footprint: Footprint) -> None:
        with torch.device("meta"):
            model = LlamaForCausalLM._from_config(configs[0], attn_implementation=ATTENTION).train()
        if recompute:
            model.activation_checkpointing_enable()
        policy = PolicyModel(model)
        with footprint.of(policy):
            learn(footprint, "update", {model: lambda: loss_of(policy)}, num)

    return run


def loss_of(policy: PolicyModel) -> Tensor:
    ids = torch.zeros(4, 64, dtype=torch.long)
    with torch.autocast("cpu", torch.bfloat16):
        return policy(ids, torch.ones_like(ids).bool(), 32, 1.0)[0].sum()


@pytest.mark.parametrize("num", [1, 2])
@pytest.mark.parametrize("recompute", [False, True])
def test_layers_that_were_not_traced_add_what_those_add_that_were(num: int, recompute: bool) -> None:
    config, footprint = shape(6), Footprint(vocabulary=2048)
    update_of(num, recompute)([config], footprint)
    whole, found = footprint.moments, traced([config], update_of(num, recompute))
    assert found.keys() == whole.keys()
    for moment, kinds in found.items():
        assert sum(kinds.values()) == pytest.approx(sum(whole[moment].values()), rel=0.02), moment
    first, last = found["update, first layer"], found["update, last layer"]
    assert first["activations"] > last["activations"]
    assert first.get("gradients", 0) < last["gradients"] or num > 1


def test_models_of_two_depths_are_traced_apart() -> None:
    def run(configs: Any, footprint: Footprint) -> None:
        with footprint.of():
            footprint.at("it")
            kept = [torch.zeros(configs[0].num_hidden_layers, 128), torch.zeros(10 * configs[1].num_hidden_layers, 128)]
            del kept

    assert most(traced([shape(3), shape(8)], run)) == 512 * (3 + 80)


def test_recomputed_layers_keep_less() -> None:
    recomputed = traced([shape()], update_of(1, recompute=True))
    assert most(recomputed) < 0.6 * most(traced([shape()], update_of(1)))
    assert traced([shape()], update_of(1, recompute=True), "layers", recomputed=True) == recomputed


def test_a_shallower_model_is_the_same_otherwise() -> None:
    config = shape(8)
    cut = at_depth(config, 2)
    assert (cut.num_hidden_layers, config.num_hidden_layers) == (2, 8)
    assert cut.hidden_size == config.hidden_size


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, when its compiler is imported
def test_compiled_steps_keep_what_products_read_and_make() -> None:
    def run(configs: Any, footprint: Footprint) -> None:
        with torch.device("meta"):
            model = LlamaForCausalLM._from_config(configs[0], attn_implementation=ATTENTION).train()

        def loss() -> Tensor:
            ids = torch.zeros(4, 64, dtype=torch.long)
            with torch.autocast("cpu", torch.bfloat16), torch.compiler.set_stance("force_eager"):
                hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
                return head_loss(hidden.flatten(0, 1), model.get_output_embeddings().weight, ids.flatten(), True)[0]

        with footprint.of(model):
            learn(footprint, "update", {model: loss}, 1)

    plain, fused = (most(traced([shape()], run, fused)) for fused in (None, "all"))
    assert fused < 0.8 * plain


def test_what_the_head_of_a_reward_model_reads_is_kept_for_it_is_not_compiled() -> None:
    with torch.device("meta"):
        head = nn.Linear(256, 1, bias=False)
    footprint = Footprint(0, "layers")
    with footprint.of(head):
        footprint.at("it")
        made = head(torch.zeros(4, 256))  # 4096 bytes, and a block
        footprint.at("after")
    assert footprint.moments["after"] == {"activations": 4096 + 512}
    del made


def test_of_a_compiled_layer_and_its_adapter_the_sum_alone_is_kept() -> None:
    layers = linear(), linear()
    footprint = Footprint(0, "layers")
    with footprint.of(*layers):
        footprint.at("it")
        x = torch.zeros(4, 256)
        kept = layers[0](x)  # x, which is made once more later on, and this: 4096 bytes each
        with_adapter = kept + layers[1](x)  # 4096 more until it is added
        footprint.at("after")
    assert footprint.moments["it"] == {"activations": 2 * 4096}
    assert footprint.moments["after"] == {"activations": 4096}
    del with_adapter


# --- beside what torch keeps and allocates


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("of_depth", [shape, gpt2_shape])
def test_a_compiled_layer_keeps_what_the_trace_says(
    of_depth: Callable[[int], Any], lora: bool, autocast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its products and what attention needs: for that `compile_layers` lets it make the rest once more. Of few tokens,
    whose activations are small beside the copies of the weights."""
    rows, length = 5, 8
    precision = partial(torch.autocast, "cpu", torch.bfloat16, enabled=autocast)

    def build(config: Any) -> Any:
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).train()
        if lora:
            add_lora(model.requires_grad_(False), LoraSettings())
        return model

    def run(configs: Any, footprint: Footprint) -> None:
        with torch.device("meta"):
            model = build(configs[0])
        with footprint.of(model):
            ids = torch.zeros(rows, length, dtype=torch.long)

            def loss() -> Tensor:
                with precision():
                    return read(model, ids).float().sum()

            learn(footprint, "update", {model: loss}, 1)

    two, three = (traced([of_depth(depth)], run, "layers")["update"]["activations"] for depth in (2, 3))
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))
    model = build(of_depth(3))
    model.set_attn_implementation("sdpa")
    compile_layers(model)
    sizes: dict[int, int] = {}
    dtype = torch.bfloat16 if autocast else torch.float32
    x = torch.randn(rows, length, model.config.hidden_size, dtype=dtype, requires_grad=True)
    given = {}
    if of_depth is shape:
        given["position_embeddings"] = model.model.rotary_emb(x, torch.arange(length)[None])
    others = (*model.parameters(), *given.get("position_embeddings", ()))
    not_its_own = {t.untyped_storage().data_ptr() for t in others}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in not_its_own and tensor.numel() % (rows * length) == 0:  # no copy of a weight
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with precision(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        kept = layers_of(model)[1](x, attention_mask=None, **given)
    assert three - two == pytest.approx(sum(sizes.values()), rel=0.08)
    del kept


def allocated(step: Callable[[], Any]) -> int:
    """Most bytes that a step had from the CPU's allocator at one time, as torch's profiler saw it."""
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as found:
        step()
    now = peak = 0
    for event in found.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak


def test_the_trace_of_ppos_update_is_what_torch_allocates() -> None:
    settings, num = ppo_settings(), 1

    def of_policy(policy: PolicyModel) -> Tensor:
        ids = torch.zeros(8, 64, dtype=torch.long)
        return policy(ids, torch.ones_like(ids).bool(), settings.max_new_tokens, 1.0)[0].sum()

    def run(configs: Any, footprint: Footprint) -> None:
        with torch.device("meta"):
            model = LlamaForCausalLM._from_config(configs[0], attn_implementation=ATTENTION).eval()
        policy = PolicyModel(model)
        with footprint.of(policy):
            learn(footprint, "update", {model: lambda: of_policy(policy)}, num)

    real = PolicyModel(LlamaForCausalLM(shape()).eval())
    found = allocated(lambda: of_policy(real).backward())
    assert most(traced([shape()], run)) == pytest.approx(found, rel=0.1)


def test_the_trace_of_a_reward_models_step_is_what_torch_allocates() -> None:
    def of_scores(scalar: ScalarModel) -> Tensor:
        ids = torch.zeros(6, 48, dtype=torch.long)
        values = scalar(ids, torch.ones_like(ids).bool())
        assert isinstance(values, Tensor)
        return values.sum()

    def run(configs: Any, footprint: Footprint) -> None:
        scalar = budget.scalar_of(configs[0])
        with footprint.of(scalar):
            learn(footprint, "update", {scalar.classifier: lambda: of_scores(scalar)}, 1)

    config = shape()
    config.num_labels = 1
    real = ScalarModel(LlamaForSequenceClassification(config).eval())
    found = allocated(lambda: of_scores(real).backward())
    assert most(traced([config], run)) == pytest.approx(found, rel=0.15)
