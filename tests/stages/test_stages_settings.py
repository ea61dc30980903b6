"""Settings refuse what they do not know and say what would work."""

import re
from typing import Any

import pytest

from rlhf.data.errors import SettingsError
from rlhf.stages.ppo.config import PPOSettings
from rlhf.stages.pretrain.config import PretrainSettings
from rlhf.stages.reward.config import RewardSettings
from rlhf.stages.sft.config import SFTSettings


def test_a_misspelt_key_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(SettingsError, match=r"ppo: no setting 'kl_coeff'; did you mean 'kl_coef'\?"):
        PPOSettings.load({"data": "prompts.jsonl", "kl_coeff": 0.1}, "ppo")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"banana": 1}, r"sft: no setting 'banana'; none of the \d+ there are has a name like it; `rlhf schema` and "
         r"docs/recipes\.md list them"),
        ({"args": {"banana": 1}}, r"sft\.args: trl\.SFTConfig has no field 'banana'; none of the \d+ there are has a "
         "name like it; TRL's page on SFTConfig lists them"),
        ({"lora": {"banana": 1}}, r"sft\.lora: no setting 'banana'; there are alpha, dropout, r, target_modules"),
    ],
)  # fmt: skip
def test_a_name_like_no_other_is_told_where_the_names_are_listed_unless_they_are_few(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError) as caught:
        SFTSettings.load({"data": "x.jsonl", **settings}, "sft")
    assert re.fullmatch(message, str(caught.value))


def test_every_problem_is_named_in_one_message() -> None:
    with pytest.raises(SettingsError) as caught:
        PPOSettings.load({"kl_coeff": 0.1, "learning_rate": -1, "temperature": "hot"}, "ppo")
    lines = str(caught.value).splitlines()
    assert len(lines) == 4
    assert any(line.startswith("ppo.data: not set") for line in lines)
    assert any(line.startswith("ppo.learning_rate:") and "-1" in line for line in lines)
    assert any(line.startswith("ppo.temperature:") and "hot" in line for line in lines)


def test_a_misspelt_key_inside_a_source_is_named_with_its_path() -> None:
    with pytest.raises(SettingsError, match=r"sft\.data: no setting 'splitt'; did you mean 'split'\?"):
        SFTSettings.load({"data": {"path": "x.jsonl", "splitt": "test"}}, "sft")


@pytest.mark.parametrize(("text", "message"), [
    (["a.txt", "b.txt"], r"takes one source, not a list of them; name one, such as \$\{pretrain\.data\.0\}"),
    ({"path": "a.txt", "weight": 2}, "takes one source, which has no weight; write its path alone"),
])  # fmt: skip
def test_what_pretrain_takes_and_ppo_does_not_is_refused_with_what_to_write(text: Any, message: str) -> None:
    with pytest.raises(SettingsError, match=rf"ppo\.ptx_data: {message}"):
        PPOSettings.load({"data": "x.jsonl", "ptx_coef": 0.1, "ptx_data": text}, "ppo")


def test_numbers_written_as_text_are_numbers() -> None:
    settings = SFTSettings.load({"data": "x.jsonl", "learning_rate": "1e-5", "global_batch_size": "2"}, "sft")
    assert settings.learning_rate == 0.00001
    assert settings.global_batch_size == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_learning_rate_that_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(SettingsError, match=r"sft\.learning_rate"):
        SFTSettings.load({"data": "x.jsonl", "learning_rate": value}, "sft")


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(SettingsError, match="hidden_size 30 must be an even multiple of num_heads 4"):
        PretrainSettings.load({"data": "x.txt", "hidden_size": 30, "num_heads": 4}, "pretrain")
    with pytest.raises(SettingsError, match="num_sampled_answers needs a judge"):
        RewardSettings.load({"data": "x.jsonl", "num_sampled_answers": 2}, "reward")
    with pytest.raises(SettingsError, match="rollout_batch_size 10 must be a multiple of num_minibatches 4"):
        PPOSettings.load({"data": "x.jsonl", "rollout_batch_size": 10, "num_minibatches": 4}, "ppo")


def test_fields_of_the_trainer_pass_through_and_unknown_ones_do_not() -> None:
    assert SFTSettings.load({"data": "x.jsonl", "args": {"neftune_noise_alpha": 5}}, "sft").args
    with pytest.raises(SettingsError, match="SFTConfig has no field 'neftune_noise'; did you mean"):
        SFTSettings.load({"data": "x.jsonl", "args": {"neftune_noise": 5}}, "sft")
    for name in ("learning_rate", "max_steps", "save_strategy", "remove_unused_columns"):
        with pytest.raises(SettingsError, match=f"'{name}' has a setting of its own"):
            SFTSettings.load({"data": "x.jsonl", "args": {name: 5}}, "sft")
    for name in ("push_to_hub", "eval_strategy", "deepspeed", "torch_compile_backend"):
        with pytest.raises(SettingsError, match=f"'{name}' is not for this stage, which evaluates, saves, compiles"):
            SFTSettings.load({"data": "x.jsonl", "args": {name: "x"}}, "sft")
    with pytest.raises(SettingsError, match=r"sft\.args: 'liger_kernel_config': leave fused_linear_cross_entropy out"):
        SFTSettings.load(
            {"data": "x.jsonl", "args": {"liger_kernel_config": {"fused_linear_cross_entropy": True}}}, "sft"
        )


@pytest.mark.parametrize("kind", [SFTSettings, RewardSettings, PPOSettings])
def test_tokens_of_a_pass_that_are_null_as_in_older_settings_are_the_default(kind: Any) -> None:
    assert kind.load({"data": "a.jsonl", "microbatch_tokens": None}, kind.stage).microbatch_tokens == 16384
