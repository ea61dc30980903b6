"""`rlhf verify RUN`: are the files of a run what they were when they were sealed or saved? Nothing is changed."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rlhf.data.errors import SettingsError
from rlhf.pipeline.lock import in_use
from rlhf.pipeline.summary import no_run_folder, read_summary
from rlhf.pipeline.tables import size_text
from rlhf.stages.artifact import BESIDE, OF_PEOPLE, RESULTS, STEPS, Artifact, is_temporary, result_files
from rlhf.stages.checkpoints import Incomplete, read_checkpoint


@dataclass(frozen=True)
class Damage:
    """One thing that is not as it was."""

    place: str
    """Relative to the run folder."""
    what: str
    cure: str

    def __str__(self) -> str:
        return f"{self.place} {self.what}; {self.cure}"


@dataclass
class Found:
    """What `verify` looked at and what it found."""

    damage: list[Damage] = field(default_factory=list)
    good: list[str] = field(default_factory=list)
    """A line per artifact and checkpoint that is as it was."""
    foreign: list[str] = field(default_factory=list)
    """What lies in stages' folders and is not ours; no damage."""
    notes: list[str] = field(default_factory=list)
    """What was not looked at."""


def verify(run_dir: Path, tell: Callable[[str], None] = lambda text: None) -> Found:
    """Hash every file of every sealed stage and of every checkpoint; `tell` is told how far it is.

    Raises SettingsError for what is no run folder.
    """
    folders = stage_folders(run_dir)
    if not (run_dir / "summary.json").is_file() and not folders:
        raise no_run_folder(run_dir)
    found = Found()
    found.damage += _summary(run_dir)
    working = in_use(run_dir)
    if working:
        found.notes.append("a run is working here: its checkpoints change, and are not looked at")
    for number, folder in enumerate(folders, 1):
        tell(f"hashing {folder.name} ({number} of {len(folders)})")
        found.foreign += [f"{folder.name}/{path.name}" for path in strangers(folder)]
        if Artifact(folder).sealed:
            _artifact(folder, found)
        elif not working:
            _checkpoints(folder, found)
    return found


def stage_folders(run_dir: Path) -> list[Path]:
    """The folders of stages, finished or not, in order."""
    found = [path for stage in STEPS for path in sorted(run_dir.glob(f"{stage}-{'[0-9a-f]' * 8}"))]
    return [path for path in found if path.is_dir()]


def strangers(folder: Path) -> list[Path]:
    """What lies in a stage's folder and is not ours."""
    names = (*RESULTS, *BESIDE)
    return [
        path
        for path in sorted(folder.iterdir())
        if path.name not in (*names, *OF_PEOPLE) and not is_temporary(path, folder, names)
    ]


def _summary(run_dir: Path) -> Iterator[Damage]:
    try:
        entries = read_summary(run_dir)
    except SettingsError:
        yield Damage("summary.json", "is damaged", "delete it; the next `rlhf run` writes it anew")
        return
    for stage, entry in entries.items():
        if entry.status == "done" and not Artifact(run_dir / str(entry.folder)).sealed:
            cure = "bring its folder back; else the next `rlhf run` makes the stage anew"
            yield Damage("summary.json", f"says that {stage} is done, but {entry.folder} is not sealed", cure)


def _artifact(folder: Path, found: Found) -> None:
    artifact, before = Artifact(folder), len(found.damage)
    anew = f"restore it, or delete {folder.name} and run again to make it anew"
    try:
        manifest = artifact.manifest
        damage = artifact.damage(hashes=True)
    except (SettingsError, OSError) as error:
        what = "is damaged" if isinstance(error, SettingsError) else f"cannot be read: {error}"
        found.damage.append(Damage(f"{folder.name}/manifest.json", what, anew))
        return
    if not str(manifest.get("key", "")).startswith(folder.name.rpartition("-")[2]):
        what = f"has the key {manifest.get('key')}, which is not that of its folder (was it copied or renamed?)"
        found.damage.append(Damage(f"{folder.name}/manifest.json", what, "move the folder out of the run"))
    found.damage += [Damage(f"{folder.name}/{name}", what, anew) for name, what in damage.items()]
    names = [path.relative_to(folder).as_posix() for path in result_files(folder)]
    found.damage += [
        Damage(f"{folder.name}/{name}", "came after it was sealed", "take it out of this folder")
        for name in names
        if name not in manifest["files"]
    ]
    if len(found.damage) == before:
        size = sum((folder / name).stat().st_size for name in names)
        found.good.append(f"{folder.name}: {len(names)} files, {size_text(size)}, as they were sealed")


def _checkpoints(folder: Path, found: Found) -> None:
    cure = "run again: it goes on from the checkpoint before it, or starts over"
    for path in sorted((folder / "checkpoints").glob("step-*")):
        place = path.relative_to(folder.parent).as_posix()
        try:
            checkpoint = read_checkpoint(path, hashes=True)
        except Incomplete as reason:
            found.damage.append(Damage(place, f"is damaged: {reason}", cure))
        else:
            found.good.append(f"{place}: complete, {size_text(checkpoint.size)}, as it was saved")


def lines(found: Found) -> list[str]:
    """For people."""
    return [*found.good, *found.notes, *map(str, found.damage), *(f"{name} is not ours" for name in found.foreign)]


def as_json(found: Found) -> str:
    """For programs."""
    damage = [{"place": one.place, "what": one.what, "cure": one.cure} for one in found.damage]
    return json.dumps(
        {"ok": not damage, "damage": damage, "good": found.good, "foreign": found.foreign, "notes": found.notes},
        indent=1,
    )  # fmt: skip
