"""Scores and log-probabilities: read where they should be, whatever surrounds the row."""

import copy
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stages_world import tiny_policy
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rlhf.data.collate import pad_left, pad_right
from rlhf.data.errors import RefusedError, SettingsError
from rlhf.stages.adapters import add_lora
from rlhf.stages.models import (
    PolicyModel,
    check_hand_over,
    compile_layers,
    fresh_head,
    hand_over,
    load_policy,
    load_scalar,
    load_tokenizer,
    save_folder,
)
from rlhf.stages.packing import read, reads_packs
from rlhf.stages.ppo.layout import recompute_layers
from rlhf.stages.settings import LoraSettings


def test_logprobs_do_not_depend_on_left_padding_or_batch_mates(policy: Any) -> None:
    row, other = [7, 8, 9, 10, 11], [5] * 30
    alone, mask = pad_left([row], 0)
    together, together_mask = pad_left([row, other], 0)
    one, _, _ = PolicyModel(policy)(alone, mask, 3, temperature=0.7)
    two, _, _ = PolicyModel(policy)(together, together_mask, 3, temperature=0.7)
    assert torch.allclose(one[0], two[0], atol=1e-5)


def test_logprobs_are_those_of_the_tokens_at_the_sampling_temperature(policy: Any) -> None:
    ids = torch.tensor([[7, 8, 9, 10]])
    got, entropy, _ = PolicyModel(policy)(ids, torch.ones_like(ids).bool(), 2, temperature=0.5, with_entropy=True)
    logits = policy(ids).logits[0, 1:3] / 0.5  # positions 1 and 2 judge tokens 2 and 3
    expected = logits.log_softmax(-1)
    assert torch.allclose(got[0], expected[[0, 1], [9, 10]], atol=1e-5)
    assert torch.allclose(entropy[0], torch.distributions.Categorical(logits=logits).entropy(), atol=1e-5)


def test_under_autocast_a_model_in_float32_reads_as_one_in_bfloat16_does() -> None:
    """As policy and reference do: their states are of one type all the way."""
    policy = tiny_policy()
    frozen = copy.deepcopy(policy).to(torch.bfloat16)
    ids, mask = pad_left([[7, 8, 9, 10, 11, 12], [5, 6, 7]], 0)
    types: list[torch.dtype] = []
    policy.model.layers[1].register_forward_pre_hook(lambda _, inputs: types.append(inputs[0].dtype))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (PolicyModel(model)(ids, mask, 2, temperature=1.0)[0] for model in (policy, frozen))
    assert types == [torch.bfloat16]
    assert (ours - theirs).abs().mean() < 0.02


def padded_on_both_sides() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(ids, mask, which of the last four tokens are there) of prompts and answers as a rollout has them."""
    prompts, responses = [[7, 8, 9, 10, 11], [12], [13, 0, 14]], [[20, 21], [22, 23, 24, 25], [26]]
    (left, left_mask), (right, right_mask) = pad_left(prompts, 0), pad_right(responses, 0)
    return torch.cat([left, right], 1), torch.cat([left_mask, right_mask], 1), right_mask


@pytest.mark.parametrize(("shape", "recompute"), [("llama", False), ("llama", True), ("gpt2", False)])
def test_without_padding_a_policy_says_and_learns_the_same(shape: str, recompute: bool) -> None:
    ids, mask, counted = padded_on_both_sides()
    junk = ids.where(mask, 99)
    found = []
    for packed in (False, True):
        torch.manual_seed(3)
        model = tiny_policy(shape)
        reader = PolicyModel(model, fresh_head(16))
        reader.packed = packed and reads_packs(model, nullcontext())
        assert reader.packed == packed
        read: list[int] = []
        model.base_model.register_forward_pre_hook(
            lambda _, args, named, read=read: read.append(named["input_ids"].numel()), with_kwargs=True
        )
        if recompute:
            recompute_layers(model)
        numbers = reader(junk if packed else ids, mask, 4, 0.7, with_entropy=True)
        assert read == [9 + 7 - 1 if packed else 3 * 8]  # the last column is not needed
        numbers = [x.where(counted, 0.0) for x in numbers]
        sum(x.square().sum() for x in numbers).backward()
        found.append([*numbers, *(p.grad for p in reader.parameters())])
    for padded, without in zip(*found, strict=True):
        assert (without - padded).norm() <= 1e-5 * padded.norm()


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_without_padding_a_scorer_says_and_learns_the_same(policy_folder: Path, tokenizer: Any, pooling: str) -> None:
    ids, mask, counted = padded_on_both_sides()
    response = torch.zeros_like(mask)
    response[:, -4:] = counted
    found = []
    for packed in (False, True):
        scorer = new_scorer(policy_folder, tokenizer)
        scorer.pooling, scorer.mean, scorer.std = pooling, 0.5, 2.0
        scorer.packed = packed and reads_packs(scorer.classifier, nullcontext())
        assert scorer.packed == packed
        values, hidden = scorer(ids, mask, with_hidden=True)
        assert torch.equal(values, scorer(ids, mask))
        numbers = scorer.pool(values, response), values.where(mask, 0.0), hidden.where(mask[..., None], 0.0)
        sum(x.square().sum() for x in numbers).backward()
        found.append([*numbers, *(p.grad for p in scorer.parameters())])
    for padded, without in zip(*found, strict=True):
        assert (without - padded).norm() <= 1e-5 * padded.norm()


def test_a_value_head_reads_the_state_before_each_token_in_the_same_pass(policy: Any) -> None:
    head = fresh_head(16)
    rows = [[7, 8, 9, 10, 11], [5, 6, 7]]
    ids, mask = pad_left(rows, 0)
    with torch.no_grad():
        logprobs, _, values = PolicyModel(policy, head)(ids, mask, 2, temperature=0.7)
        plain, _, none = PolicyModel(policy)(ids, mask, 2, temperature=0.7)
        assert none is None
        assert values is not None
        assert torch.equal(logprobs, plain)
        for row, value in zip(rows, values, strict=True):
            hidden = policy.base_model(torch.tensor([row])).last_hidden_state[0]
            expected = hidden[-3:-1] @ head.weight[0]  # before the last two tokens
            assert torch.allclose(value, expected, atol=1e-5)
    assert abs(values[0, 0] - values[0, 1]) > 1e-3  # so that one place off would have shown


def test_a_fresh_head_is_in_full_precision_with_weights_of_one_over_root_d_plus_one() -> None:
    torch.manual_seed(0)
    with torch.device("cpu"):
        weight = fresh_head(9_999, bias=True).weight
    assert weight.dtype == torch.float32
    assert weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert fresh_head(4, bias=True).bias.tolist() == [0]
    assert fresh_head(4).bias is None


def new_scorer(policy_folder: Path, tokenizer: Any) -> Any:
    torch.manual_seed(1)
    return load_scalar(str(policy_folder), tokenizer, new_head=True).eval()


def score(scorer: Any, rows: list[list[int]], starts: list[int], left: bool = False) -> torch.Tensor:
    ids, mask = (pad_left if left else pad_right)(rows, 0)
    offset = torch.tensor([ids.shape[1] - len(r) if left else 0 for r in rows])
    response = mask & (torch.arange(ids.shape[1]) >= (torch.tensor(starts) + offset)[:, None])
    with torch.no_grad():
        return scorer.pool(scorer(ids, mask), response)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_score_is_the_same_alone_in_a_batch_and_padded_on_either_side(
    policy_folder: Path, tokenizer: Any, pooling: str
) -> None:
    scorer = new_scorer(policy_folder, tokenizer)
    scorer.pooling = pooling
    row, other = [7, 8, 9, 0], [5] * 20
    alone = score(scorer, [row], [2])[0]
    assert score(scorer, [row, other], [2, 3])[0].item() == pytest.approx(alone.item(), abs=1e-5)
    assert score(scorer, [row, other], [2, 3], left=True)[0].item() == pytest.approx(alone.item(), abs=1e-5)


def test_the_score_is_read_at_the_final_eos_even_where_pad_is_eos(policy_folder: Path, tokenizer: Any) -> None:
    scorer = new_scorer(policy_folder, tokenizer)
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 0
    with torch.no_grad():
        values = scorer(torch.tensor([[7, 8, 0]]), torch.ones(1, 3).bool())[0]
    assert score(scorer, [[7, 8, 0], [5] * 6], [1, 1])[0].item() == pytest.approx(values[2].item(), abs=1e-5)
    assert abs(values[2] - values[1]) > 1e-3  # so that reading one token early would have shown


def test_a_saved_scorer_gives_the_same_scores_and_loads_in_plain_transformers(
    policy_folder: Path, tokenizer: Any, tmp_path: Path
) -> None:
    scorer = new_scorer(policy_folder, tokenizer)
    scorer.pooling, scorer.mean, scorer.std = "mean", 0.5, 2.0
    save_folder(tmp_path / "reward", scorer, tokenizer)
    again = load_scalar(str(tmp_path / "reward"), load_tokenizer(str(tmp_path / "reward"))).eval()
    assert torch.equal(score(again, [[7, 8, 9]], [1]), score(scorer, [[7, 8, 9]], [1]))
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "reward")
    assert plain.config.num_labels == 1
    assert torch.equal(plain.score.weight, scorer.classifier.score.weight)


def test_the_normaliser_shifts_and_scales_scores(policy_folder: Path, tokenizer: Any) -> None:
    scorer = new_scorer(policy_folder, tokenizer)
    raw = score(scorer, [[7, 8, 9]], [1])
    scorer.mean, scorer.std = 0.5, 2.0
    assert torch.allclose(score(scorer, [[7, 8, 9]], [1]), (raw - 0.5) / 2)


def test_a_missing_score_head_is_an_error_and_not_a_random_head(policy_folder: Path, tokenizer: Any) -> None:
    with pytest.raises(RefusedError, match=r"lacks the weights \['score\.weight'\]"):
        load_scalar(str(policy_folder), tokenizer)


def test_missing_weights_of_a_policy_are_an_error(policy_folder: Path, tokenizer: Any) -> None:
    weights = load_file(policy_folder / "model.safetensors")
    del weights["model.layers.0.self_attn.q_proj.weight"]
    save_file(weights, policy_folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(RefusedError, match="lacks the weights"):
        load_policy(str(policy_folder), tokenizer)


def test_tied_embeddings_are_still_tied_after_saving(policy_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy_folder)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(model.lm_head.weight, tiny_policy().lm_head.weight)


def test_a_saved_folder_has_tokenizer_template_and_a_plain_generation_config(
    policy_folder: Path, tokenizer: Any
) -> None:
    again = load_tokenizer(str(policy_folder))
    assert again.chat_template == tokenizer.chat_template
    generation = AutoModelForCausalLM.from_pretrained(policy_folder).generation_config
    assert (generation.eos_token_id, generation.top_k, generation.do_sample) == (0, None, True)


def test_two_models_with_different_tokenizers_are_refused_with_both_values(tokenizer: Any) -> None:
    ours = hand_over(tokenizer, tiny_policy())
    check_hand_over(ours, dict(ours), "ppo.model", "ppo.reward_model")
    with pytest.raises(SettingsError, match=r"ppo\.model and ppo\.reward_model differ in vocab_size: 260 and 300"):
        check_hand_over(ours, {**ours, "vocab_size": 300}, "ppo.model", "ppo.reward_model")


def test_a_folder_without_a_model_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(RefusedError, match="no causal language model in"):
        load_policy(str(tmp_path), tokenizer)


def test_a_tokenizer_that_is_not_there_is_not_made_up(tmp_path: Path) -> None:
    tiny_policy("gpt2").save_pretrained(tmp_path)  # transformers would give an empty one of this kind
    with pytest.raises(RefusedError, match=r"no tokenizer in .*files are missing"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("kind", ["gpt2", "llama"])  # an empty one is made up, or the error of transformers is a list
def test_a_model_without_a_tokenizer_is_refused_with_what_to_do(kind: str, tmp_path: Path) -> None:
    tiny_policy(kind).save_pretrained(tmp_path)
    with pytest.raises(RefusedError) as refused:
        load_tokenizer(str(tmp_path))
    assert str(refused.value).startswith(f"no tokenizer in '{tmp_path}': ")
    assert str(refused.value).endswith(
        "; put the tokenizer's files beside the model, as its save_pretrained writes them (tokenizer.json and others)"
    )
    assert ":;" not in str(refused.value).replace(" ", "")


@pytest.mark.parametrize("cap", [None, 5.0])
def test_logprobs_in_chunks_have_the_same_values_and_gradients(
    monkeypatch: pytest.MonkeyPatch, cap: float | None
) -> None:
    gradients = []
    for numbers in (2**27, 260 * 3):  # all at once; three tokens at a time
        monkeypatch.setattr("rlhf.stages.models.LOGITS_AT_ONCE", numbers)
        reader = PolicyModel(tiny_policy())
        reader.softcap = cap
        ids = torch.arange(7, 21).view(2, 7)
        logprobs, _, _ = reader(ids, torch.ones_like(ids).bool(), 5, 0.7)
        logprobs.square().sum().backward()
        gradients.append([logprobs.detach(), *(p.grad for p in reader.parameters())])
    for one, other in zip(*gradients, strict=True):
        assert (one - other).norm() <= 1e-5 * one.norm()


def test_a_model_that_changes_its_logits_in_an_unknown_way_is_refused() -> None:
    reader = PolicyModel(tiny_policy())
    ids = torch.arange(7, 14)[None]
    reader.check_head(ids)
    reader.scale = 1.5  # as if the model did something that we do not know of
    with pytest.raises(RefusedError, match="does not take its logits straight from its last hidden state"):
        reader.check_head(ids)


@pytest.mark.parametrize("ends", ['"<|end|>"', '[0, "5"]', "[[3]]", "3.5"])
def test_ends_of_answers_that_are_no_ids_are_refused_when_the_model_is_loaded(
    policy_folder: Path, tokenizer: Any, ends: str
) -> None:
    (policy_folder / "generation_config.json").write_text(f'{{"eos_token_id": {ends}}}')
    with pytest.raises(
        RefusedError, match=r"policy': eos_token_id in its generation_config\.json is .*; it needs the id"
    ):
        load_policy(str(policy_folder), tokenizer)


def test_a_tokenizer_larger_than_the_embedding_is_refused_with_both_sizes(policy_folder: Path, tokenizer: Any) -> None:
    larger = copy.deepcopy(tokenizer)
    larger.add_tokens(["<new>"])
    with pytest.raises(RefusedError, match="the tokenizer has 261 tokens, the model 260 embeddings"):
        load_policy(str(policy_folder), larger)


# --- compiled layers


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_layer_is_given_no_numbers_that_stay_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """An epsilon or an adapter's scale would be a tensor on the CPU, made anew in every call, with code of its own."""
    given: list[Any] = []

    def backend(graph: Any, inputs: list[Any]) -> Any:
        given.append(inputs)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    model = tiny_policy("llama")
    add_lora(model, LoraSettings(r=2))
    compile_layers(model)
    for length in (5, 6):
        read(model, torch.ones(2, length, dtype=torch.long))
    assert len(given) == 1  # of all layers, the first one too, whose input is of frozen embeddings
    for inputs in given:
        assert torch.float64 not in {getattr(x, "dtype", None) for x in inputs}
        assert not any(isinstance(x, float | torch.SymFloat) for x in inputs)
