"""Checkpoints on disk: written beside the old ones, then swapped in, so that a kill leaves one or the other whole."""

import json
import os
import shutil
from pathlib import Path
from typing import Any


def clear(writing: Path) -> None:
    """Make an empty folder for the files of the next checkpoint."""
    shutil.rmtree(writing, ignore_errors=True)
    writing.mkdir(parents=True)


def swap_in(writing: Path, step: int, state: dict[str, Any]) -> None:
    """Complete the checkpoint with state.json and give it its name; of the older ones the newest stays."""
    final = writing.with_name(f"step-{step:08d}")
    sizes = {path.name: path.stat().st_size for path in writing.iterdir()}
    content = {"step": step, "state": state, "files": sizes}
    (writing / "state.json").write_text(json.dumps(content), encoding="utf-8")
    for path in writing.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    shutil.rmtree(final, ignore_errors=True)
    os.replace(writing, final)
    for old in sorted(writing.parent.glob("step-*"))[:-2]:  # the one before stays, should this one be damaged
        shutil.rmtree(old)


def complete_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints that were written to their end and whose files still have their sizes, oldest first."""
    found = []
    for state in sorted((folder / "checkpoints").glob("step-*/state.json")):
        try:
            sizes = json.loads(state.read_text(encoding="utf-8"))["files"]
            if all((state.parent / name).stat().st_size == size for name, size in sizes.items()):
                found.append(state.parent)
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return found
