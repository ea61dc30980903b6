"""`rlhf init`: which stages can run from the files that are there, and a recipe for them."""

import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlhf.data.columns import COLUMNS_FOUND, columns_found, did_you_mean, find
from rlhf.data.errors import SettingsError
from rlhf.data.files import KNOWN_SUFFIXES, WORKBOOKS, folder_files, suffixes
from rlhf.data.own import COLUMNS, no_header
from rlhf.data.recognise import Recognised, columns_of, recognise
from rlhf.data.sources import Source, kind_of
from rlhf.pipeline.launch import visible_gpus
from rlhf.pipeline.recipe import load_recipe
from rlhf.pipeline.recipe_text import EVAL_SHARE, Chosen, recipe_text, sections
from rlhf.pipeline.schema import as_text
from rlhf.pipeline.start_models import START_MODELS, size_of
from rlhf.pipeline.text_files import are_prompts, as_one, is_long, long_text
from rlhf.stages.artifact import STAGES
from rlhf.stages.disk import refuse_no_room_beside, replace_text

SCHEMA = ".rlhf.schema.json"
"""What a recipe that was written here is completed and checked by in an editor; it lies beside it."""
KIND_OF = {"pretrain": "text", "sft": "demonstrations", "reward": "preferences", "ppo": "prompts"}
_HELD_OUT = re.compile(r"(?:^|[._-])(?:test|eval|valid|validation|dev|held[_-]?out)(?:[._-]|$)", re.IGNORECASE)
_NO_DATA = re.compile(r"readme|license|licence|requirements|constraints|changelog|notice", re.IGNORECASE)
_MAP = re.compile(r"(?:(?P<file>.+?):)?(?P<name>[A-Za-z_]+)=(?P<column>.+)", re.DOTALL)
_BY_WORTH = ("preferences", "demonstrations", "prompts", "text")  # what a map that several files share is tried for
_PROMPTS_AS_TEXT = (
    "looks like prompts, but a text file is raw text to pretrain on; as prompts they need a table: a CSV file with the "
    "header prompt, and one a row (if it is raw text, name it in pretrain.data)"
)
_NAME_THEM = (
    "name the files to use (parts of one table as one folder; of two versions of it one alone: rows in both would "
    "count twice)"
)
_FEW = {"sft": 10, "reward": 50, "ppo": 50}  # held-out prompts, from which no loss, or no share, can be told
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

    def found(self) -> list[tuple[str, Recognised]]:
        """All that are of a kind."""
        return [pair for sources in self.train.values() for pair in sources] + list(self.held_out.values())

    def not_of(self, kind: str) -> str:
        """What to add where there are none of a kind: files with its columns, and why they are not of it."""
        return "".join(f"; {path} {one.almost[kind]}" for path, one in self.found() if kind in one.almost)


@dataclass(frozen=True)
class Written:
    """What `init` did."""

    recipe: Path
    stages: list[str]
    files: list[tuple[str, str, str]]
    """(file, what it holds, where the recipe names it)."""
    left: dict[str, str]
    """Files that nothing is done with, by reason, and stages that cannot run, each with why and the cure."""
    warnings: list[str]


def init(
    name: str,
    paths: Sequence[str],
    model: str | None,
    tell: Callable[[str], None],
    mapping: Sequence[str] = (),
) -> Written:
    """Write `name`.yaml for the files, folders, hub ids or functions of `paths`; by default what lies here.

    `model` is what the first stage starts from instead of raw text. `mapping` has NAME=COLUMN for whichever files it
    helps, or FILE:NAME=COLUMN. Raises SettingsError where a file would be written over, or no stage can run, DataError
    where a path is not there.
    """
    maps = _maps(mapping)
    recipe = Path(name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    if Path(name).is_dir():
        again = shlex.join(["rlhf", "init", "my-run", name])
        raise SettingsError(f"{name}: is a folder; say first what to call the recipe: {again}")
    if os.path.lexists(recipe):
        raise SettingsError(f"{recipe}: is there already, and is not written over; choose another name")
    refuse_no_room_beside(recipe)
    for path in paths:
        kind_of(Source(path=path))
    read, not_read = (paths, []) if paths else _lying_here()
    files = sort_files(read, tell, maps)
    again = shlex.join(["rlhf", "init", name])
    files.left |= {path: f"looked at only where it is named: {again} {shlex.quote(path)} …" for path in not_read}
    chosen, missing = choose(files, model, visible_gpus())
    of_files = _together(files.left)
    left = of_files | {stage: missing[stage] for stage in STAGES if stage in missing}
    if not chosen.data:
        told = left if any(path not in files.left for path, _ in files.found()) else of_files
        if read and len(told) == 1:
            raise SettingsError("{}: {}".format(*next(iter(told.items()))))
        lines = "".join(f"\n{place}: {why}" for place, why in told.items())
        known = ", ".join(suffix for suffix in KNOWN_SUFFIXES if suffix != ".md")
        none = f"there are no data files here ({known}); name some, or folders or hub ids: {again} FILES …"
        found = f"no stage can run from {', '.join(paths) or 'what lies here'}" if read else none
        raise SettingsError(f"{name}: {found}{lines}")
    stages = [stage for stage in STAGES if stage in chosen.data]
    written = Written(recipe, stages, list(_uses(files, chosen)), left, list(_warnings(chosen)))
    _write(recipe, recipe_text(chosen, left, SCHEMA))
    schema = recipe.with_name(SCHEMA)
    if not os.path.lexists(schema) or schema.is_file():
        replace_text(schema, as_text())
    return written


def sort_files(paths: Sequence[str], tell: Callable[[str], None], maps: Mapping[str, dict[str, str]]) -> Files:
    """Read the first rows of everything, and sort it by kind. `maps` are names of columns by file, "" for all files."""
    files = Files()
    unused = {(file, *pair) for file, pairs in maps.items() for pair in pairs.items()}
    for path in paths:
        found = {}
        parts = _parts(path)
        for part in parts:
            tell(f"reading {part}")
            own = part if part in maps else path if path in maps else ""
            found[part] = recognise(part, maps[own]) if own else _recognise(part, maps.get("", {}))
            unused -= {(own, *pair) for pair in (maps[own] if own else found[part].map).items()}
            if found[part].kind == "text" and not own and are_prompts(Path(part)):
                files.left[part] = _PROMPTS_AS_TEXT
                del found[part]
        kinds = {one.kind for one in found.values()}
        same_map = len({tuple(sorted(one.map.items())) for one in found.values()}) == 1
        alike = len(kinds) == 1 and None not in kinds and same_map and not any(map(_is_held_out, found))
        if alike and len(found) == len(parts) > 1:
            several = list(found.values())  # all of the folder is one source
            found = {path: as_one(several) if any(map(is_long, parts)) else recognise(path, several[0].map)}
        for part, one in found.items():
            if one.kind is None:
                files.left[part] = _cure(part, one)
            elif _is_held_out(part) and one.kind in files.held_out:
                first = files.held_out[one.kind][0]
                files.left[part] = f"held-out {one.kind} as in {first}, and a stage has one eval_data; {_NAME_THEM}"
            elif _is_held_out(part):
                files.held_out[one.kind] = (part, one)
            else:
                files.train.setdefault(one.kind, []).append((part, one))
    for file, name, column in sorted(unused):
        near = did_you_mean(column, [there for path in paths for there in columns_of(path)])
        why = f"no file has such a column and needs it{near}"
        if file:
            why = f"{file} is not among the files; there are {', '.join(paths)}"
        raise SettingsError(f"--map {file}{':' * bool(file)}{name}={column}: {why}")
    for kind in [kind for kind in files.held_out if kind not in files.train]:
        files.train[kind] = [files.held_out.pop(kind)]  # what else should be trained on?
    return files


def choose(files: Files, model: str | None, gpus: int) -> tuple[Chosen, dict[str, str]]:
    """Which stages can run, from which files; and why others cannot, by stage."""
    usable = {kind: _one_source(kind, files) for kind in KIND_OF.values() if kind in files.train}
    missing: dict[str, str] = {}
    too_little: dict[str, str] = {}  # by kind, the first file
    for kind, sources in list(usable.items()):
        if why := _too_little(kind, [one for _, one in sources]):
            files.left |= {path: why for path, _ in sources}
            too_little[kind] = sources[0][0]
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
        missing["ppo"] = "there is no reward: it takes rankings, ppo.reward_model or ppo.rewards"
    if "demonstrations" not in files.train:
        missing["sft"] = f"there are no demonstrations{files.not_of('demonstrations')}"
    if "preferences" not in files.train:
        missing["reward"] = f"there are no rankings (preferences){files.not_of('preferences')}"
    start = None if "pretrain" in data else model or START_MODELS[gpus > 0]
    if "text" not in files.train:
        missing["pretrain"] = "there is no raw text" + (f"; what comes first starts from {start}" if data else "")
    held_out = {
        stage: files.held_out[kind] for stage, kind in KIND_OF.items() if stage in data and kind in files.held_out
    }
    for kind in too_little.keys() & files.held_out.keys():
        if files.held_out[kind] not in held_out.values():
            files.left[files.held_out[kind][0]] = f"held out, and {too_little[kind]} is too little to train on"
    positions, parameters = size_of(start) if data and start else (None, None)
    return Chosen(data, held_out, start, gpus, positions, parameters), missing


def _lying_here() -> tuple[list[str], list[str]]:
    """The data files of the working directory itself, without those that come with any project; and what may hold
    some: Markdown, and folders with data files."""
    files: list[str] = []
    others: list[str] = []
    for path in sorted(Path().iterdir()):
        if path.is_file() and _may_be_data(path):
            (others if suffixes(path)[0] == ".md" else files).append(path.name)
        elif path.is_dir() and not path.name.startswith(".") and any(map(_may_be_data, path.glob("*"))):
            others.append(path.name)
    return files, others


def _may_be_data(path: Path) -> bool:
    known = suffixes(path)[0] or path.suffix.lower() in WORKBOOKS  # these are told how they can be read
    return bool(known) and not path.name.startswith(".") and not _NO_DATA.match(path.name)


def _parts(path: str) -> list[str]:
    """The files of a folder; anything else, and a data set that was saved as a folder, is one."""
    folder = Path(path).expanduser()
    if not folder.is_dir() or (folder / "dataset_info.json").is_file() or (folder / "dataset_dict.json").is_file():
        return [path]
    return [str(file) for file in folder_files(folder)] or [path]


def _maps(mapping: Sequence[str]) -> dict[str, dict[str, str]]:
    """[FILE:]NAME=COLUMN, by file, "" for all."""
    maps: dict[str, dict[str, str]] = {}
    for text in mapping:
        found = _MAP.fullmatch(text)
        if found is None:
            raise SettingsError(f"--map {text}: write NAME=COLUMN or FILE:NAME=COLUMN, for example prompt=question")
        name = found["name"]
        if name not in COLUMNS:
            known = did_you_mean(name, COLUMNS) or f"; there are {', '.join(COLUMNS)}"
            raise SettingsError(f"--map {text}: no column of ours is called {name!r}{known}")
        maps.setdefault(found["file"] or "", {})[name] = found["column"]
    return maps


def _recognise(path: str, common: Mapping[str, str]) -> Recognised:
    """What a file holds; by those of the names that it has columns for, unless that makes less of it."""
    if is_long(path) and (long := long_text(Path(path).expanduser())):
        return long
    found = recognise(path)
    columns = columns_of(path) if common else []
    there = {name: column for name, column in common.items() if find(column, columns)}
    mapped = recognise(path, there) if there else found
    if mapped.kind is None or (found.kind and _BY_WORTH.index(mapped.kind) > _BY_WORTH.index(found.kind)):
        return found
    return mapped


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
    if all(COLUMNS_FOUND in why for why in kinds) and (columns := columns_of(path)):
        named = f"--map prompt={shlex.quote(columns[0])} …"
        return f"no columns that are known{columns_found(columns)}; say which is which: {named}{no_header(path)}"
    told = "; ".join(f"as {', '.join(of)}: {why}" for why, of in kinds.items())
    return f"nothing that can be used ({told})"


def _one_source(kind: str, files: Files) -> list[tuple[str, Recognised]]:
    """The sources that a stage takes of a kind: raw text all of them, else the first; of demonstrations the first of
    those with the largest share of rows to learn from."""
    sources = files.train[kind]
    if kind == "text":
        return sources
    if kind == "demonstrations":
        sources = sorted(sources, key=lambda source: -source[1].examples / max(source[1].rows, 1))
    for path, _ in sources[1:]:
        files.left[path] = f"{kind} as in {sources[0][0]}, and a stage has one source; {_NAME_THEM}"
    return sources[:1]


def _too_little(kind: str, sources: Sequence[Recognised]) -> str:
    if not all(found.whole for found in sources):
        return ""
    if kind == "text":
        length = sum(found.length for found in sources)
        short = length < _FEWEST_CHARACTERS
        return f"{length} characters are too few to pretrain on; a model needs millions" if short else ""
    one = sources[0]
    if one.prompts > 1:
        return ""
    if kind == "prompts" and one.almost:  # those of rows that should have been more
        return "; ".join(f"as {kind}: {why}" for kind, why in one.almost.items()) + "; repair such rows"
    bad = f"; {one.bad} of {one.rows} rows cannot be used, {one.first_bad}" if one.bad else ""
    return f"one prompt alone; one to train on and one to evaluate on are needed{bad}"


def _write(path: Path, text: str) -> None:
    """Write a recipe that holds what a run will take."""
    writing = path.with_name(f".{path.name}.writing")
    try:
        writing.write_text(text, encoding="utf-8")
        load_recipe(str(writing))
        os.replace(writing, path)
    except OSError as error:
        error.filename = str(path)  # the name that people know
        raise
    finally:
        writing.unlink(missing_ok=True)


def _warnings(chosen: Chosen) -> Iterator[str]:
    """What reading the sources told, which rows are gone on without, and of which sources too few are held out."""
    used = {path: one for sources in chosen.data.values() for path, one in sources}
    yield from (f"{path}: {warning}" for path, one in used.items() for warning in one.warnings)
    allowed: dict[str, list[str]] = {}
    for stage, (settings, _) in sections(chosen).items():
        for path, one in chosen.read(stage):
            if one.bad:
                told = (
                    f"{one.bad} of its {'' if one.whole else 'first '}{one.rows} rows cannot be used, {one.first_bad}"
                )
                allowed.setdefault(f"{path}: {told}", []).append(f"{stage}.max_dropped: {settings['max_dropped']}")
    for told, settings_of in allowed.items():
        yield f"{told}; with {' and '.join(settings_of)} the run goes on without them; better mend them and take it out"
    stages: dict[str, list[str]] = {}
    for stage, sources in chosen.data.items():
        path, one = sources[0]
        few = _FEW.get(stage, 0)
        if stage not in chosen.held_out and one.whole and EVAL_SHARE * one.prompts < few:
            stages.setdefault(path, []).append(stage)
    for path, of in stages.items():
        prompts = chosen.data[of[0]][0][1].prompts
        held_out = max(round(EVAL_SHARE * prompts), 1)
        share = f"about {held_out} {'is' if held_out == 1 else 'are'} held out to evaluate on"
        cure = "from which little can be told; more rows help, an eval_data of its own, or a larger eval_share"
        yield f"{' and '.join(of)}: of the {prompts} prompts of {path} {share}, {cure}"


def _together(left: Mapping[str, str]) -> dict[str, str]:
    """Why files are left out, each reason once: files → reason."""
    files: dict[str, list[str]] = {}
    for path, why in left.items():
        files.setdefault(why, []).append(path)
    return {", ".join(paths): why for why, paths in files.items()}


def _uses(files: Files, chosen: Chosen) -> Iterator[tuple[str, str, str]]:
    for path, one in files.found():
        named = [f"{stage}.data" for stage, sources in chosen.data.items() if path in dict(sources)]
        named += [f"{stage}.eval_data" for stage, (held_out, _) in chosen.held_out.items() if held_out == path]
        rows = f"{one.rows} row{'s' * (one.rows != 1)}" if one.whole else f"more than {one.rows - 1} rows"
        bad = f", {one.bad} of them unusable" * bool(one.bad)
        if one.kind == "preferences" and one.examples != one.rows - one.bad:
            bad += f", {one.examples} ranking{'s' * (one.examples != 1)}"
        if not named:
            stage = next(stage for stage, kind in KIND_OF.items() if kind == one.kind)
            named = ["not used" if path in files.left else f"not used: {stage} is left out"]
        yield path, f"{one.kind}: {rows}{bad} ({one.format})", ", ".join(named)
