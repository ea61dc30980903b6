"""Adapters on weights that are in memory once, and the reward model that is trained as one."""

import gc
import json
import weakref
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from ppo_world import lora_reward, model_folders, tiny_scalar
from safetensors.torch import load_file
from stages_world import tiny_policy
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf.data.errors import RefusedError
from rlhf.stages import adapters, lora_layers
from rlhf.stages.artifact import Artifact, model_digest
from rlhf.stages.models import SCORE_KEYS, PolicyModel, ScalarModel, load_policy, load_scalar, load_tokenizer
from rlhf.stages.settings import LoraSettings

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
LORA = LoraSettings(r=2, alpha=4)
IDS = torch.randint(1, 260, (3, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS).bool()


def logprobs(model: Any) -> Tensor:
    with torch.no_grad():
        return PolicyModel(model)(IDS, MASK, 6, 0.7)[0]


def numbers(scalar: ScalarModel) -> Tensor:
    with torch.no_grad():
        return scalar.eval()(IDS, MASK)


def stir(model: torch.nn.Module, seed: int = 3) -> None:
    """Give an adapter weights as if it had learned something."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.1)


def places(model: torch.nn.Module) -> set[int]:
    """Where the weights of the base lie."""
    return {p.data_ptr() for name, p in model.named_parameters() if "lora_" not in name and "score" not in name}


# --- one base


def test_copies_share_every_weight_and_have_adapters_of_their_own(policy: Any) -> None:
    base = policy.requires_grad_(False)
    alone = logprobs(base)
    one, other = adapters.shared_copy(base), adapters.shared_copy(base)
    for copy, seed in ((one, 3), (other, 4)):
        adapters.add_lora(copy, LORA)
        assert torch.equal(logprobs(copy), alone)  # a fresh adapter adds nothing
        stir(copy, seed)
    assert places(one) == places(other) == places(base)
    assert not torch.equal(logprobs(one), logprobs(other))
    assert torch.equal(logprobs(base), alone)
    assert all("lora_" in name for name, p in one.named_parameters() if p.requires_grad)
    assert one.get_output_embeddings().weight is base.get_input_embeddings().weight  # still tied


def test_both_of_two_adapters_learn_from_one_backward_pass() -> None:
    """PEFT's own switch would have frozen one of them."""
    base = tiny_policy().requires_grad_(False)
    one, other = adapters.shared_copy(base), adapters.shared_copy(base)
    for model in (one, other):
        adapters.add_lora(model, LORA)
    loss = sum(PolicyModel(model)(IDS, MASK, 6, 0.7)[0].sum() for model in (one, other))
    assert isinstance(loss, Tensor)
    loss.backward()
    for model in (one, other):
        gradients = {name: p.grad for name, p in model.named_parameters() if "lora_B" in name}
        assert len(gradients) == 14  # seven linear layers in each of two blocks
        assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients.values())
    assert all(p.grad is None for p in base.parameters())


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_a_classifier_on_a_base_is_a_head_and_the_bases_weights(shape: str) -> None:
    base = tiny_policy(shape).requires_grad_(False)
    classifier = adapters.classifier_on(base).eval()
    assert places(classifier) <= places(base)
    whole = tiny_scalar(shape).classifier
    missing = whole.load_state_dict(base.state_dict(), strict=False).missing_keys
    assert missing == ["score.weight"]
    whole.score.load_state_dict(classifier.score.state_dict())
    assert torch.equal(numbers(ScalarModel(classifier)), numbers(ScalarModel(whole)))
    adapters.add_lora(classifier, LORA)
    trained = {name for name, p in classifier.named_parameters() if p.requires_grad}
    assert "score.weight" in trained
    assert all("lora_" in name for name in trained - {"score.weight"})


def test_adapters_of_a_base_in_half_precision_learn_in_full(policy: Any, tmp_path: Path) -> None:
    base = policy.to(torch.bfloat16).requires_grad_(False)
    model = adapters.shared_copy(base)
    adapters.add_lora(model, LORA)
    adapters.save_adapter(tmp_path, model)
    again = adapters.shared_copy(base)
    adapters.load_adapter(again, tmp_path)
    for one in (model, again):
        assert {p.dtype for p in one.parameters() if p.requires_grad} == {torch.float32}
        assert {p.dtype for p in one.parameters() if not p.requires_grad} == {torch.bfloat16}


def test_a_saved_adapter_names_its_layers_in_order(policy: Any, tmp_path: Path) -> None:
    """PEFT keeps a set of them, which each process would write in another order."""
    adapters.add_lora(policy, LORA)
    adapters.save_adapter(tmp_path, policy)
    names = json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"]
    assert names == sorted(names)
    assert len(names) > 2


# --- layers that read the same input


def gradients(model: Any) -> dict[str, Tensor]:
    """Of an adapter: those of the sum of squared log-probabilities."""
    PolicyModel(model)(IDS, MASK, 6, 0.7)[0].square().sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_joined_layers_read_and_learn_as_peft_s_own(policy: Any, tmp_path: Path) -> None:
    base = policy.requires_grad_(False)
    ours = adapters.shared_copy(base)
    adapters.add_lora(ours, LORA)
    stir(ours)
    adapters.save_adapter(tmp_path, ours)
    peft = PeftModel.from_pretrained(adapters.shared_copy(base), str(tmp_path), is_trainable=True).base_model.model
    assert torch.allclose(logprobs(ours), logprobs(peft), atol=1e-5)
    found, expected = gradients(ours), gradients(peft)
    assert found.keys() == expected.keys()
    assert len(found) in (16, 28)  # two factors of GPT-2's four layers, or of Llama's seven, in two blocks
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-4), name


@pytest.mark.parametrize("place", ["q_proj", "k_proj"])
def test_a_pass_that_was_broken_off_changes_nothing_and_can_be_let_go(place: str) -> None:
    """Its activations hang on what it has made for layers that it did not come to: a second try would not fit."""
    model = adapters.shared_copy(tiny_policy().requires_grad_(False))
    adapters.add_lora(model, LORA)
    stir(model)
    expected = logprobs(model)
    layer = getattr(model.base_model.layers[1].self_attn, place).base_layer
    states: list[Any] = []

    def no_room(_module: Any, inputs: tuple[Tensor]) -> None:
        states.append(weakref.ref(inputs[0]))
        raise torch.OutOfMemoryError

    handle = layer.register_forward_pre_hook(no_room)
    with pytest.raises(torch.OutOfMemoryError):
        PolicyModel(model)(IDS, MASK, 6, 0.7)
    handle.remove()
    assert torch.equal(logprobs(model), expected)
    handle = layer.register_forward_pre_hook(no_room)
    with pytest.raises(torch.OutOfMemoryError):
        PolicyModel(model)(IDS, MASK, 6, 0.7)
    gc.collect()
    assert states[1]() is not None
    lora_layers.forget(model)
    gc.collect()
    assert states[1]() is None


def test_joined_layers_that_read_unlike_inputs_after_all_are_computed_apart() -> None:
    """As queries and keys are in attention from one text to another."""
    model = adapters.shared_copy(tiny_policy().requires_grad_(False))
    adapters.add_lora(model, LORA)
    stir(model)
    attention = model.base_model.layers[0].self_attn
    one, other = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    expected = adapters.shared_copy(model).base_model.layers[0].self_attn.k_proj(other)
    attention.q_proj(one)
    assert torch.equal(attention.k_proj(other), expected)


def test_joined_layers_may_be_asked_in_any_order() -> None:
    model = adapters.shared_copy(tiny_policy().requires_grad_(False))
    adapters.add_lora(model, LORA)
    stir(model)
    attention = model.base_model.layers[0].self_attn
    x = torch.randn(1, 16, generator=torch.Generator().manual_seed(0))
    names = ["q_proj", "k_proj", "v_proj"]
    expected = {name: getattr(attention, name)(x) for name in names}
    found = {name: getattr(attention, name)(x) for name in reversed(names)}
    for name in names:
        assert torch.equal(found[name], expected[name]), name


def test_a_layer_that_drops_out_stays_peft_s() -> None:
    model = adapters.shared_copy(tiny_policy().requires_grad_(False))
    adapters.add_lora(model, LoraSettings(r=2, alpha=4, dropout=0.5))
    stir(model)
    alone = logprobs(model.eval())
    assert torch.equal(logprobs(model), alone)
    assert not torch.allclose(logprobs(model.train()), alone)


# --- saving


def test_a_saved_adapter_is_peft_s_and_says_the_same_merged_and_loaded_again(policy: Any, tmp_path: Path) -> None:
    base = policy.requires_grad_(False)
    model = adapters.shared_copy(base)
    adapters.add_lora(model, LORA)
    stir(model)
    expected = logprobs(model)
    adapters.save_adapter(tmp_path, model)
    again = adapters.shared_copy(base)
    adapters.load_adapter(again, tmp_path)
    assert torch.equal(logprobs(again), expected)
    peft = PeftModel.from_pretrained(adapters.shared_copy(base), str(tmp_path))
    assert torch.allclose(logprobs(peft.base_model.model), expected, atol=1e-5)
    merged = adapters.merged(tiny_policy("llama" if "Llama" in type(policy).__name__ else "gpt2"), tmp_path)
    assert torch.allclose(logprobs(merged), expected, atol=1e-5)
    assert (logprobs(base) - expected).abs().max() > 0.1


def test_an_adapter_of_another_shape_or_with_missing_weights_is_refused(tmp_path: Path) -> None:
    base = tiny_policy().requires_grad_(False)
    model = adapters.shared_copy(base)
    adapters.add_lora(model, LORA)
    adapters.save_adapter(tmp_path, model)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps({**config, "target_modules": ["q_proj"]}))
    with pytest.raises(RefusedError, match="its adapter does not fit"):
        adapters.load_adapter(adapters.shared_copy(base), tmp_path)


@pytest.mark.parametrize(("names", "found"), [
    (["query", "value"], "'query' names no layer"), ("q", "'q' names no layer"),
    (["q_proj", "v_porj"], "'v_porj' names no layer"), (["norm"], "names what LoRA cannot adapt"),
])  # fmt: skip
def test_layers_that_are_not_there_are_refused_with_those_that_are(names: Any, found: str) -> None:
    """PEFT would pass over a misspelt one beside others."""
    with pytest.raises(RefusedError, match=rf"lora\.target_modules: .*{found}; there are \[.*'q_proj'"):
        adapters.add_lora(tiny_policy(), LoraSettings(target_modules=names))


@pytest.mark.parametrize(("shape", "tied", "name"), [
    ("llama", False, "lm_head"), ("llama", True, "lm_head"), ("llama", True, "model.embed_tokens"),
    ("gpt2", True, "wte"), ("gpt2", False, "lm_head"),
])  # fmt: skip
def test_what_makes_the_logits_is_not_adapted_nor_embeddings_that_are_the_same_weight(
    shape: str, tied: bool, name: str
) -> None:
    """Merged, it would change both uses of the weight; and that of the head would learn nothing from its weight."""
    model = tied_or_not(shape, tied)
    for make in (adapters.add_lora, adapters.lora_config):  # the latter for SFT, whose trainer puts it in
        with pytest.raises(RefusedError, match=rf"target_modules: '{name}': .* logits cannot be adapted.*leave it out"):
            make(model, LoraSettings(target_modules=["c_attn" if shape == "gpt2" else "q_proj", name]))


@pytest.mark.filterwarnings("ignore:.*save_embedding_layers")
@pytest.mark.parametrize(("shape", "name"), [("llama", "embed_tokens"), ("gpt2", "wte"), ("gpt2", "wpe")])
def test_embeddings_of_their_own_are_adapted_saved_and_merged(shape: str, name: str, tmp_path: Path) -> None:
    base = tied_or_not(shape, tied=False)
    model = adapters.shared_copy(base)
    adapters.add_lora(model, LoraSettings(r=2, alpha=4, target_modules=[name]))
    stir(model)
    adapters.save_adapter(tmp_path, model)
    expected = model(IDS).logits
    assert (expected - base(IDS).logits).abs().max() > 1
    embeddings = model.get_submodule(next(key for key, _ in model.named_modules() if key.endswith(f".{name}")))
    loaded = adapters.shared_copy(base)
    adapters.load_adapter(loaded, tmp_path)
    assert torch.equal(loaded(IDS).logits, expected)
    merged = adapters.merged(deepcopy(base), tmp_path)
    torch.testing.assert_close(merged(IDS).logits, expected, atol=1e-4, rtol=0)
    whole = adapters.merged_weight(embeddings)
    torch.testing.assert_close(whole, dict(merged.named_modules())[f"{merged.base_model_prefix}.{name}"].weight)


def tied_or_not(shape: str, tied: bool) -> Any:
    """A tiny decoder whose input embeddings and head are one weight, or two."""
    config = tiny_policy(shape).config
    config.tie_word_embeddings = tied
    torch.manual_seed(0)
    return type(tiny_policy(shape))(config).eval()


# --- a reward model as an adapter


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, str]:
    return model_folders(tmp_path_factory.mktemp("models"), tokenizer)


@pytest.fixture(scope="module")
def reward(tmp_path_factory: pytest.TempPathFactory, given: dict[str, str]) -> Path:
    return Path(lora_reward(tmp_path_factory.mktemp("lora") / "reward", given["model"]))


def test_the_reward_model_is_an_ordinary_classifier_that_scores_like_base_and_adapter(
    given: dict[str, str], reward: Path, tokenizer: Any
) -> None:
    plain, info = AutoModelForSequenceClassification.from_pretrained(reward, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert plain.config.num_labels == 1
    assert not list(reward.glob("adapter_*"))
    whole = load_scalar(str(reward), load_tokenizer(str(reward)))
    base = load_policy(given["model"], tokenizer).requires_grad_(False)
    on_base = adapters.load_scalar_on(base, reward / "adapter")
    assert torch.allclose(numbers(whole), numbers(on_base), atol=1e-5)
    untrained = adapters.classifier_on(base)
    untrained.score.load_state_dict(on_base.classifier.score.state_dict())
    assert (numbers(ScalarModel(untrained)) - numbers(on_base)).abs().max() > 0.1  # the adapter has a say


def test_the_reading_rule_travels_with_both_forms(given: dict[str, str], reward: Path) -> None:
    metrics = Artifact(reward.parent).manifest["metrics"]
    rule = {"pooling": "last", "mean": metrics["score_mean"], "std": metrics["score_std"]}
    assert rule["std"] > 0.01
    whole, adapter = (json.loads((f / "config.json").read_text())[SCORE_KEYS] for f in (reward, reward / "adapter"))
    assert whole == rule
    assert adapter == {**rule, "base": model_digest(given["model"], "model")}


def test_an_adapter_belongs_to_the_model_that_it_was_trained_on_alone(given: dict[str, str], reward: Path) -> None:
    digest = model_digest(given["model"], "model")
    assert adapters.adapter_of(str(reward), digest) == reward / "adapter"
    assert adapters.adapter_of(str(reward), "another") is None
    assert adapters.adapter_of(given["reward_model"], digest) is None
    assert adapters.adapter_of("some/hub-id", digest) is None


def test_training_an_adapter_leaves_its_base_alone(given: dict[str, str], reward: Path) -> None:
    """What is merged differs from the base by the adapter's low-rank product and by nothing else."""
    base = AutoModelForCausalLM.from_pretrained(given["model"]).state_dict()
    whole = load_file(reward / "model.safetensors")
    weights = load_file(reward / "adapter" / "adapter_model.safetensors")
    for name, weight in whole.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in weights:
            learned = 4 / 2 * weights[f"{stem}.lora_B.weight"] @ weights[f"{stem}.lora_A.weight"]
            assert learned.abs().max() > 0
            assert torch.allclose(weight, base[name] + learned, atol=1e-6)
        elif name != "score.weight":
            assert torch.equal(weight, base[name]), name
