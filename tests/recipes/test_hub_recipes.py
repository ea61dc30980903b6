"""The recipes whose models and data are on the hub: their columns are ones that are read, and they plan.

There is no hub here: rows as the data sets' pages show them stand in.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf.data.rows import load
from rlhf.data.sources import Source
from rlhf.pipeline.plan import make_plan
from rlhf.pipeline.recipe import Recipe, load_recipe

POST = "SUBREDDIT: r/tifu\n\nTITLE: TIFU by {what}\n\nPOST: I was late and {what}.\n\nTL;DR:"
ROWS: dict[str, list[dict[str, Any]]] = {
    "databricks/databricks-dolly-15k": [
        {"instruction": "Name a bird.", "context": "", "response": "A wren.", "category": "open_qa"},
        {"instruction": "What is red?", "context": "A kite is red.", "response": "A kite.", "category": "closed_qa"},
    ],
    "Anthropic/hh-rlhf": [
        {"chosen": f"\n\nHuman: Hi.\n\nAssistant: Hello.\n\nHuman: {question}\n\nAssistant: Gladly.",
         "rejected": f"\n\nHuman: Hi.\n\nAssistant: Hello.\n\nHuman: {question}\n\nAssistant: No."}
        for question in ("Can you help me?", "May I ask?")
    ],
    "trl-lib/tldr": [
        {"prompt": POST.format(what=what), "completion": f" I was {what}."} for what in ("falling asleep", "cooking")
    ],
    "trl-lib/tldr-preference": [
        {"prompt": POST.format(what=what), "chosen": f" I was {what}.", "rejected": " It was me."}
        for what in ("falling asleep", "cooking")
    ],
}  # fmt: skip
KINDS = {"sft": "demonstrations", "reward": "preferences", "ppo": "prompts"}


def sources(recipe: Recipe) -> dict[str, Source]:
    """Where each stage's rows are from."""
    found = {stage: recipe.section(stage) for stage in recipe.stages}
    return {stage: settings.sources()["data"] for stage, settings in found.items() if settings is not None}


@pytest.mark.parametrize("name", ["hh", "tldr"])
def test_every_row_of_the_hubs_data_sets_is_read_as_what_its_stage_wants(name: str, tmp_path: Path) -> None:
    for stage, source in sources(load_recipe(name)).items():
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in ROWS[source.path]))
        loaded = load(Source(path=str(path), split=source.split), KINDS[stage])
        assert len(loaded.rows) == 2
        assert not loaded.report.dropped


@pytest.mark.parametrize("name", ["hh", "tldr"])
def test_it_plans_without_the_hub(name: str, tmp_path: Path) -> None:
    recipe = load_recipe(name)
    steps = make_plan(recipe, tmp_path / "runs" / name)
    assert [step.stage for step in steps] == ["sft", "reward", "ppo"]
    assert {step.action for step in steps} == {"run"}
