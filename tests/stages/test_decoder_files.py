"""Our own decoder in the hands of transformers, PEFT and the stages: saved, loaded, adapted, sampled from."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_world import LLAMA, PLACES, each_place, some_ids, tiny_config, tiny_decoder
from stages_world import sample
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf.data.collate import pad_left
from rlhf.stages import adapters, decoder
from rlhf.stages.models import PolicyModel, ScalarModel, load_policy, load_scalar, load_tokenizer, save_folder
from rlhf.stages.settings import LoraSettings

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
IDS, MASK = pad_left([some_ids()[0].tolist(), some_ids()[1, :5].tolist()], 0)


def greedy(model: Any, **options: Any) -> torch.Tensor:
    return model.generate(IDS, attention_mask=MASK.long(), max_new_tokens=8, do_sample=False, **options)


# --- files


@each_place
def test_a_saved_decoder_loads_and_generates_the_same(tmp_path: Path, norm_position: str, positions: str) -> None:
    model = tiny_decoder(norm_position=norm_position, positions=positions, bias=True, norm="layernorm")
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is decoder.DecoderForCausalLM
    for field in decoder.DecoderConfig.__annotations__:
        assert getattr(loaded.config, field) == getattr(model.config, field)
    expected = greedy(model)
    assert torch.equal(greedy(loaded), expected)
    assert torch.equal(greedy(loaded, use_cache=False), expected)
    assert torch.equal(greedy(loaded, cache_implementation="static"), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_ours_loads_without_a_question_or_a_warning(
    tmp_path: Path, tied: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tiny_decoder(tie_word_embeddings=tied).save_pretrained(tmp_path)
    assert (tmp_path / "decoder.py").read_bytes() == Path(decoder.__file__).read_bytes()
    assert json.loads((tmp_path / "config.json").read_text())["auto_map"] == {
        "AutoConfig": "decoder.DecoderConfig",
        "AutoModelForCausalLM": "decoder.DecoderForCausalLM",
    }
    monkeypatch.setattr("builtins.input", None)
    capfd.readouterr()
    for trust in (None, False, True):  # code in the folder or not, ours is taken
        model = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=trust)
        assert type(model) is decoder.DecoderForCausalLM
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert "[transformers]" not in "".join(capfd.readouterr())


@each_place
def test_it_loads_in_bfloat16(tmp_path: Path, norm_position: str, positions: str) -> None:
    model = tiny_decoder(norm_position=norm_position, positions=positions)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    logits = loaded(IDS, attention_mask=MASK.long()).logits
    assert logits.dtype == torch.bfloat16
    expected = model(IDS, attention_mask=MASK.long()).logits
    assert (logits.float() - expected)[MASK].abs().max() < 0.05 * expected.abs().max()


ELSEWHERE = """
import sys, warnings
warnings.simplefilter("error")
sys.modules["rlhf"] = None
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification
folder, ids = sys.argv[1], torch.tensor([[7, 8, 9]])
policy = AutoModelForCausalLM.from_pretrained(folder + "/policy", trust_remote_code=True)
assert type(policy).__module__.startswith("transformers_modules."), type(policy)
base = AutoModel.from_pretrained(folder + "/policy", trust_remote_code=True)
scorer = AutoModelForSequenceClassification.from_pretrained(folder + "/scorer", trust_remote_code=True)
with torch.no_grad():
    torch.save([policy(ids).logits, base(ids).last_hidden_state, scorer(ids).logits], folder + "/numbers")
del sys.modules["rlhf"]
import rlhf.stages.decoder  # from now on ours is taken
policy = AutoModelForCausalLM.from_pretrained(folder + "/policy", trust_remote_code=True)
assert type(policy) is rlhf.stages.decoder.DecoderForCausalLM, type(policy)
"""


def test_it_loads_where_our_package_is_not_installed(tmp_path: Path) -> None:
    policy = tiny_decoder()
    policy.save_pretrained(tmp_path / "policy")
    scorer = AutoModelForSequenceClassification.from_config(tiny_config(num_labels=1)).eval()
    scorer.save_pretrained(tmp_path / "scorer")
    subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path)],
        check=True, cwd=tmp_path, env=os.environ | {"HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    logits, hidden, scores = torch.load(tmp_path / "numbers")
    ids = torch.tensor([[7, 8, 9]])
    with torch.no_grad():
        assert torch.allclose(logits, policy(ids).logits, atol=1e-6)
        assert torch.allclose(hidden, policy.model(ids).last_hidden_state, atol=1e-6)
        assert torch.allclose(scores, scorer(ids).logits, atol=1e-6)


def test_all_auto_classes_know_it() -> None:
    config = tiny_config(num_labels=1)
    assert type(AutoModel.from_config(config)) is decoder.DecoderModel
    assert type(AutoModelForCausalLM.from_config(config)) is decoder.DecoderForCausalLM
    scorer = AutoModelForSequenceClassification.from_config(config)
    assert type(scorer) is decoder.DecoderForSequenceClassification
    assert isinstance(scorer.score, nn.Linear)
    assert scorer.score.weight.shape == (1, 16)
    assert scorer.score.bias is None


def test_a_saved_policy_passes_through_our_loaders(tmp_path: Path, tokenizer: Any) -> None:
    policy = tiny_decoder(vocab_size=260)
    save_folder(tmp_path / "policy", policy, tokenizer)
    tokens = load_tokenizer(str(tmp_path / "policy"))
    loaded = load_policy(str(tmp_path / "policy"), tokens)
    assert torch.equal(loaded(IDS).logits, policy(IDS).logits)
    scalar = load_scalar(str(tmp_path / "policy"), tokens, new_head=True)
    assert scalar.has_new_head
    save_folder(tmp_path / "reward", scalar, tokenizer)
    again = load_scalar(str(tmp_path / "reward"), tokens)
    assert torch.equal(again(IDS, MASK), scalar.eval()(IDS, MASK))


# --- in the stages


@pytest.mark.parametrize(("norm_position", "positions"), PLACES)
def test_scores_and_logprobs_do_not_depend_on_left_padding(norm_position: str, positions: str) -> None:
    model = tiny_decoder(norm_position=norm_position, positions=positions)
    policy, scalar = PolicyModel(model), ScalarModel(adapters.classifier_on(model)).eval()
    short = IDS[1:, 4:]
    policy.check_head(short)
    whole = torch.ones_like(short).bool()
    assert torch.allclose(policy(IDS, MASK, 3, 0.7)[0][1:], policy(short, whole, 3, 0.7)[0], atol=1e-5)
    assert torch.allclose(scalar(IDS, MASK)[1:, 4:], scalar(short, whole), atol=1e-5)


def test_sampling_with_a_cache_takes_the_likeliest_token_of_one_forward_pass() -> None:
    """Rows of other lengths, rows that end early and leave the batch: at temperature near 0 sampling is argmax."""
    prompts = [[7, 8, 9, 10, 11, 12], [20, 21], [30]]
    for norm_position, positions in PLACES:
        model = tiny_decoder(norm_position=norm_position, positions=positions, num_key_value_heads=4)
        stop = sample(model, prompts, 8, 1e-4, [], 0)[1, 2].item()
        stopped = sample(model, prompts, 8, 1e-4, [stop], 0)
        for row, prompt in enumerate(prompts):
            ids = list(prompt)
            for t in range(stopped.shape[1]):
                assert stopped[row, t].item() == model(torch.tensor([ids])).logits[0, -1].argmax().item()
                ids.append(stopped[row, t].item())
                if ids[-1] == stop:
                    break


def test_an_adapter_is_put_on_every_linear_layer_but_the_last_and_trains() -> None:
    model = adapters.shared_copy(tiny_decoder().requires_grad_(False))
    before = {name: p.clone() for name, p in model.named_parameters()}
    adapters.add_lora(model, LoraSettings(r=4, alpha=8))
    adapted = {name.split(".")[-2] for name, module in model.named_modules() if name.endswith(".base_layer")}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(60):
        loss = model(some_ids(), labels=some_ids(), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            assert torch.equal(parameter, before[name.replace(".base_layer", "")])


def test_a_classifier_shares_the_decoders_weights() -> None:
    base = tiny_decoder(**LLAMA)
    classifier = adapters.classifier_on(base)
    assert classifier.model.embed_tokens.weight is base.model.embed_tokens.weight
    hidden = classifier.model(IDS, use_cache=False).last_hidden_state
    assert torch.equal(hidden, base.model(IDS, use_cache=False).last_hidden_state)
    score = classifier(IDS[:1]).logits
    assert torch.allclose(score[0, 0], hidden[0, -1] @ classifier.score.weight[0], atol=1e-5)
