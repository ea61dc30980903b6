"""`rlhf init`: which stages can run from the files that are there, and a recipe for them."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhf.data.errors import SettingsError
from rlhf.data.files import folder_files, suffixes
from rlhf.data.recognise import Recognised, recognise
from rlhf.pipeline.launch import visible_gpus
from rlhf.pipeline.recipe import load_recipe
from rlhf.pipeline.recipe_text import Chosen, recipe_text
from rlhf.pipeline.schema import as_text
from rlhf.stages.artifact import STAGES
from rlhf.stages.disk import replace_text

SCHEMA = ".rlhf.schema.json"
"""What a recipe that was written here is completed and checked by in an editor; it lies beside it."""
START_MODELS = {True: "Qwen/Qwen3-0.6B", False: "HuggingFaceTB/SmolLM2-135M"}
"""What the first stage starts from where there is no raw text, with a GPU and without."""
KIND_OF = {"pretrain": "text", "sft": "demonstrations", "reward": "preferences", "ppo": "prompts"}
_HELD_OUT = re.compile(r"(?:^|[._-])(?:test|eval|valid|validation|dev|held[_-]?out)(?:[._-]|$)", re.IGNORECASE)
_NO_DATA = re.compile(r"readme|license|licence|requirements|constraints|changelog|notice", re.IGNORECASE)
_FEWEST_CHARACTERS = 1000  # of raw text, for a few short blocks and one that is held out


@dataclass
class Files:
    """What was found in the files."""

    train: dict[str, list[tuple[str, Recognised]]] = field(default_factory=dict)
    """By kind."""
    held_out: dict[str, tuple[str, Recognised]] = field(default_factory=dict)
    """By kind, those whose name says that they are for evaluation."""
    left: dict[str, str] = field(default_factory=dict)
    """Files that nothing is done with, each with why and the cure."""


@dataclass(frozen=True)
class Written:
    """What `init` did."""

    recipe: Path
    stages: list[str]
    files: list[tuple[str, str, str]]
    """(file, what it holds, where the recipe names it)."""
    left: dict[str, str]
    """Files that nothing is done with, and stages that cannot run, each with why and the cure."""


def init(name: str, paths: Sequence[str], model: str | None, tell: Callable[[str], None]) -> Written:
    """Write `name`.yaml for the files, folders, hub ids or functions of `paths`; by default what lies here.

    `model` is what the first stage starts from instead of raw text. Raises SettingsError where a file would be
    written over, or no stage can run.
    """
    recipe = Path(name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    if Path(name).is_dir():
        raise SettingsError(f"{name}: is a folder; say first what to call the recipe: rlhf init my-run {name}")
    if os.path.lexists(recipe):
        raise SettingsError(f"{recipe}: is there already, and is not written over; choose another name")
    if not recipe.absolute().parent.is_dir():
        raise SettingsError(f"{recipe}: there is no folder {recipe.parent}; make it first")
    files = sort_files(paths or _lying_here(), tell)
    chosen, missing = choose(files, model, visible_gpus())
    left = files.left | missing
    if not chosen.data:
        told = "".join(f"\n{place}: {why}" for place, why in left.items())
        raise SettingsError(f"{name}: no stage can run from {', '.join(paths) or 'what lies here'}{told}")
    _write(recipe, recipe_text(chosen, left, SCHEMA))
    schema = recipe.with_name(SCHEMA)
    if not os.path.lexists(schema) or schema.is_file():
        replace_text(schema, as_text())
    return Written(recipe, [stage for stage in STAGES if stage in chosen.data], list(_uses(files, chosen)), left)


def sort_files(paths: Sequence[str], tell: Callable[[str], None]) -> Files:
    """Read the first rows of everything, and sort it by kind."""
    files = Files()
    for path in paths:
        found = {}
        for part in _parts(path):
            tell(f"reading {part}")
            found[part] = recognise(part)
        kinds = {one.kind for one in found.values()}
        if len(found) > 1 and len(kinds) == 1 and None not in kinds and not any(map(_is_held_out, found)):
            found = {path: recognise(path)}  # all of the folder is one source
        for part, one in found.items():
            if one.kind is None:
                files.left[part] = _cure(part, one)
            elif _is_held_out(part) and one.kind in files.held_out:
                first = files.held_out[one.kind][0]
                files.left[part] = f"held-out {one.kind} as in {first}, and a stage has one eval_data; join them"
            elif _is_held_out(part):
                files.held_out[one.kind] = (part, one)
            else:
                files.train.setdefault(one.kind, []).append((part, one))
    for kind in [kind for kind in files.held_out if kind not in files.train]:
        files.train[kind] = [files.held_out.pop(kind)]  # what else should be trained on?
    return files


def choose(files: Files, model: str | None, gpus: int) -> tuple[Chosen, dict[str, str]]:
    """Which stages can run, from which files; and why others cannot, by stage."""
    usable = {kind: _one_source(kind, files) for kind in KIND_OF.values() if kind in files.train}
    missing: dict[str, str] = {}
    for kind, sources in list(usable.items()):
        stage = next(stage for stage, wanted in KIND_OF.items() if wanted == kind)
        if why := _too_little(kind, [one for _, one in sources]):
            named = ", ".join(path for path, _ in sources)
            if kind == "prompts":  # ppo can have others
                files.left[named] = why
            else:
                missing[stage] = f"{named}: {why}"
            del usable[kind]
    if model is not None and "text" in usable:
        missing["pretrain"] = (
            f"the run starts from {model}, as --model says; leave that out to train a model on the text"
        )
        del usable["text"]
    data = {stage: usable[kind] for stage, kind in KIND_OF.items() if kind in usable}
    if "pretrain" in data and "reward" in data and "sft" not in data:
        missing["reward"] = (
            "there are no demonstrations, and a model of raw text answers nothing before sft; add some, "
        )
        missing["reward"] += "or name a model that can with --model"
        del data["reward"]
    data.pop("ppo", None)
    if "reward" in data:
        data["ppo"] = usable.get("prompts") or usable["preferences"]
    else:
        missing["ppo"] = "there is no reward: it takes rankings for a reward model, or ppo.reward_model or ppo.rewards"
    if "sft" not in data and "sft" not in missing:
        missing["sft"] = "there are no demonstrations"
    if "reward" not in data and "reward" not in missing:
        missing["reward"] = "there are no rankings (preferences)"
    start = None if "pretrain" in data else model or START_MODELS[gpus > 0]
    if start is not None and "pretrain" not in missing:
        missing["pretrain"] = f"there is no raw text; what comes first starts from {start}"
    held_out = {
        stage: files.held_out[kind] for stage, kind in KIND_OF.items() if stage in data and kind in files.held_out
    }
    return Chosen(data, held_out, start, gpus), missing


def _lying_here() -> list[str]:
    """The data files of the working directory itself, without those that come with any project."""
    return [
        path.name
        for path in sorted(Path().iterdir())
        if path.is_file() and suffixes(path)[0] not in ("", ".md") and not path.name.startswith(".")
        and not _NO_DATA.match(path.name)
    ]  # fmt: skip


def _parts(path: str) -> list[str]:
    """The files of a folder; anything else, and a data set that was saved as a folder, is one."""
    folder = Path(path).expanduser()
    if not folder.is_dir() or (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        return [path]
    return [str(file) for file in folder_files(folder)] or [path]


def _is_held_out(path: str) -> bool:
    return _HELD_OUT.search(Path(path).name) is not None


def _cure(path: str, found: Recognised) -> str:
    """Why a file is of no kind, and what to do about it."""
    if found.ambiguous:
        return f"{found.ambiguous.removeprefix(f'{path}: ')} (data: {{path: {path}, format: …}})"
    kinds: dict[str, list[str]] = {}
    for kind, why in found.reasons.items():
        kinds.setdefault(why, []).append(kind)
    if len(kinds) == 1:  # it cannot be read at all
        return next(iter(kinds)).removeprefix(f"{path}: ")
    told = "; ".join(f"as {', '.join(of)}: {why}" for why, of in kinds.items())
    return (
        f"nothing that is known ({told}); `rlhf data check {path} --as KIND --map NAME=COLUMN` tries names of columns"
    )


def _one_source(kind: str, files: Files) -> list[tuple[str, Recognised]]:
    """The sources that a stage takes of a kind: raw text all of them, else the first."""
    sources = files.train[kind]
    if kind == "text":
        return sources
    for path, _ in sources[1:]:
        files.left[path] = f"{kind} as in {sources[0][0]}, and a stage has one source; put them into one folder"
    return sources[:1]


def _too_little(kind: str, sources: Sequence[Recognised]) -> str:
    if not all(found.whole for found in sources):
        return ""
    if kind == "text":
        length = sum(found.length for found in sources)
        short = length < _FEWEST_CHARACTERS
        return f"{length} characters are too few to pretrain on; a model needs millions" if short else ""
    return "" if sources[0].prompts > 1 else "one prompt alone; one to train on and one to evaluate on are needed"


def _write(path: Path, text: str) -> None:
    """Write a recipe that holds what a run will take."""
    writing = path.with_name(f".{path.name}.writing")
    try:
        writing.write_text(text, encoding="utf-8")
        load_recipe(str(writing))
        os.replace(writing, path)
    finally:
        writing.unlink(missing_ok=True)


def _uses(files: Files, chosen: Chosen) -> Iterator[tuple[str, str, str]]:
    found = [pair for sources in files.train.values() for pair in sources] + list(files.held_out.values())
    for path, one in found:
        named = [f"{stage}.data" for stage, sources in chosen.data.items() if path in dict(sources)]
        named += [f"{stage}.eval_data" for stage, (held_out, _) in chosen.held_out.items() if held_out == path]
        rows = f"{one.rows} row{'s' * (one.rows != 1)}" if one.whole else f"more than {one.rows - 1} rows"
        bad = f", {one.bad} of them unusable" * bool(one.bad)
        yield path, f"{one.kind}: {rows}{bad} ({one.format})", ", ".join(named) or "not used"
