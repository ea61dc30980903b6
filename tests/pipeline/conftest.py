"""A working directory with a recipe of four stages, and stages that only pretend to train."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import huggingface_hub
import pytest
from once import make_once
from pipeline_world import ROWS, FakeStages, write_recipe, write_rows

from rlhf.pipeline import cli, evaluation, launch, report
from rlhf.pipeline import init as init_module
from rlhf.stages.artifact import STAGES

make_once()


@pytest.fixture(autouse=True)
def _hub_has_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any name may be a model's on the hub, which is not asked."""
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url: None)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> FakeStages:
    fake = FakeStages()
    for stage in STAGES:
        module = ModuleType(f"rlhf.stages.{stage}.train")
        module.train = lambda folder, stage=stage: fake.train(stage, Path(folder))  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
    module = ModuleType("rlhf.stages.evaluation.evaluate")
    module.evaluate = fake.evaluate  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(evaluation, "stays_in_process", lambda *_: True)
    monkeypatch.setattr(launch, "stays_in_process", lambda *_: True)  # whatever this machine has
    monkeypatch.setattr(report, "render", fake.render)
    return fake


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with recipe.yaml and the four files of rows that it names."""
    monkeypatch.chdir(tmp_path)
    for name, rows in ROWS.items():
        write_rows(tmp_path / f"{name}.jsonl", rows)
    write_recipe(
        tmp_path,
        pretrain={"data": "text.jsonl"},
        sft={"data": "demonstrations.jsonl"},
        reward={"data": "rankings.jsonl", "learning_rate": 0.001},
        ppo={"data": "prompts.jsonl"},
    )
    return tmp_path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory of a machine without a GPU, for `rlhf init`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init_module, "visible_gpus", lambda: 0)
    return tmp_path


@pytest.fixture
def rlhf(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command line: exit code, stdout, stderr."""

    def call(*words: str) -> tuple[int, str, str]:
        code: object = 0
        try:
            cli.main(words)
        except SystemExit as stop:
            code = stop.code
        out, err = capsys.readouterr()
        return int(str(code or 0)), out, err

    return call
