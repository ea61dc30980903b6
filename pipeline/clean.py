"""`rlhf clean RUN`: what a run folder holds that nothing leads to any more. All is listed before anything is deleted.

Only names that we write are deleted, never what somebody else put beside them, and never anything behind a link.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from rlhf.data.errors import RefusedError
from rlhf.pipeline.errors import begun
from rlhf.pipeline.lock import held
from rlhf.pipeline.plan import make_plan
from rlhf.pipeline.recipe import load_recipe
from rlhf.pipeline.summary import no_run_folder
from rlhf.pipeline.tables import show_table, size_text
from rlhf.pipeline.verify import stage_folders
from rlhf.stages.alone import alone_in
from rlhf.stages.artifact import BESIDE, RESULTS, STEPS, Artifact, is_temporary, temporaries
from rlhf.stages.evaluation.records import ANSWERS, FIGURES

RUN_FILES = (
    "recipe.yaml", "summary.json", "report.html", FIGURES, ANSWERS, "sweep.json", "attention.html", "tokens",
)  # fmt: skip
"""What a run writes into its folder beside the folders of its stages."""


@dataclass(frozen=True)
class Item:
    """Something that may go."""

    path: Path
    why: str
    is_work: bool
    """Whether it took training to make; then it goes only with --yes."""

    @property
    def parts(self) -> list[Path]:
        """What is deleted: the path itself, or of a stage's folder what is ours."""
        if not self.is_work:
            return [self.path]
        ours = [self.path / name for name in (*BESIDE, *RESULTS)]  # the manifest first: half a result is none
        return [path for path in [*ours, *temporaries(self.path)] if os.path.lexists(path) and not path.is_symlink()]

    @property
    def size(self) -> int:
        """Bytes, links not followed."""
        return sum(_size(path) for path in self.parts)


def clean(run_dir: Path, yes: bool) -> None:
    """List what may go, then delete it; without `yes` nothing that took training to make.

    Raises RefusedError for what is no run folder, and while a run, or a stage by hand, works there.
    """
    if not run_dir.is_dir():
        raise no_run_folder(run_dir)
    with held(run_dir, 0), alone_in_stages(run_dir):
        items, notes = find(run_dir)
        going = [item for item in items if yes or not item.is_work]
        rows = [
            (str(item.path.relative_to(run_dir)), size_text(item.size), item.why,
             "delete" if item in going else "only with --yes")
            for item in items
        ]  # fmt: skip
        if rows:
            show_table(("what", "size", "why", "do"), rows)
        for note in notes:
            print(note)
        sys.stdout.flush()  # all is told before anything goes
        freed = sum(item.size for item in going)
        with begun():
            for item in going:
                if left := delete(item):
                    print(f"{item.path.name} stays, with what is not ours: {', '.join(path.name for path in left)}")
        print(f"{size_text(freed)} freed")


@contextmanager
def alone_in_stages(run_dir: Path) -> Iterator[None]:
    """Inside, nobody trains in a stage of the run. Raises RefusedError where somebody does, by hand for instance."""
    with ExitStack() as stack:
        for folder in stage_folders(run_dir):
            stack.enter_context(alone_in(folder))
        yield


def find(run_dir: Path) -> tuple[list[Item], list[str]]:
    """What may go, and notes on what stays although it is not finished. Hold the lock meanwhile.

    Raises SettingsError for what is no run folder.
    """
    if not (run_dir / "summary.json").is_file():
        raise no_run_folder(run_dir)
    folders = [folder for folder in stage_folders(run_dir) if not folder.is_symlink()]
    kept, undecided, notes = _kept(run_dir, folders)
    items = [Item(path, "left by a write that was cut short", False) for path in run_temporaries(run_dir)]
    for folder in folders:
        sealed = Artifact(folder).sealed
        if folder.name in kept:
            items += _rubbish(folder, sealed)
        elif sealed:
            items.append(Item(folder, "finished, but not what summary.json names", True))
        elif folder.name.partition("-")[0] in undecided:
            notes.append(
                f"{folder.name} stays: it is not finished, and whether the recipe still leads to it is not known"
            )
        else:
            items.append(Item(folder, "not finished, and recipe.yaml does not lead to it", True))
    return items, notes


def run_temporaries(run_dir: Path) -> list[Path]:
    """What a write that did not come to its end left in the run folder itself, and among its tokens."""
    found = [path for path in run_dir.glob(".*.writing") if is_temporary(path, run_dir, RUN_FILES)]
    if not (tokens := run_dir / "tokens").is_symlink():
        found += tokens.glob(".*.writing")
    return sorted(path for path in found if not path.is_symlink())


def delete(item: Item) -> list[Path]:
    """Delete an item; what somebody else put into it, which stays."""
    for path in item.parts:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if not item.is_work:
        return []
    left = sorted(item.path.iterdir())
    if not left:
        item.path.rmdir()
    return left


def _rubbish(folder: Path, sealed: bool) -> Iterator[Item]:
    checkpoints = folder / "checkpoints"
    whole = sealed and checkpoints.is_dir() and not checkpoints.is_symlink()
    if whole:
        yield Item(checkpoints, "checkpoints of a stage that is finished", False)
    for path in temporaries(folder):
        inside = path.relative_to(folder).parts[0]
        if not (folder / inside).is_symlink() and not (whole and inside == "checkpoints"):
            yield Item(path, "left by a write that was cut short", False)


def _kept(run_dir: Path, folders: list[Path]) -> tuple[set[str], set[str], list[str]]:
    """Names of folders that something leads to; stages of which that is not known; and why not."""
    texts = [_text(run_dir / name) for name in ("summary.json", "sweep.json", "recipe.yaml")]
    kept = {folder.name for folder in folders if any(folder.name in text for text in texts)}
    undecided, notes = set[str](), []
    try:
        steps = make_plan(load_recipe(str(run_dir / "recipe.yaml")), run_dir)
        kept |= {step.folder.name for step in steps if step.folder is not None}
        undecided = {step.stage for step in steps if step.folder is None}  # its inputs are still to be made
    except RefusedError as error:
        undecided = set(STEPS)
        notes.append(f"what recipe.yaml leads to is not known: {error}")
    while True:  # what the kept ones were made from
        settings = [_text(folder / "settings.yaml") for folder in folders if folder.name in kept]
        more = {f.name for f in folders if f.name not in kept and any(f.name in text for text in settings)}
        if not more:
            return kept, undecided, notes
        kept |= more


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _size(path: Path) -> int:
    if path.is_dir() and not path.is_symlink():
        return sum(_size(inside) for inside in path.iterdir())
    return path.lstat().st_size
