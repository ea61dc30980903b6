"""Where what a stage read lies now: its settings name it as it was from the folder that the stage was started in.

A relative path is looked for from the working directory, and then from the folder of the stage's run and the one above
(as of `runs/NAME`). The digests in the stage's manifest decide: nothing else that is called so is taken. No torch.
"""

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

from rlhf.data.errors import DataError, RefusedError, SettingsError
from rlhf.data.sources import Source, digest, named
from rlhf.stages.artifact import Artifact, code_digest, model_digest
from rlhf.stages.settings import AnyStage, StageSettings

AnySource = TypeVar("AnySource", bound=Source)


def with_data_as_read(settings: AnyStage, folder: Path) -> AnyStage:
    """Settings of the finished stage in `folder`, with the rows that it read where they lie now.

    Raises DataError for rows that are not there, or not as the stage read them.
    """
    found = {}
    for field in ("data", "eval_data"):
        if (given := getattr(settings, field)) is not None:
            sources = given if isinstance(given, list) else [given]
            here = [_as_read(f"{settings.stage}.{n}", one, folder) for n, one in named(field, sources).items()]
            found[field] = here if isinstance(given, list) else here[0]
    return settings.model_copy(update=found)


def _as_read(name: str, source: AnySource, folder: Path) -> AnySource:
    found = {path: source.model_copy(update={"path": path}) for path in _paths(source.local, folder)}
    return found[_same(name, folder, "data", {path: partial(digest, one) for path, one in found.items()})]


def refuse_other_rewards(settings: StageSettings, folder: Path) -> None:
    """Raise DataError where a reward function that the finished stage called is not there, or not as it was."""
    for name, reference in settings.code().items():
        if name != "judge":
            _same(f"{settings.stage}.{name}", folder, "data", {reference: partial(code_digest, reference)})


def model_as_read(name: str, reference: str, folder: Path) -> str:
    """A model that the finished stage in `folder` read, by its setting `stage.setting`, where it lies now. An absolute
    path is taken at its word. Raises SettingsError for a model that is not there, or not as it was."""
    if Path(reference).is_absolute():
        return reference
    paths = _paths(Path(reference), folder)
    known = Artifact(folder).manifest.get("inputs", {}).get(name.partition(".")[2], "")
    if not known.startswith("hub:") and not any(map(os.path.exists, paths)):
        looked = ", ".join(str(place.absolute()) for place in _places(folder))
        raise SettingsError(f"{name}: no folder {reference!r} in {looked}; start where it lies, or put it back")
    try:
        return _same(name, folder, "inputs", {path: partial(model_digest, path, name) for path in paths})
    except DataError as error:
        raise SettingsError(f"{error}; put it back as it was, or evaluate from the folder in which it lies") from None


def _same(name: str, folder: Path, kind: str, digests: Mapping[str, Callable[[], str]]) -> str:
    """Of what is found under these paths the one with the digest that `stage.setting` has in the stage's manifest.

    Raises DataError where none has, with what is said against the first.
    """
    known = Artifact(folder).manifest.get(kind, {}).get(name.partition(".")[2])
    told = []
    for path, digest_of in digests.items():
        try:
            if digest_of() == known:
                return path
            told.append(f"{path}: not as {folder.name} had it, by its digest")
        except RefusedError as error:
            told.append(str(error).partition("; ")[0])
    raise DataError(f"{name}: {told[0].removeprefix(f'{name}: ')}")


def _paths(path: Path, folder: Path) -> list[str]:
    """Where it is, seen from the folders in which the stage in `folder` may have been started; the path itself is among
    them, since it may be no path but a function, or an id of the hub."""
    places = [place / path for place in _places(folder)]
    return [*dict.fromkeys(str(place) for place in [*filter(os.path.exists, places), path])]


def _places(folder: Path) -> list[Path]:
    return [Path(), *folder.absolute().parents[1:3]]
