"""summary.json: how far a run is, and that as people read it."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rlhf.data.errors import SettingsError
from rlhf.pipeline.lock import in_use
from rlhf.stages.artifact import STAGES
from rlhf.stages.disk import replace_text

HEADLINES = {
    "pretrain": ("val_loss", "vocab_size"),
    "sft": ("eval_loss", "base_eval_loss"),
    "reward": ("accuracy", "longer_wins_accuracy"),
    "ppo": ("true_quality", "sft_true_quality", "win_rate", "score", "kl", "eos_share"),
}
"""Final metrics worth a place in a table, where the stage has them."""


@dataclass
class Entry:
    """One stage in summary.json. `folder` and `model` are relative to the run folder."""

    status: str
    """done, failed, stopped, running or planned."""
    folder: str | None = None
    model: str | None = None
    seconds: float | None = None
    """Wall time over all attempts that this run saw end; null if the stage was run by hand."""
    metrics: dict[str, Any] = field(default_factory=dict)


def read_summary(run_dir: Path) -> dict[str, Entry]:
    """Entries by stage; empty if there is no summary.json."""
    path = run_dir / "summary.json"
    if not path.is_file():
        return {}
    try:
        stages = json.loads(path.read_text(encoding="utf-8"))["stages"]
        return {stage: Entry(**stages[stage]) for stage in STAGES if stage in stages}
    except (ValueError, KeyError, TypeError) as error:
        raise SettingsError(f"{path}: not a summary of a run ({error}); delete it and run again") from None


def write_summary(run_dir: Path, entries: dict[str, Entry]) -> bool:
    """Replace summary.json whole; False if it said the same already, and then it is left alone."""
    stages = {stage: asdict(entries[stage]) for stage in STAGES if stage in entries}
    text = json.dumps({"stages": stages}, indent=1)
    path = run_dir / "summary.json"
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return False
    replace_text(path, text)
    return True


def stage_status(folder: Path) -> dict[str, Any]:
    """What the stage itself last wrote: state, step, steps, message; empty if it has not begun."""
    try:
        content: dict[str, Any] = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content


def run_status(run_dir: Path) -> dict[str, dict[str, Any]]:
    """summary.json, with step and steps of stages under way; 'interrupted' for one whose process is gone."""
    if not run_dir.is_dir() or not (run_dir / "summary.json").is_file():
        raise SettingsError(f"{run_dir}: not a run folder (no summary.json); `rlhf run RECIPE` makes one")
    stages: dict[str, dict[str, Any]] = {}
    for stage, entry in read_summary(run_dir).items():
        stages[stage] = asdict(entry)
        if entry.status == "running" and not in_use(run_dir):
            stages[stage]["status"] = "interrupted"
        if entry.folder and entry.status != "done":
            told = stage_status(run_dir / entry.folder)
            if stages[stage]["status"] == "interrupted" and told.get("state") == "stopped":
                stages[stage]["status"] = "stopped"  # the stage ended the process that it shared with the run
            stages[stage] |= {name: told.get(name) for name in ("step", "steps", "message")}
    return stages


def outcome(entry: dict[str, Any]) -> str:
    """The status of a stage in `run_status`, with what its final metrics say against it."""
    against = [
        words
        for name, words in (("over_optimised", "over-optimised"), ("gates_failed", "gate failed"))
        if entry["metrics"].get(name)
    ]
    return ", ".join([entry["status"], *against])


def headline(stage: str, metrics: dict[str, Any]) -> str:
    """The final metrics of a stage in one line."""
    shown = [(name, metrics[name]) for name in HEADLINES[stage] if metrics.get(name) is not None]
    return "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in shown)


def duration(seconds: float | None) -> str:
    """Seconds as people read them."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{left:02d}" if minutes >= 60 else f"{minutes}:{left:02d} min"
