"""`rlhf estimate`: asks a process that may import torch what a recipe needs, and shows what it says."""

import json
import os
import subprocess
import sys
from typing import Any

from rlhf.data.errors import DataError, RefusedError
from rlhf.data.rows import read_demonstrations, read_rankings
from rlhf.pipeline.errors import DEBUG, RunFailed
from rlhf.pipeline.launch import visible_gpus
from rlhf.pipeline.recipe import Recipe
from rlhf.pipeline.summary import duration
from rlhf.pipeline.tables import show_table
from rlhf.stages.devices import named
from rlhf.stages.reward.config import RewardSettings
from rlhf.stages.sft.config import SFTSettings

COLUMNS = ("stage", "phase", "weights", "optimiser", "gradients", "activations", "cache", "logits", "GiB", "time", "×")


def estimate(recipe: Recipe, device: str | None) -> dict[str, Any]:
    """What `rlhf.stages.estimate` answers about a recipe, on the device of that name or on the one that is here.

    Raises RefusedError for what it refuses, RunFailed where it breaks.
    """
    if device not in (None, "cpu"):
        named(str(device))  # refused at once where there is none of the name
    visible = visible_gpus() if device is None else 1
    request = {
        "stages": {
            stage: section.model_dump(mode="json", exclude_unset=True)
            for stage in recipe.stages
            if (section := recipe.section(stage)) is not None
        },
        "rows": {stage: counted(recipe, stage) for stage in ("sft", "reward")},
        "num_processes": recipe.num_processes or max(visible, 1),
        "device": device,
    }
    process = subprocess.run(
        [sys.executable, "-m", "rlhf.stages.estimate"], input=json.dumps(request), capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if os.environ.get(DEBUG):
        sys.stderr.write(process.stderr)
    said = process.stderr.strip()
    if process.returncode == 2:
        raise RefusedError(said)
    if process.returncode:
        raise RunFailed(said.splitlines()[-1] if said else f"the estimate ended with code {process.returncode}")
    found: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return found


def counted(recipe: Recipe, stage: str) -> dict[str, int]:
    """Rows to train on and answers of a ranking, where the rows are here and can be read; the hub is not asked."""
    section = recipe.section(stage)
    if not isinstance(section, SFTSettings | RewardSettings):
        return {}
    source = section.data
    if ":" not in source.path and not source.local.exists():
        return {}
    found = {}
    try:
        if isinstance(section, SFTSettings):
            num_rows = len(read_demonstrations(source, section.max_dropped).rows)
        else:
            rankings = read_rankings(source, section.max_dropped, keep_ties=True).rows
            num_rows, found["answers"] = len(rankings), max(len(row.responses) for row in rankings)
    except DataError:
        return {}  # `rlhf data check` says what is wrong
    share = 1.0 if section.eval_data is not None else 1.0 - section.eval_share
    return {"rows": max(round(share * num_rows), 1), **found}


def show(found: dict[str, Any]) -> None:
    """A table of the phases, and of each stage whether it fits."""
    rows = []
    for stage, of_stage in found["stages"].items():
        for phase in of_stage["phases"]:
            sizes = [_gib(phase["gib"][column]) for column in COLUMNS[2:8]]
            times = "?" if phase["times"] is None else f"{phase['times']:g}"
            time = _short(phase["seconds"])
            rows.append((stage, phase["name"], *sizes, _gib(phase["total_gib"]), time, times))
    show_table(COLUMNS, rows)
    device, processes = found["device"], found["num_processes"]
    several = "" if processes == 1 else f", each of {processes} processes"
    print(f"{device['name']}: {device['gib']:.1f} GiB, {device['usable_gib']:.1f} of them counted on{several}")
    for stage, of_stage in found["stages"].items():
        took = "rows not counted" if of_stage["seconds"] is None else f"about {duration(of_stage['seconds'])}"
        fits = "fits" if of_stage["fits"] else "does not fit"
        print(f"{stage}: {of_stage['peak_gib']:.2f} GiB in {of_stage['precision']}, {fits}; {took}")
        for change in of_stage["changes"]:
            print(f"  {_change(change)}")


def _change(change: dict[str, Any]) -> str:
    words = " ".join(f"{name}={_word(value)}" for name, value in change["settings"].items())
    return f"{words}: {change['peak_gib']:.2f} GiB{', fits' if change['fits'] else ''}"


def _word(value: Any) -> str:
    return json.dumps(value).replace(" ", "").strip('"')


def _gib(size: float) -> str:
    return f"{size:.2f}" if size >= 0.005 else ("0" if not size else "<.01")


def _short(seconds: float) -> str:
    return duration(seconds) if seconds >= 1 else f"{1000 * seconds:.3g} ms"
