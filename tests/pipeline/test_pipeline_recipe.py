"""Recipes: what is refused with which words, and what a value means."""

import re
from pathlib import Path

import pytest
from pipeline_world import write_recipe

from rlhf.data.errors import SettingsError
from rlhf.pipeline.recipe import Recipe, load_recipe, to_yaml


def load(*overrides: str) -> Recipe:
    return load_recipe("recipe.yaml", overrides)


def refusal(*overrides: str) -> str:
    with pytest.raises(SettingsError) as refused:
        load(*overrides)
    return str(refused.value)


def test_a_misspelt_setting_names_the_nearest_one(world: Path) -> None:
    assert refusal("ppo.kl_coeff=1") == "ppo: no setting 'kl_coeff'; did you mean 'kl_coef'?"
    assert refusal("seeed=1") == "recipe: no section or setting 'seeed'; did you mean 'seed'?"
    assert "did you mean 'reward'?" in refusal("rewards.data=x")


def test_a_value_where_a_section_belongs_is_told_without_names_of_classes(world: Path) -> None:
    assert refusal("sft.lora=3") == "sft.lora: input should be a valid dictionary (found 3)"


@pytest.mark.parametrize(("name", "value"), [("num_processes", "2"), ("accelerate_config", "ddp")])
def test_how_a_stage_is_launched_needs_its_section(world: Path, name: str, value: str) -> None:
    assert refusal(f"{name}={{sft: {value}, ppo: {value}}}", "sft=null") == (
        f"{name}.sft: has no effect without a section sft; add the section, or take this out"
    )
    assert load(f"{name}={{sft: {value}}}").stages == ["pretrain", "sft", "reward", "ppo"]
    assert load(f"{name}={value}", "sft=null").section("sft") is None


def test_all_mistakes_are_told_at_once(world: Path) -> None:
    message = refusal("ppo.kl_coeff=1", "sft.learning_rate=fast")
    assert "ppo: no setting 'kl_coeff'" in message
    assert "sft.learning_rate: input should be a valid number" in message


@pytest.mark.parametrize("written", ["1e-5", "'1e-5'", "0.00001", "1.0e-05"])
def test_a_learning_rate_may_be_written_as_people_do(world: Path, written: str) -> None:
    text = (world / "recipe.yaml").read_text().replace("learning_rate: 0.001", f"learning_rate: {written}")
    (world / "recipe.yaml").write_text(text)
    from_file = load().reward
    from_override = load(f"ppo.learning_rate={written}").ppo
    assert from_file is not None
    assert from_override is not None
    assert from_file.learning_rate == from_override.learning_rate == 1e-5


def test_overrides_are_typed_like_the_file(world: Path) -> None:
    recipe = load("sft.lora={r: 4}", "sft.lora.target_modules=[q, v]", "sft.lora.target_modules.1=k", "ppo=null")
    assert recipe.sft is not None
    assert recipe.sft.lora is not None
    assert (recipe.sft.lora.r, recipe.sft.lora.target_modules) == (4, ["q", "k"])
    assert recipe.stages == ["pretrain", "sft", "reward"]


def test_interpolation_reaches_other_settings(world: Path) -> None:
    recipe = load("seed=7", "ppo.learning_rate=${reward.learning_rate}", "ppo.seed=${seed}")
    assert recipe.ppo is not None
    assert (recipe.ppo.learning_rate, recipe.ppo.seed) == (0.001, 7)
    assert "ppo.seed: Interpolation key 'sed' not found" in refusal("ppo.seed=${sed}")


def test_an_override_must_be_key_and_value(world: Path) -> None:
    assert "'pretrain': not an override; write key=value" in refusal("pretrain")
    assert "sft.model is 'base', which has no parts" in refusal("sft.model=base", "sft.model.name=body")


def test_a_part_of_a_source_that_is_written_in_short_can_be_overridden(world: Path) -> None:
    sft = load("sft.data.column=body", "sft.data.map.prompt=question").sft
    assert sft is not None
    assert (sft.data.path, sft.data.column, sft.data.map) == ("demonstrations.jsonl", "body", {"prompt": "question"})


def test_a_section_takes_over_what_it_does_not_set(world: Path) -> None:
    recipe = load("seed=3", "eval_share=0.2", "judge=json:loads", "ppo.seed=5", "reward.judge=null")
    sections = [recipe.section(stage) for stage in recipe.stages]
    assert [s.seed for s in sections if s] == [3, 3, 3, 5]
    assert {s.eval_share for s in sections if s} == {0.2}
    assert recipe.ppo is not None
    assert recipe.reward is not None
    assert (recipe.ppo.judge, recipe.reward.judge) == ("json:loads", None)


def test_a_wrong_shared_value_is_told_once(world: Path) -> None:
    assert refusal("eval_share=2").count("eval_share") == 1


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sft.max_length=100", "sft.max_length: 100 exceeds pretrain.context_length, which is 64; lower it, or raise"),
        ("reward.max_length=100", "reward.max_length: 100 exceeds pretrain.context_length, which is 64; "),
        ("ppo.max_new_tokens=50", "ppo.max_prompt_length + ppo.max_new_tokens: 66 exceeds pretrain.context_length"),
        ("pretrain.context_length=32", "sft.max_length: 64 exceeds pretrain.context_length, which is 32"),
    ],
)
def test_lengths_must_fit_the_model_that_is_pretrained(world: Path, override: str, message: str) -> None:
    lengths = ["sft.max_length=64", "reward.max_length=64", "ppo.max_prompt_length=16", "ppo.max_new_tokens=48"]
    lengths = ["pretrain.context_length=64", *lengths]
    load(*lengths)
    assert message in refusal(*lengths, override)
    assert override.split("=")[0] in refusal(*lengths, override)


def test_sampled_answers_must_fit_too(world: Path) -> None:
    sampled = ["reward.num_sampled_answers=1", "reward.judge=json:loads", "reward.max_length=64"]
    assert "max_new_tokens 64 leaves no room" in refusal(*sampled, "reward.max_new_tokens=64")


def test_lengths_are_free_where_the_model_is_another(world: Path) -> None:
    load("sft.model=owner/name", "sft.max_length=4096", "ppo.max_new_tokens=4096")
    load("pretrain=null", "sft.max_length=4096")


def test_all_default_lengths_fit_together(world: Path) -> None:
    load()


def test_one_share_of_the_prompts_is_held_out_in_all_stages(world: Path) -> None:
    message = refusal("reward.eval_share=0.2", "ppo.eval_share=0.1")
    assert message.startswith("reward.eval_share: 0.2 differs from the recipe's 0.1")
    assert "set eval_share once, at the top" in message
    assert "ppo" not in message
    recipe = load("eval_share=0.2", "reward.eval_share=0.2", "pretrain.eval_share=0.01")  # documents are no prompts
    assert recipe.pretrain is not None
    assert recipe.pretrain.eval_share == 0.01


def test_a_missing_recipe_names_the_shipped_ones(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf.pipeline.recipe.shipped_recipes", lambda: {"demo": None, "shakespeare": None})
    with pytest.raises(SettingsError, match=r"demmo: no such recipe; did you mean 'demo'\? .*: demo, shakespeare"):
        load_recipe("demmo")
    (world / "folder").mkdir()
    with pytest.raises(SettingsError, match="folder: a folder, not a recipe"):
        load_recipe("folder")
    (world / "garden2.yaml").write_text("")
    for name in ("garden2", "garden", "garden2.yml"):  # what lies here counts, with an ending or without
        with pytest.raises(SettingsError, match=r"no such recipe; did you mean 'garden2\.yaml'\?"):
            load_recipe(name)
    (world / "folder" / "mine.yaml").write_text("")
    with pytest.raises(SettingsError, match=r"did you mean 'folder/mine\.yaml'\?"):
        load_recipe("folder/mine")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no stage to run; a recipe has at least one section"),
        ("- a\n- b\n", "not a recipe; it must be a mapping"),
        ("42", "recipe.yaml: not a recipe; it holds one value alone"),
        ("seed: " + "1" * 5000, "recipe.yaml: not valid YAML: Exceeds the limit"),
        ("a: " + "[" * 400 + "]" * 400, "recipe.yaml: nested too deeply for a recipe"),
        ("sft: {args: " + "{a: " * 70 + "1" + "}" * 71, "recipe.yaml: nested too deeply|no field 'a'"),
        ("sft: [1\n", "not valid YAML: line 2, column 1: "),
        ("seed: 1\nsft:\n\tdata: x\n", "recipe.yaml: not valid YAML: line 3 has a tab; YAML is set in with blanks"),
        ("seed: 1\nseed: 2\nsft: {data: x}\n", "found duplicate key seed"),
        ("sft:\n  data: ???\n", "sft.data: Missing mandatory value"),
        ("sft: 3\n", "sft: .* dictionary"),
        ("sft: {model: m}\n", "sft.data: not set"),
        ("sft: {data: x, learning_rate: -1}\n", "sft.learning_rate: .* greater than or equal to 0"),
    ],
)
def test_an_unusable_recipe_says_what_is_wrong(world: Path, text: str, message: str) -> None:
    (world / "recipe.yaml").write_text(text)
    assert re.search(message, refusal())


def test_the_resolved_recipe_loads_as_itself(world: Path) -> None:
    write_recipe(world, seed=2, judge="json:loads", ppo={"data": "prompts.jsonl", "model": "m", "judge": None})
    recipe = load("ppo.learning_rate=1e-5", "ppo.data={path: p.jsonl, options: {n: 3}}")
    (world / "again.yaml").write_text(to_yaml(recipe))
    assert load_recipe("again.yaml") == recipe
