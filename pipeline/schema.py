"""`rlhf schema`: what a recipe may hold, as a JSON schema, by which an editor completes and checks it."""

import json
from typing import Any

from rlhf.pipeline.recipe import Recipe

TITLE = "A recipe of RLHF Toolkit"
INTERPOLATION = {"type": "string", "pattern": r"\$\{.+\}", "description": "The value of another setting: ${seed}."}


def recipe_schema() -> dict[str, Any]:
    """The schema of a recipe file, descriptions and defaults included; it says what `load_recipe` takes."""
    schema = Recipe.model_json_schema()
    schema |= {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": TITLE}
    for section in (schema, *schema["$defs"].values()):
        for name, setting in section.get("properties", {}).items():
            setting.pop("title", None)
            if "description" in setting:
                setting["description"] = " ".join(setting["description"].split())
            if not _takes_text(setting):
                section["properties"][name] = _or_interpolation(setting)
    schema["$defs"]["interpolation"] = INTERPOLATION
    return schema


def as_text() -> str:
    """The schema as JSON."""
    return json.dumps(recipe_schema(), indent=1)


def _takes_text(setting: dict[str, Any]) -> bool:
    """Whether any text will do already; a setting without a type takes all there is."""
    choices = setting.get("anyOf", [setting])
    known = any(word in choice for choice in choices for word in ("type", "$ref", "enum", "const"))
    return not known or any(choice.get("type") == "string" and "enum" not in choice for choice in choices)


def _or_interpolation(setting: dict[str, Any]) -> dict[str, Any]:
    about = {name: setting[name] for name in ("description", "default") if name in setting}
    rest = {name: value for name, value in setting.items() if name not in about}
    choices = rest["anyOf"] if set(rest) == {"anyOf"} else [rest]
    return about | {"anyOf": [*choices, {"$ref": "#/$defs/interpolation"}]}
