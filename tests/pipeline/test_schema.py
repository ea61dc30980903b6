"""The JSON schema of recipes takes what a run takes, and refuses what it refuses."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlhf.pipeline.recipe import section_class, shipped_recipes
from rlhf.pipeline.schema import as_text
from rlhf.stages.artifact import STAGES
from rlhf.stages.settings import meaning, origin

SCHEMA = json.loads(as_text())
TYPES: dict[str, Any] = {
    "string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict,
    "null": type(None),
}  # fmt: skip


def problems(value: Any, schema: dict[str, Any], where: str = "") -> Iterator[str]:
    """What is wrong with a value, by the part of JSON schema that ours uses."""
    if "$ref" in schema:
        yield from problems(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], where)
    if "anyOf" in schema and all(list(problems(value, choice, where)) for choice in schema["anyOf"]):
        yield f"{where}: {value!r} is none of the choices"
    types = schema.get("type", [])
    names = [types] if isinstance(types, str) else types
    right = [name for name in names if isinstance(value, TYPES[name])]
    if names and (not right or (isinstance(value, bool) and "boolean" not in names)):
        yield f"{where}: {value!r} is no {names}"
        return
    if value not in schema.get("enum", [value]):
        yield f"{where}: {value!r} is not one of {schema['enum']}"
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{where}: {value!r} does not match"
    if value is not None and not isinstance(value, (str, list, dict)):
        limits = {"minimum": value.__ge__, "maximum": value.__le__}
        limits |= {"exclusiveMinimum": value.__gt__, "exclusiveMaximum": value.__lt__}
        yield from (f"{where}: {value} and {name}" for name, holds in limits.items() if name in schema
                    and not holds(type(value)(schema[name])))  # fmt: skip
    if isinstance(value, list):
        for item in value:
            yield from problems(item, schema.get("items", {}), where)
    if isinstance(value, dict):
        known = schema.get("properties", {})
        yield from (f"{where}: no {name}" for name in schema.get("required", []) if name not in value)
        for name, part in value.items():
            if name in known:
                yield from problems(part, known[name], f"{where}.{name}")
            elif schema.get("additionalProperties") is False:
                yield f"{where}: no setting {name}"


def of_file(text: str) -> list[str]:
    return list(problems(OmegaConf.to_container(OmegaConf.create(text)), SCHEMA))


@pytest.mark.parametrize("name", sorted(shipped_recipes()))
def test_shipped_recipes_are_right(name: str) -> None:
    text = shipped_recipes()[name].read_text(encoding="utf-8")
    assert of_file(text.replace("  # data:", "  data: input.txt #")) == []


def test_the_recipe_of_the_readme_is_right() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    found = re.search(r"```yaml\n(.*?)```", readme, re.DOTALL)
    assert found is not None
    assert of_file(found.group(1)) == []


@pytest.mark.parametrize(
    "text",
    [
        "pretrain: {data: a.txt, preset: llama, report_to: wandb}",
        "pretrain: {data: [{path: a.txt, weight: 1}, b.txt], preset: [gpt3-125m, llama], norm: rmsnorm}",
        "seed: 3\nsft: {data: {path: a.jsonl, map: {prompt: q}}, seed: '${seed}', lora: {target_modules: q_proj}}",
        "num_processes: {sft: 2}\naccelerate_config: ddp\nsft: {data: a.jsonl, report_to: []}",
        "ppo: {data: a.jsonl, rewards: [{function: 'a:b'}], ptx_data: '${sft.data}', ptx_coef: 1.0}",
    ],
)
def test_every_way_to_write_a_setting_is_right(text: str) -> None:
    assert of_file(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "sft: {data: a.jsonl, learning_rat: 1.0}",
        "sft: {data: a.jsonl, num_epochs: 0}",
        "sft: {data: a.jsonl, num_epochs: many}",
        "sft: {data: {path: a.jsonl, maps: {}}}",
        "pretrain: {data: a.txt, optimizer: sgd}",
        "ssft: {data: a.jsonl}",
    ],
)
def test_what_a_run_would_refuse_is_wrong(text: str) -> None:
    assert of_file(text) != []


def test_descriptions_are_those_of_the_settings() -> None:
    for stage in STAGES:
        cls = section_class(stage)
        settings = SCHEMA["$defs"][cls.__name__]["properties"]
        for name, field in cls.model_fields.items():
            if (stage, name) != ("ppo", "rollout"):  # whose class has the same description
                source = f" [{origin(field)}]" if origin(field) else ""
                assert settings[name]["description"] == meaning(field) + source
