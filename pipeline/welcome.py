"""What `rlhf` alone says: what to do next, from what lies in the working directory."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlhf.data.errors import RefusedError
from rlhf.pipeline.recipe import shipped_recipes
from rlhf.pipeline.summary import run_status
from rlhf.stages.artifact import STEPS, Artifact

MOST = 5  # lines of one kind
_STEPS = (
    ("rlhf run demo", "the whole chain on two CPU cores in a few minutes, with data of its own"),
    ("rlhf init my-run FILES …", "write a commented recipe for your own files"),
    ("rlhf data check FILE --as KIND", "what would be used of a file, what not, and why"),
    ("rlhf --help", "all commands; rlhf COMMAND --help tells about one"),
    ("rlhf --install-completion", "let the shell complete them"),
)
_SECTION = re.compile(rf"^({'|'.join(STEPS)}):", re.MULTILINE)


def welcome(here: Path) -> str:
    """A short text: what lies in the folder `here` and how to go on with it, then how to begin."""
    lines = ["RLHF Toolkit: from raw text to a PPO-tuned language model (pretrain, sft, reward, ppo)."]
    for title, found in (("Runs here", runs(here)), ("Recipes here", recipes(here))):
        if found:
            lines += ["", f"{title}:", *_aligned(found[:MOST]), *(["  …"] if len(found) > MOST else [])]
    lines += ["", "To begin with:", *_aligned(_STEPS)]
    lines += ["", f"Shipped recipes: {', '.join(sorted(shipped_recipes()))}."]
    return "\n".join(lines)


def runs(here: Path) -> list[tuple[str, str]]:
    """(command to go on, how far it is) of the run folders here and in runs/, the one that changed last first."""
    found = [
        path for pattern in ("summary.json", "*/summary.json", "runs/*/summary.json") for path in here.glob(pattern)
    ]
    newest = sorted(set(found), key=lambda path: path.stat().st_mtime, reverse=True)
    return [line for path in newest if (line := _run(path.parent, here)) is not None]


def recipes(here: Path) -> list[tuple[str, str]]:
    """(command, stages) of the files here that are recipes."""
    return list(_recipes(here))


def _recipes(here: Path) -> Iterator[tuple[str, str]]:
    for path in sorted([*here.glob("*.yaml"), *here.glob("*.yml")]):
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        stages = _SECTION.findall(text)
        if stages and not (here / "summary.json").is_file():  # the recipe of a run is told of with it
            yield shlex.join(["rlhf", "run", path.name]), ", ".join(stages)


def _run(folder: Path, here: Path) -> tuple[str, str] | None:
    """How to go on with a run."""
    name = shlex.quote(folder.relative_to(here).as_posix())
    try:
        stages = run_status(folder)
        damaged = any(_is_damaged(folder, entry) for entry in stages.values() if entry["status"] == "done")
    except RefusedError:
        return f"rlhf verify {name}", "it cannot be read"
    if damaged:
        return f"rlhf verify {name}", "what a stage wrote is damaged or missing"
    left = {stage: entry for stage, entry in stages.items() if entry["status"] != "done"}
    if not stages:
        return None
    if not left:
        return f"rlhf chat {name}", f"finished; or read {(folder / 'report.html').relative_to(here).as_posix()}"
    stage, entry = next(iter(left.items()))
    if entry["status"] == "running":
        return f"rlhf status {name}", f"{stage} is running"
    where = f" at step {entry['step']} of {entry['steps']}" if entry.get("steps") else ""
    what = "not begun" if entry["status"] == "planned" else entry["status"]
    recipe = shlex.quote((folder / "recipe.yaml").relative_to(here).as_posix())
    return f"rlhf run {recipe} --run-dir {name}", f"{stage} {what}{where}; this goes on"


def _is_damaged(folder: Path, entry: dict[str, Any]) -> bool:
    """Whether a finished stage has lost its folder, its manifest or files of its model. Raises RefusedError for a
    manifest that cannot be read."""
    if not entry["folder"]:
        return True
    artifact = Artifact(folder / entry["folder"])
    return not artifact.sealed or bool(artifact.damage(hashes=False, below="model/"))


def _aligned(pairs: list[tuple[str, str]] | tuple[tuple[str, str], ...]) -> list[str]:
    width = max(len(command) for command, _ in pairs)
    return [f"  {command.ljust(width)}  {what}" for command, what in pairs]
