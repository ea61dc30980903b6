"""What PPO needs less memory with: recomputed layers, offloaded models, a quantised base; and where each is refused."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts_world import ADAPTERS, IDS, LAYOUTS, MASK, logprobs, one_iteration, places, rows
from ppo_world import EOS, flat, lora_reward, model_folders, run_ppo, settings
from stages_world import sample, tiny_policy
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

from rlhf.data.errors import RefusedError, SettingsError
from rlhf.stages import adapters
from rlhf.stages.engines.static import StaticEngine
from rlhf.stages.models import PolicyModel, save_folder
from rlhf.stages.ppo import config as config_module
from rlhf.stages.ppo import layout as layout_module
from rlhf.stages.ppo import rollout as rollout_module
from rlhf.stages.ppo.layout import load_roles, recompute_layers
from rlhf.stages.runtime import Runtime

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
Given = dict[str, str]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Given:
    return model_folders(tmp_path_factory.mktemp("models"), tokenizer)


@pytest.fixture
def new_run(given: Given, tmp_path: Path) -> Iterator[Callable[..., Runtime]]:
    runs: list[Runtime] = []

    def make(inputs: Given = given, **fields: Any) -> Runtime:
        (folder := tmp_path / f"run{len(runs)}").mkdir()
        runs.append(Runtime(settings(**{**inputs, **fields}), folder))
        return runs[-1]

    yield make
    for run in runs:
        run.close()


NewRun = Callable[..., Runtime]


# --- gradient checkpointing


def opt(dropout: float) -> Any:
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=260, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2, dropout=dropout,
        max_position_embeddings=64, word_embed_proj_dim=16, pad_token_id=0, eos_token_id=0, bos_token_id=0,
    )  # fmt: skip
    return OPTForCausalLM(config).eval()


SHAPES: dict[str, Callable[[], Any]] = {
    "llama": lambda: tiny_policy("llama", dropout=0.3),
    "gpt2": lambda: tiny_policy("gpt2", dropout=0.3),
    "opt": lambda: opt(0.3),  # whose layers themselves drop out
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lora", [False, True])
def test_recomputed_layers_give_the_same_log_probabilities_and_gradients(shape: str, lora: bool) -> None:
    found = []
    for recompute in (False, True):
        model = SHAPES[shape]()
        if lora:
            torch.manual_seed(1)
            adapters.add_lora(model, settings(**ADAPTERS).lora)
        calls: list[torch.nn.Module] = []
        if recompute:
            recompute_layers(model)
        for module in model.modules():
            if "norm" in type(module).__name__.lower():
                module.register_forward_hook(lambda module, *_, calls=calls: calls.append(module))
        logprobs, _, _ = PolicyModel(model)(IDS, MASK, 6, 0.7)
        forward = len(calls)
        logprobs.square().sum().backward()
        # In the layers there are two norms each; the one after the last layer is not of any.
        assert (forward, len(calls) - forward) == (5, 4 if recompute else 0)
        found.append([logprobs.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_rollout_of_recomputed_layers_uses_the_cache_and_draws_the_same(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("warning", "warning_once"):
        monkeypatch.setattr(f"transformers.modeling_layers.logger.{name}", pytest.fail)
    model = SHAPES[shape]()
    torch.manual_seed(1)
    plain = sample(model, [[7, 8, 9], [10]], 6, 0.7, [], EOS)
    recompute_layers(model)
    widths: list[int] = []
    model.get_input_embeddings().register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].shape[1]))
    torch.manual_seed(1)
    assert torch.equal(sample(model, [[7, 8, 9], [10]], 6, 0.7, [], EOS), plain)
    assert widths == [3, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_whole_run_with_recomputed_layers_is_the_run_without(
    given: Given, tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Counter[bool]()
    checkpoint = layout_module.checkpoint

    def watch(forward: Any, *arguments: Any, **options: Any) -> Any:
        calls[torch.is_grad_enabled()] += 1
        return checkpoint(forward, *arguments, **options)

    monkeypatch.setattr(layout_module, "checkpoint", watch)
    for recompute in (False, True):
        run_ppo(tmp_path / str(recompute), given, gradient_checkpointing=recompute, num_iterations=2, **LAYOUTS[layout])
        # Two layers of policy and critic in two iterations of two epochs of two minibatches.
        assert calls[True] == (0 if not recompute else 16 if layout == "shared_trunk" else 32)
    for ours, theirs in zip(rows(tmp_path / "True"), rows(tmp_path / "False"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


# --- offload


def test_reference_and_rewards_are_on_the_device_only_while_they_score(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    to, sampled, judge = torch.nn.Module.to, StaticEngine.generate, rollout_module.read_part

    def move(self: torch.nn.Module, *where: Any, **more: Any) -> Any:
        if type(self).__name__ in ("PolicyModel", "Rewards", "ScalarModel"):
            events.append(f"{type(self).__name__} to {'host' if where == ('cpu',) else 'device'}")
        return to(self, *where, **more)

    monkeypatch.setattr(torch.nn.Module, "to", move)
    monkeypatch.setattr(StaticEngine, "generate", lambda *more: (events.append("sample"), sampled(*more))[1])
    monkeypatch.setattr(rollout_module, "read_part", lambda *more: (events.append("judge"), judge(*more))[1])
    run_ppo(tmp_path / "ppo", given, offload=True, num_iterations=1, eval_every=1)
    # `separate`: policy and critic go to the device once and for all, reference and rewards wait after a trial there.
    there, back = ["PolicyModel to device", "Rewards to device"], ["PolicyModel to host", "Rewards to host"]
    first = [f"{model} to device" for model in ("PolicyModel", "PolicyModel", "ScalarModel", "ScalarModel")]
    assert events[:6] == [*first, *back]
    scored = events[events.index("sample") :]  # before it accelerate prepares policy and critic
    once = ["sample", *there, "judge", *back]
    assert scored == once * 3  # SFT's answers, a rollout, an evaluation


def test_offload_changes_no_result(given: Given, tmp_path: Path) -> None:
    for offload in (False, True):
        run_ppo(tmp_path / str(offload), given, offload=offload, num_iterations=2)
    assert rows(tmp_path / "True") == rows(tmp_path / "False")


# --- settings


@pytest.mark.parametrize(("fields", "message"), [
    ({"lora": {"r": 4}}, "lora has no effect with layout: separate; leave it out, or set layout: adapters"),
    ({"lora": {"r": 4}, "layout": "shared_trunk"}, "lora has no effect with layout: shared_trunk"),
    ({"quantization": "4bit"}, "quantization has no effect with layout: separate"),
    ({"value_coef": 0.2}, "value_coef has no effect with layout: separate; .* set layout: shared_trunk"),
    ({"value_coef": 0.2, "layout": "adapters"}, "value_coef has no effect with layout: adapters"),
    ({"kl_horizon": 99}, "kl_horizon has no effect without kl_target; leave it out, or set kl_target"),
    ({"missing_eos": "subtract"}, "missing_eos has no effect without missing_eos_penalty"),
    ({"ensemble_penalty": 2.0, "ensemble": "mean"}, "ensemble_penalty has no effect with ensemble: mean"),
    ({"kl_target": 6.0, "kl_coef": 0.0}, "kl_target steers by multiplying kl_coef, and kl_coef is 0"),
    ({"critic_warmup_iterations": 1, "layout": "shared_trunk"}, "critic_warmup_iterations needs a critic of its own"),
    ({"offload": True, "layout": "adapters"}, "offload is not possible in layout adapters"),
    ({"lora": {"dropout": 0.1}, "layout": "adapters"}, r"lora\.dropout must be 0"),
    ({"weights": "bf16", "layout": "adapters"}, "weights: bf16 is for layouts separate and shared_trunk"),
    ({"weights": "bf16", "precision": "fp32"}, "weights: bf16 .* needs precision bf16 or auto"),
    ({"rollout": {"engine": "vllm"}}, r"ppo\.rollout: engine vllm needs server_url"),
    ({"rollout": {"server_url": "http://x:1"}}, "server_url has no effect with engine auto; .* set engine: vllm"),
    ({"rollout": {"engine": "static", "timeout": 9}}, "timeout has no effect with engine static"),
    ({"rollout": {"importance_cap": None}}, "importance_cap has no effect with engine auto"),
    ({"rollout": {"weights_folder": "/shared"}}, "weights_folder has no effect with engine auto"),
    ({"rollout": {"engine": "vllm", "server_url": "http://x:1"}, "generation_batch_size": 8},
     "generation_batch_size has no effect with rollout.engine vllm"),
    ({"rollout": {"engine": "hf"}}, r"ppo\.rollout\.engine"),
])  # fmt: skip
def test_what_has_no_effect_or_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        settings(**fields)


def test_how_memory_is_saved_is_not_part_of_the_result(given: Given) -> None:
    plain = settings(**given).result_settings()
    saving: dict[str, Any] = {"offload": True, "gradient_checkpointing": True, "compile": True}
    saving |= {"microbatch_tokens": 100, "packing": True}
    assert settings(**given, **saving).result_settings() == plain
    assert settings(**given, rollout={"engine": "transformers"}).result_settings() == plain
    served = {"engine": "vllm", "server_url": "http://x:1"}
    assert settings(**given, rollout=served).result_settings() != plain
    moved = served | {"server_url": "http://y:2", "timeout": 9, "weights_folder": "/shared"}
    assert settings(**given, rollout=moved).result_settings() == settings(**given, rollout=served).result_settings()
    assert settings(**given, layout="shared_trunk").result_settings() != plain


# --- a quantised base


def test_quantisation_without_bitsandbytes_is_refused_with_the_extra_that_brings_it(
    given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_module, "find_spec", lambda _: None)
    with pytest.raises(RefusedError, match=r"ppo\.quantization: 4bit needs .* `pip install rlhf-toolkit\[quantiz"):
        run_ppo(tmp_path / "ppo", given, quantization="4bit", **ADAPTERS)
    assert not (tmp_path / "ppo" / "metrics.jsonl").exists()


@pytest.fixture
def wide(tmp_path: Path, tokenizer: Any, given: Given) -> Given:
    """A policy whose layers have sizes that can be quantised."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.2, bos_token_id=None,
        eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    save_folder(tmp_path / "wide", LlamaForCausalLM(config), tokenizer)
    return {**given, "model": str(tmp_path / "wide")}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_a_quantised_base_is_shared_and_both_adapters_learn_on_it(
    wide: Given, new_run: NewRun, tokenizer: Any, bits: str
) -> None:
    pytest.importorskip("bitsandbytes")
    run = new_run(lora_reward_of(wide), quantization=bits, **ADAPTERS)
    roles = load_roles(run, tokenizer)
    assert roles.critic is not None
    layers = [dict(tree.named_modules()) for tree in (roles.reference, roles.policy, roles.critic, roles.rewards)]
    kinds = Counter(str(p.dtype) for p in roles.reference.parameters())
    assert kinds == {"torch.int8" if bits == "8bit" else "torch.uint8": 14, "torch.float32": 6}
    assert places(roles.policy) == places(roles.reference)
    assert places(roles.critic) | places(roles.rewards) <= places(roles.reference)
    states = {
        id(getattr(module, "quant_state" if bits == "4bit" else "state"))
        for tree in layers
        for name, module in tree.items()
        if type(module).__module__ == "bitsandbytes.nn.modules" and name.endswith(("q_proj", "q_proj.base_layer"))
    }
    assert len(states) == 2  # one a layer, in four trees
    before = logprobs(roles.reference.model)
    assert torch.equal(logprobs(roles.policy.model), before)
    with torch.no_grad():
        alone, _, _ = roles.policy(IDS[:1], MASK[:1], 6, 0.7)
    torch.testing.assert_close(alone, before[:1], rtol=0, atol=1e-5)  # whatever the other rows are
    starts = flat(roles.policy), flat(roles.critic)
    one_iteration(run, roles)
    assert torch.equal(logprobs(roles.reference.model), before)
    assert all(not torch.equal(flat(m), start) for m, start in zip((roles.policy, roles.critic), starts, strict=True))


def lora_reward_of(given: Given) -> Given:
    folder = Path(given["model"]).parent / "reward"
    return {**given, "reward_model": lora_reward(folder, given["model"])}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_gradients_pass_through_a_base_of_four_bits(wide: Given, new_run: NewRun, tokenizer: Any) -> None:
    """Also in eval mode and after a pass without gradients, for which bitsandbytes repacks weights on some CPUs."""
    pytest.importorskip("bitsandbytes")
    reader = load_roles(new_run(wide, quantization="4bit", **ADAPTERS), tokenizer).policy
    torch.manual_seed(1)
    for name, parameter in reader.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    logprobs(reader.model)
    reader(IDS, MASK, 6, 0.7)[0].sum().backward()
    first = next(p for name, p in reader.named_parameters() if "lora_A" in name)
    assert first.grad is not None
    along = 1e-2 * first.grad / first.grad.norm()
    sums = []
    for sign in (1, -2):
        with torch.no_grad():
            first.add_(sign * along)
            sums.append(reader(IDS, MASK, 6, 0.7)[0].double().sum().item())
    assert (sums[0] - sums[1]) / 2e-2 == pytest.approx(first.grad.norm().item(), rel=1e-2)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("bits", ["8bit", "4bit"])
def test_a_run_on_a_quantised_base_leaves_a_whole_model(wide: Given, tmp_path: Path, bits: str) -> None:
    pytest.importorskip("bitsandbytes")
    metrics = run_ppo(tmp_path / "ppo", wide, quantization=bits, num_iterations=2, **ADAPTERS)
    assert rows(tmp_path / "ppo")[0]["kl"] == 0
    assert metrics["kl"] != 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ppo" / "model")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert "quantization_config" not in json.loads((tmp_path / "ppo" / "model" / "config.json").read_text())
