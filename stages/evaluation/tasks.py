"""Tasks of EleutherAI's lm-eval (an extra), on the model of any stage."""

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlhf.data.errors import SettingsError
from rlhf.stages.evaluation.config import EvaluationSettings
from rlhf.stages.evaluation.subjects import Subject


def task_manager(asked: EvaluationSettings) -> Any:
    """lm-eval's list of tasks, those of one's own among them. Raises SettingsError for what cannot be run."""
    if importlib.util.find_spec("lm_eval") is None:
        raise SettingsError("--tasks needs lm-eval, which is not installed; pip install 'rlhf-toolkit[eval]'")
    from lm_eval.tasks import TaskManager

    if asked.include_path is not None and not Path(asked.include_path).is_dir():
        raise SettingsError(f"--include-path {asked.include_path}: no folder with tasks")
    manager = TaskManager(include_path=asked.include_path)
    if unknown := sorted(set(asked.tasks) - set(manager.all_tasks)):
        raise SettingsError(f"--tasks {','.join(unknown)}: lm-eval knows no such task; --include-path names your own")
    return manager


def run_tasks(
    subjects: Mapping[str, Subject], tasks: list[str], manager: Any, device: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """{model: {task: {metric: figure}}}, as lm-eval names them. Without network where task and data are local files."""
    from lm_eval import simple_evaluate

    found = {}
    for name, subject in subjects.items():
        say(f"{name}: lm-eval on {', '.join(tasks)}")
        told = simple_evaluate(
            model="hf", model_args={"pretrained": subject.reference}, tasks=tasks, device=device, task_manager=manager,
            batch_size=1 if device == "cpu" else "auto",
        )  # fmt: skip
        found[name] = {task: _numbers(metrics) for task, metrics in told["results"].items()}
    return found


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if isinstance(value, int | float)}
