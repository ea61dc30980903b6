"""`rlhf init`: what the recipe that it writes says, what that follows from, and that nothing is written over."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from init_world import DEMONSTRATIONS, ONE_A_ROW, PROMPTS, RANKINGS, TEXT, recipe, sections
from pipeline_world import write_rows

from rlhf.data.errors import SettingsError
from rlhf.pipeline import init as init_module
from rlhf.pipeline.recipe import load_recipe
from rlhf.pipeline.start_models import START_MODELS

Call = Callable[..., tuple[int, str, str]]


def test_every_setting_that_it_writes_stands_below_what_it_means(here: Path, rlhf: Call) -> None:
    write_rows(here / "pairs.jsonl", RANKINGS)
    rlhf("init", "mine")
    lines = Path("mine.yaml").read_text().splitlines()
    settings = [number for number, line in enumerate(lines) if ": " in line and not line.lstrip().startswith("#")]
    assert len(settings) > 15
    assert all(lines[number - 1].lstrip().startswith("# ") for number in settings)
    assert lines[lines.index("  kl_coef: 0.05") - 1] == "  # Weight of the KL to the reference."


def test_without_raw_text_the_first_stage_starts_from_a_model_and_rankings_give_the_prompts(
    here: Path, rlhf: Call
) -> None:
    write_rows(here / "pairs.jsonl", RANKINGS)
    rlhf("init", "mine")
    found = recipe()
    assert found.stages == ["reward", "ppo"]
    assert found.reward is not None
    assert found.ppo is not None
    assert found.reward.model == found.ppo.model == START_MODELS[False]
    assert found.ppo.data.path == "pairs.jsonl"
    rlhf("init", "other", "pairs.jsonl", "--model", "owner/name")
    assert "model: owner/name" in Path("other.yaml").read_text()


def test_a_gpu_gives_larger_sizes_and_another_model(here: Path, rlhf: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init_module, "visible_gpus", lambda: 2)
    Path("story.txt").write_text(TEXT)
    write_rows(here / "demos.jsonl", DEMONSTRATIONS)
    rlhf("init", "mine")
    found = recipe()
    assert found.pretrain is not None
    assert (found.pretrain.hidden_size, found.pretrain.compile) == (768, True)
    rlhf("init", "other", "demos.jsonl")
    assert "model: Qwen/Qwen3-0.6B" in Path("other.yaml").read_text()


def test_nothing_is_written_over(here: Path, rlhf: Call) -> None:
    write_rows(here / "demos.jsonl", DEMONSTRATIONS)
    Path("mine.yaml").write_text("mine")
    Path("folder").mkdir()
    assert "mine.yaml: is there already" in rlhf("init", "mine")[2]
    assert "rlhf init my-run folder" in rlhf("init", "folder")[2]
    assert Path("mine.yaml").read_text() == "mine"


def test_a_folder_that_may_not_be_written_to_is_refused_before_anything_is_read(
    here: Path, rlhf: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(init_module, "sort_files", lambda *_: pytest.fail("it read the files"))
    monkeypatch.setattr(os, "access", lambda path, mode: path != here)
    code, _, err = rlhf("init", "mine")
    cure = "change its mode, or name another place"
    assert (code, err) == (2, f"error: mine.yaml: {here} cannot be written to; {cure}\n")


def test_a_recipe_that_cannot_be_put_in_its_place_is_named_by_its_own_name(
    here: Path, rlhf: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(source: Path, target: Path) -> None:
        raise PermissionError(13, "Permission denied", str(source))

    write_rows(here / "demos.jsonl", DEMONSTRATIONS)
    monkeypatch.setattr(os, "replace", denied)
    code, _, err = rlhf("init", "mine")
    assert (code, err.startswith("error: mine.yaml: Permission denied; ")) == (2, True)
    assert [path.name for path in here.iterdir()] == ["demos.jsonl"]


def test_nothing_lies_there_where_telling_of_it_fails(here: Path, rlhf: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(here / "demos.jsonl", DEMONSTRATIONS)

    def fails(*_: Any) -> Any:
        raise SettingsError("no such use")

    monkeypatch.setattr(init_module, "_uses", fails)
    assert rlhf("init", "mine") == (2, "", "error: no such use\n")
    assert os.listdir(here) == ["demos.jsonl"]


def test_unusable_rows_are_allowed_for_aloud(here: Path, rlhf: Call) -> None:
    write_rows(here / "demos.jsonl", [*DEMONSTRATIONS * 6, {"prompt": "unanswered"}])
    _, out, _ = rlhf("init", "mine")
    assert "25 rows, 1 of them unusable" in out
    assert (
        "warning: demos.jsonl: 1 of its 25 rows cannot be used, row 25: empty response: no column 'response' (columns "
        "found: prompt); with sft.max_dropped: 0.09 the run goes on without them; better mend them and take it out\n"
    ) in out
    assert sections()["sft"].max_dropped == pytest.approx(0.09)  # twice 1 of 25, rounded up


def test_lengths_follow_the_rows(here: Path, rlhf: Call) -> None:
    write_rows(here / "demos.jsonl", DEMONSTRATIONS)
    rlhf("init", "mine")
    long = [row | {"response": "many words " * 60} for row in DEMONSTRATIONS]
    write_rows(here / "long.jsonl", long)
    rlhf("init", "other", "long.jsonl")
    assert sections()["sft"].max_length == 64
    assert "max_length: 256" in Path("other.yaml").read_text()  # 660 characters, three to a token


@pytest.mark.parametrize(
    ("positions", "of_rows", "prompt", "new"),
    [
        (96, 64, 48, 48),  # half of them each
        (40, 40, 20, 20),
        (100, 64, 50, 50),
        (127, 64, 64, 63),
        (128, 64, 64, 64),  # as much as the rows want
        (4096, 64, 64, 64),
        (None, 64, 64, 64),  # as many as one likes, or it does not say
    ],
)
def test_no_length_exceeds_the_positions_of_the_model_that_it_starts_from(
    here: Path, rlhf: Call, positions: int | None, of_rows: int, prompt: int, new: int
) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps({"max_position_embeddings": positions}))
    write_rows(here / "demos.jsonl", DEMONSTRATIONS)
    write_rows(here / "pairs.jsonl", RANKINGS)
    rlhf("init", "mine", "demos.jsonl", "pairs.jsonl", "--model", "model")
    found = sections()
    assert (found["sft"].max_length, found["reward"].max_length) == (of_rows, of_rows)
    assert (found["ppo"].max_prompt_length, found["ppo"].max_new_tokens) == (prompt, new)


def test_the_positions_of_a_model_of_the_hub_are_known_where_its_config_is_in_the_cache(
    here: Path, rlhf: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("cached").mkdir()
    Path("cached/config.json").write_text('{"max_position_embeddings": 40}')

    def cached(reference: str, name: str) -> str | None:
        return str(here / "cached" / name) if reference == "owner/known" else None

    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", cached)
    write_rows(here / "demos.jsonl", DEMONSTRATIONS)
    rlhf("init", "mine", "demos.jsonl", "--model", "owner/known")
    assert sections()["sft"].max_length == 40
    rlhf("init", "other", "demos.jsonl", "--model", "owner/unknown")
    assert "max_length: 64" in Path("other.yaml").read_text()


def rates(name: str) -> dict[str, list[float]]:
    loaded = load_recipe(f"{name}.yaml")
    found = {stage: loaded.section(stage).model_dump() for stage in loaded.stages}
    return {stage: [f["learning_rate"], *filter(None, [f.get("critic_learning_rate")])] for stage, f in found.items()}


@pytest.mark.parametrize(
    ("config", "said", "expected"),
    [
        # 12 · 2 · 96² + 512 · 96 are 270,336 parameters: fewer than a million.
        (
            {"hidden_size": 96, "num_hidden_layers": 2, "vocab_size": 512},
            "about 0.27 million",
            {"sft": [1e-3], "reward": [1e-3], "ppo": [2e-4, 5e-4]},
        ),
        # 12 · 10 · 480² + 7,350 · 480 are 31 million, half way between a million and a billion: √(1e-3 · 2e-5) …
        (
            {"n_embd": 480, "n_layer": 10, "vocab_size": 7350},
            "about 31.2 million",
            {"sft": [1e-4], "reward": [1e-4], "ppo": [2e-5, 7e-5]},
        ),
        # 12 · 32 · 4096² + 32,000 · 4096 are 6.6 billion.
        (
            {"text_config": {"hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000}},
            "about 6570 million",
            {"sft": [2e-5], "reward": [9e-6], "ppo": [3e-6, 9e-6]},
        ),
        (
            {"hidden_size": "96"},
            "unknown here, taken for a billion",
            {"sft": [2e-5], "reward": [9e-6], "ppo": [3e-6, 9e-6]},
        ),
    ],
)
def test_learning_rates_follow_the_size_that_the_models_config_tells(
    here: Path, rlhf: Call, config: dict[str, Any], said: str, expected: dict[str, list[float]]
) -> None:
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(config))
    write_rows(here / "demos.jsonl", DEMONSTRATIONS)
    write_rows(here / "pairs.jsonl", RANKINGS)
    rlhf("init", "mine", "demos.jsonl", "pairs.jsonl", "--model", "model")
    assert rates("mine") == expected
    text = " ".join(Path("mine.yaml").read_text().replace("#", "").split())
    rule = (
        f"By the model's parameters ({said}): 0.001 up to a million, 2e-05 from a billion on, and between them evenly"
    )
    assert rule in text


def test_models_that_it_chooses_itself_have_rates_of_their_size(
    here: Path, rlhf: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    write_rows(here / "pairs.jsonl", RANKINGS)
    rlhf("init", "small")
    assert rates("small") == {"reward": [4e-5], "ppo": [1e-5, 3e-5]}  # of 135 million
    Path("story.txt").write_text(TEXT)
    write_rows(here / "demos.jsonl", DEMONSTRATIONS)
    rlhf("init", "scratch")
    assert rates("scratch") == {"pretrain": [3e-3], "sft": [1e-3], "reward": [1e-3], "ppo": [2e-4, 5e-4]}


def test_ppo_waits_for_a_reward_model_that_is_better_than_guessing(here: Path, rlhf: Call) -> None:
    write_rows(here / "pairs.jsonl", RANKINGS)
    rlhf("init", "mine")
    assert sections()["reward"].min_accuracy == pytest.approx(0.6)
    assert "Guessing gives 0.5." in Path("mine.yaml").read_text()


def test_the_schema_that_the_recipe_names_lies_beside_it(here: Path, rlhf: Call) -> None:
    write_rows(here / "demos.jsonl", DEMONSTRATIONS)
    rlhf("init", "mine")
    first = Path("mine.yaml").read_text().splitlines()[0]
    name = first.removeprefix("# yaml-language-server: $schema=")
    assert json.loads(Path(name).read_text())["title"] == "A recipe of RLHF Toolkit"


def test_odd_names_of_files_survive(here: Path, rlhf: Call) -> None:
    for name in ("a: b #1.jsonl", "${seed}.jsonl", "狐狸 'x'.jsonl"):
        write_rows(here / name, DEMONSTRATIONS)
        Path("mine.yaml").unlink(missing_ok=True)
        assert rlhf("init", "mine", name)[0] == 0
        assert sections()["sft"].data.path == name


def many(num: int) -> list[dict[str, str]]:
    return [{"prompt": f"What is {n}?", "response": f"It is {n}."} for n in range(num)]


@pytest.mark.parametrize(
    ("rows", "batch", "epochs"),
    [
        (60, 4, 5),  # 54 to train on are 14 steps of 4, so that 5 passes make 70
        (300, 8, 2),  # 270 are 34 of 8, and 2 passes 68
        (2000, 16, 2),  # 1800 are 113 of 16
        (10, 4, 10),  # 9 are 3 of 4, and more than 10 passes learn them by heart
    ],
)
def test_few_rows_are_gone_through_in_small_batches_until_there_are_enough_steps(
    here: Path, rlhf: Call, rows: int, batch: int, epochs: int
) -> None:
    Path("story.txt").write_text(TEXT)
    write_rows(here / "demos.jsonl", many(rows))
    rlhf("init", "mine")
    sft = sections()["sft"]
    assert (sft.global_batch_size, sft.num_epochs) == (batch, epochs)


def test_the_recipe_says_why_it_takes_so_many_steps(here: Path, rlhf: Call) -> None:
    Path("story.txt").write_text("To be or not to be. " * 500)
    write_rows(here / "demos.jsonl", many(60))
    write_rows(here / "pairs.jsonl", [{"prompt": r["prompt"], "chosen": "a", "rejected": "b"} for r in many(60)])
    write_rows(here / "asked.jsonl", PROMPTS)
    rlhf("init", "mine")
    text = " ".join(Path("mine.yaml").read_text().replace("#", "").split())
    assert "70 optimiser steps: 54 rows to train on, 4 a step, 5 times over." in text
    # 10,000 characters, of which 9,000 are trained on: 4,500 tokens, 40 times over, in steps of 16 blocks of 64.
    assert "So many, 16 blocks of 64 tokens each, go through the text some 16 times. num_steps: 70" in text
    assert "With 4 to train on, a prompt is answered up to 4 times in each. rollout_batch_size: 16" in text


def test_what_is_held_out_of_a_few_rows_is_warned_of(here: Path, rlhf: Call) -> None:
    write_rows(here / "few.jsonl", many(10))
    assert "warning: sft: of the 10 prompts of few.jsonl about 1 is held out" in rlhf("init", "mine", "few.jsonl")[1]
    write_rows(here / "few_test.jsonl", many(10))
    write_rows(here / "many.jsonl", many(100))
    assert "warning" not in rlhf("init", "own", "few.jsonl", "few_test.jsonl")[1]
    assert "warning" not in rlhf("init", "more", "many.jsonl")[1]
    pairs = [{"prompt": f"Say {n}.", "chosen": f"It is {n}.", "rejected": "No."} for n in range(500)]
    write_rows(here / "pairs.jsonl", pairs[:490])
    assert (
        "warning: reward and ppo: of the 490 prompts of pairs.jsonl about 49 are" in rlhf("init", "p", "pairs.jsonl")[1]
    )
    write_rows(here / "pairs.jsonl", pairs)
    assert "are held out" not in rlhf("init", "all", "pairs.jsonl")[1]


def test_a_table_of_one_answer_a_row_is_named_in_the_recipe(here: Path, rlhf: Call) -> None:
    Path("table.csv").write_text(ONE_A_ROW)
    write_rows(here / "pairs.jsonl", RANKINGS)
    told = "Here one answer a row, with its rank (1 is best) or its score (higher is better)."
    rlhf("init", "mine", "table.csv")
    assert told in " ".join(Path("mine.yaml").read_text().replace("#", "").split())
    rlhf("init", "other", "pairs.jsonl")
    assert told not in " ".join(Path("other.yaml").read_text().replace("#", "").split())
