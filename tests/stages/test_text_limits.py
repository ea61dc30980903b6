"""How long the texts of a model may be: those that are read, and those that are sampled."""

from pathlib import Path
from typing import Any

import pytest
import torch
from ppo_world import model_folders
from stages_world import run_stage, tiny_policy
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf.data.errors import RefusedError, SettingsError
from rlhf.stages.engines.choice import make_engine
from rlhf.stages.models import PolicyModel, save_folder
from rlhf.stages.text_limits import check_positions, check_sampled


def test_more_tokens_than_the_model_has_positions_are_refused() -> None:
    check_positions("sft.max_length", 64, tiny_policy())
    with pytest.raises(SettingsError, match=r"sft\.max_length is 65, but the model has 64 positions"):
        check_positions("sft.max_length", 65, tiny_policy())


def rotated(**rope: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=48, initializer_range=0.5, rope_parameters={"rope_theta": 100.0, **rope},
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 16,
            "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}  # fmt: skip


@pytest.mark.parametrize("engine", ["static", "transformers"])
def test_a_text_that_is_sampled_stays_within_the_length_that_turns_all_of_it_otherwise(engine: Any) -> None:
    """Up to there, any engine samples from the law that the whole text is read with; beyond, none does."""
    model, prompt, where = rotated(**LONGROPE), [5, 6, 7, 8], "ppo.max_prompt_length + ppo.max_new_tokens"

    def gap(length: int) -> float:
        found = make_engine(model, engine).generate([prompt] * 20, length - len(prompt), 1.0, [], 0)
        ids = torch.cat([torch.tensor([prompt] * 20), found.tokens], 1)
        logprobs, _, _ = PolicyModel(model)(ids, torch.ones_like(ids).bool(), length - len(prompt), 1.0)
        return (found.logprobs - logprobs).abs().max().item()

    check_sampled(where, 16, model)
    assert gap(16) < 1e-4
    assert gap(18) > 0.1  # the last token is sampled, not read
    with pytest.raises(SettingsError, match=r"max_new_tokens is 17, but beyond .* 16, .*longrope.*; lower it to 16"):
        check_sampled(where, 17, model)
    check_positions("sft.max_length", 17, model)  # what is never sampled is read as one text


def test_ppo_refuses_a_text_that_could_become_longer_than_that(tmp_path: Path, tokenizer: Any) -> None:
    folders = model_folders(tmp_path, tokenizer)
    save_folder(tmp_path / "policy", rotated(**LONGROPE), tokenizer)
    lengths = {"max_prompt_length": 12, "max_new_tokens": 5}
    with pytest.raises(SettingsError, match=r"^ppo\.max_prompt_length \+ ppo\.max_new_tokens is 17, .*longrope"):
        run_stage("ppo", tmp_path / "ppo", **folders, **lengths, judge=None)


def test_a_text_that_is_sampled_fits_each_type_of_layer() -> None:
    model = rotated()
    model.config.rope_parameters = {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default"}}
    with pytest.raises(SettingsError, match="longrope"):
        check_sampled("ppo", 17, model)


def test_other_rotations_may_be_sampled_for_as_long_as_there_are_positions() -> None:
    for rope in ({"rope_type": "dynamic", "factor": 2.0}, {"rope_type": "default"}):
        check_sampled("ppo", 48, rotated(**rope))
        with pytest.raises(SettingsError, match="ppo is 49, but the model has 48 positions"):
            check_sampled("ppo", 49, rotated(**rope))
    check_sampled("ppo", 64, tiny_policy("gpt2"))  # which rotates nothing


def test_a_model_whose_tokens_see_later_ones_is_not_sampled() -> None:
    model = rotated()
    model.config.use_bidirectional_attention = True
    with pytest.raises(RefusedError, match="tokens see later ones"):
        check_sampled("ppo", 8, model)
