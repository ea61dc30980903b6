"""What a stage tells while it trains: terminal, metrics.jsonl, status.json, trackers; its peak memory; and how to keep
libraries quiet."""

import json
import logging
import math
import os
import resource
import sys
import textwrap
import time
import traceback
import uuid
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from transformers.utils import logging as transformers_logging

from rlhf.stages.artifact import TRACKER_FOLDER, Artifact
from rlhf.stages.disk import replace_text
from rlhf.stages.secrets import mask
from rlhf.stages.settings import StageSettings, tracker_is_installed

_SECONDS_BETWEEN_LINES = 5.0
_SHOWN = (
    "loss", "val_loss", "eval_loss", "accuracy", "score", "kl", "entropy", "eos_share", "length",
    "explained_variance", "eval_score", "eval_true_quality", "eval_win_rate", "tokens_per_second", "mfu",
)  # fmt: skip
"""Figures of a progress line, in this order; metrics.jsonl has all."""


class Terminal:
    """Lines for a person, and the progress: a bar on a terminal, a line every few seconds elsewhere."""

    def __init__(self, stage: str, quiet: bool) -> None:
        self.stage = stage
        self._last_line = -_SECONDS_BETWEEN_LINES
        self._console = Console(quiet=quiet)
        self._progress: _Progress | None = None

    def say(self, text: str, now_and_then: bool = False) -> None:
        """One line; with `now_and_then` only if the last such line is some seconds old."""
        if now_and_then:
            if time.monotonic() - self._last_line < _SECONDS_BETWEEN_LINES:
                return
            self._last_line = time.monotonic()
        self._console.print(mask(f"{self.stage}: {text}"), highlight=False, markup=False, soft_wrap=True)

    def show(self, row: dict[str, Any], num_steps: int, seconds_per_step: float) -> None:
        """The progress after a row of metrics."""
        step = row["step"]
        shown = [f"{name} {_short(row[name])}" for name in _SHOWN if name in row]
        if "seconds_rollout" in row:
            phases = [(name, row.get(f"seconds_{name}", 0.0)) for name in ("rollout", "scoring", "update")]
            shown.append(", ".join(f"{name} {seconds:.2g} s" for name, seconds in phases))
        if self._console.is_terminal:
            if self._progress is None:
                self._progress = _Progress(
                    TextColumn("{task.description}"), BarColumn(20), TextColumn("{task.completed}/{task.total}"),
                    TimeRemainingColumn(), console=self._console,
                )  # fmt: skip
                self._progress.add_task(self.stage, total=num_steps)
                self._progress.start()
            self._progress.figures = shown
            self._progress.update(self._progress.task_ids[0], completed=step)
        else:
            left = round(seconds_per_step * (num_steps - step))
            line = f"step {step}/{num_steps}  {'  '.join(shown)}  left {left // 60}:{left % 60:02}"
            self.say(line, now_and_then=step < num_steps)

    def close(self) -> None:
        """Give the terminal back."""
        if self._progress is not None:
            self._progress.stop()


class _Progress(Progress):
    """A bar, and figures below it, in as many lines as the terminal needs for them."""

    figures: Sequence[str] = ()

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        if self.figures:
            kept_whole = "  ".join(figure.replace(" ", "\N{NO-BREAK SPACE}") for figure in self.figures)
            yield Text(textwrap.fill(kept_whole, self.console.width).replace("\N{NO-BREAK SPACE}", " "))


class Trackers:
    """The trackers of `report_to`, in the main process. One that fails is told of once and done without.

    A tracker's project is named after the run folder, its run after the stage's folder. What is written here lies in
    the stage's logs/ (TensorBoard's in logs/tensorboard), which the manifest leaves out: it may be deleted.

    A resumed stage goes on where it was in TensorBoard (which hides the steps of a lost stretch), wandb, trackio and
    dvclive (where rows of a lost stretch stay beside, or instead of, those that count); elsewhere it is a new run.
    """

    def __init__(self, settings: StageSettings, folder: Path, say: Callable[[str], None]) -> None:
        self.settings, self.folder, self._say = settings, folder.resolve(), say
        self._open: dict[str, Any] = {}

    def start(self, step: int) -> None:
        """Open them, `step` steps being done."""
        names = self.settings.report_to
        if names is None:
            names = ["tensorboard"] if tracker_is_installed("tensorboard") else []
        self._open = dict.fromkeys(names)
        self._each(lambda name: self._start(name, step))

    def log(self, row: dict[str, Any]) -> None:
        """Send the numbers of a row of metrics."""
        values = {k: v for k, v in row.items() if k != "step" and isinstance(v, int | float)}
        self._each(lambda name: self._open[name].log(values, step=row["step"]))

    def close(self) -> None:
        """Let them write what they still hold."""
        self._each(lambda name: self._open[name].finish())
        self._open = {}

    def _start(self, name: str, step: int) -> None:
        project = "tensorboard" if name == "tensorboard" else self.folder.parent.name or "rlhf"
        tracker = self._open[name] = LOGGER_TYPE_TO_CLASS[name](project, **self._options(name, step))
        tracker.start()
        if step == 0 or name != "tensorboard":  # which would show them as one more run
            settings = self.settings.model_dump(mode="json")
            tracker.store_init_configuration(flat({"stage": self.settings.stage, **settings}))

    def _options(self, name: str, step: int) -> dict[str, Any]:
        """What the tracker itself is told: where to write, under which name, and how to go on."""
        logs, run = self.folder / TRACKER_FOLDER, self.folder.name
        logs.mkdir(exist_ok=True)
        if name == "tensorboard":
            return {"logging_dir": str(logs), "purge_step": step + 1}
        if name == "wandb":
            return {"dir": str(logs), "name": run, "id": _run_id(logs, new=step == 0), "resume": "allow"}
        others: dict[str, dict[str, Any]] = {
            "trackio": {"name": run, "resume": "allow"},
            "dvclive": {"dir": str(logs / "dvclive"), "resume": step > 0},
            "swanlab": {"log_dir": str(logs), "name": run},
            "aim": {"logging_dir": str(logs)},
            "mlflow": {"run_name": run},
            "clearml": {"task_name": run},
        }
        return others.get(name, {})

    def _each(self, action: Callable[[str], None]) -> None:
        for name in list(self._open):
            try:
                action(name)
            except Exception as error:  # a network that is gone must not take the training with it
                del self._open[name]
                reason = (str(error).splitlines() or [""])[0]
                self._say(f"warning: {name} failed ({type(error).__name__}: {reason}); training goes on without it")


def flat(settings: dict[str, Any], prefix: str = "") -> dict[str, int | float | str | bool]:
    """Settings, of JSON's types, as trackers take them: dotted names, plain values, without those that are None."""
    found: dict[str, int | float | str | bool] = {}
    for name, value in settings.items():
        key = f"{prefix}{name}"
        if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, dict):
            found |= flat(value, f"{key}.")
        elif value is not None:
            found[key] = ", ".join(map(str, value)) if isinstance(value, list) else value
    return found


def _run_id(logs: Path, new: bool) -> str:
    """A name for the stage's run that a resumed stage finds again, and a new one in the same folder does not."""
    path = logs / "run_id"
    if new or not path.is_file():
        replace_text(path, uuid.uuid4().hex)
    return path.read_text(encoding="utf-8")


def be_quiet() -> None:
    """Leave the terminal to our own lines: no bars for loading small files, no notes about tied weights."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)  # each retry of a request
    # peft 0.21 asks transformers 5.24 by the old name
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
    # TRL names another way, which is none for a model that it is handed; it goes with TRL 2, which is not taken yet
    warnings.filterwarnings("ignore", "`use_liger_kernel=True` is deprecated", FutureWarning)


def write_row(folder: Path, row: dict[str, Any]) -> None:
    """Add a row to metrics.jsonl."""
    with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def forget_rows_after(folder: Path, step: int) -> None:
    """Drop the rows of metrics and samples that a lost stretch wrote."""
    for path in (folder / "metrics.jsonl", folder / "samples.jsonl"):
        if path.exists():
            rows = [line for line in path.read_text(encoding="utf-8").split("\n") if line.endswith("}")]
            kept = [line for line in rows if json.loads(line).get("step", 0) <= step]
            replace_text(path, "".join(line + "\n" for line in kept))


def write_status(folder: Path, state: str, step: int, steps: int, message: str, code: int | None = None) -> None:
    """status.json: what the orchestrator and `rlhf status` read while the stage runs; `code` is that of a stop."""
    content = {"state": state, "step": step, "steps": steps, "message": message}
    content |= {} if code is None else {"code": code}
    replace_text(folder / "status.json", json.dumps(content), sync=False)  # at every line of metrics


def tell_failure(folder: Path, state: str, message: str) -> None:
    """One line for the person who started this, or for the orchestrator, which tells it on; the rest in error.log.

    The process that fails first tells: the others may only fail because it is gone.
    """
    message = mask(message)
    if "RLHF_RUN" not in os.environ:
        print(f"error: {message}", file=sys.stderr)
    if not folder.is_dir() or Artifact(folder).sealed or (folder / "error.log").exists():
        return
    with suppress(OSError):  # where nothing can be written, which may be what failed, the line is all there is
        if state == "failed":
            replace_text(folder / "error.log", mask(traceback.format_exc()))
        write_status(folder, state, 0, 0, message)


def plain(metrics: dict[str, Any]) -> dict[str, Any]:
    """The metrics with plain numbers in place of tensors."""
    return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in metrics.items()}


def check_finite(metrics: dict[str, Any], stage: str) -> None:
    """End a run whose numbers are none any more, before its model is sealed and believed."""
    for name, value in metrics.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise RuntimeError(f"{name} is {value}: training diverged; lower {learning_rates(stage)}")


def learning_rates(stage: str) -> str:
    """The settings that make a stage's steps smaller."""
    return "ppo.learning_rate or ppo.critic_learning_rate" if stage == "ppo" else f"{stage}.learning_rate"


def peak_memory(device: torch.device) -> int:
    """Most bytes that this process has held so far: in tensors on a CUDA device, elsewhere resident in memory.

    The latter is of the process's whole life: where stages share one, a stage's peak may be that of one before it.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
