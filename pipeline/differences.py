"""In what a stage differs from results that are there: why it is run anew, and whose rankings it does not take over."""

import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf.data.errors import RefusedError
from rlhf.pipeline.recipe import Recipe
from rlhf.pipeline.references import sealed
from rlhf.stages.artifact import Artifact, Identity, identify
from rlhf.stages.feedback.config import FeedbackSettings
from rlhf.stages.feedback.stores import left_behind
from rlhf.stages.settings_file import read_settings, settings_in

UPSTREAM = {
    ("sft", "model"): "pretrain",
    ("feedback", "model"): "sft",
    ("reward", "model"): "sft",
    ("reward", "data"): "feedback",
    ("ppo", "model"): "sft",
    ("ppo", "reward_model"): "reward",
}
"""Which stage fills in a model, or rankings, that the recipe leaves empty."""
SHOWN = 3  # differences; more are counted


def why_new(identity: Identity, run_dir: Path) -> str:
    """The difference to the nearest finished sibling."""
    others = [differences(identity, identity_of(artifact)) for artifact in sealed(identity.stage, run_dir)]
    if not others:
        return "not run yet"
    return in_short(min(others, key=len)) or "another attempt"


def unheard(settings: FeedbackSettings, identity: Identity | None, run_dir: Path, waiting: str) -> Iterator[str]:
    """A line for each store whose people's rankings a feedback step that is still to end will not have.

    Where the identity is not known yet, `waiting` says why.
    """
    folder = None if identity is None else run_dir / identity.folder_name
    for store, num, is_alike in left_behind(settings, run_dir, folder):
        if identity is None:
            why = waiting
        elif is_alike:
            why = "people went on there and here"
        else:
            try:
                then = identify(read_settings(store.parent, FeedbackSettings))
                why = (
                    f"{in_short(differences(identity, then)) or 'another attempt'}; changed back, it goes on with them"
                )
            except RefusedError:
                why = "its model or its prompts are gone"
        rankings = "ranking" if num == 1 else "rankings"
        export = shlex.join(["rlhf", "data", "export", str(store), "ranked.jsonl", "--as", "rankings"])
        yield f"{num} {rankings} in {store.parent.name} will not be taken over ({why}); to keep them: `{export}`"


def filled_in(recipe: Recipe, folder: Path) -> dict[str, str]:
    """The models and rankings that a run filled in for a stage whose recipe leaves them empty, from its folder."""
    stage, found = folder.name.partition("-")[0], {}
    section, settings = recipe.section(stage), settings_in(folder)
    for of, name in UPSTREAM:
        if of == stage and getattr(section, name) is None and (value := settings.get(name)) is not None:
            path = Path(value["path"] if isinstance(value, dict) else value)
            here = folder.parent.absolute()
            found[name] = str(folder.parent / path.relative_to(here) if path.is_relative_to(here) else path)
    return found


def in_short(found: list[str]) -> str:
    """Differences in a line."""
    return ", ".join(found[:SHOWN] + ([f"{len(found) - SHOWN} more changes"] if len(found) > SHOWN else []))


def identity_of(artifact: Artifact) -> Identity:
    """What a sealed folder was made from."""
    manifest = artifact.manifest
    return Identity(
        manifest["stage"], manifest["inputs"], manifest["data"], manifest["settings"], manifest.get("code", {})
    )


def differences(now: Identity, then: Identity) -> list[str]:
    """Settings that differ, with both values, inputs, data and functions."""
    stage = now.stage
    old, new = _flat(then.settings), _flat(now.settings)
    found = [
        f"{stage}.{name} {old.get(name)} → {new.get(name)}"
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name) and name != "attempt"
    ]
    for were, are in ((then.inputs, now.inputs), (then.data, now.data)):
        for name in sorted(were.keys() | are.keys()):
            if were.get(name) == are.get(name):
                continue
            was, function = then.code.get(name), now.code.get(name)
            if function is not None and was == function:
                found.append(f"the file of {function} changed")
            else:
                found.append(f"{stage}.{name} {f'{was} → {function}' if was and function else 'changed'}")
    return found


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = value
    return flat
