"""benchmarks/demo.py --kill: only a run that was killed midway and resumed counts."""

import importlib.util
import sys
import textwrap
from pathlib import Path
from types import ModuleType

import pytest

# Stands in for `rlhf run demo seed=… --run-dir …`: four stages of ten steps, a checkpoint after each.
RLHF = """
import json, os, sys, time
from pathlib import Path
run = Path(sys.argv[-1])
for stage in ("pretrain", "sft", "reward", "ppo"):
    folder = run / f"{stage}-0123"
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / "manifest.json").exists():
        continue
    last = folder / "checkpoint"
    start = int(last.read_text()) if last.exists() and RESUMES else 0
    if start:
        print(f"{stage}: resuming from step {start} of 10", flush=True)
    for step in range(start, 10):
        told = {"state": "running", "step": step + 1, "steps": 10}
        for name, text in (("status.json", json.dumps(told)), ("checkpoint", str(step))):
            (folder / "new").write_text(text)
            os.replace(folder / "new", folder / name)
        time.sleep(PAUSE)
    weights = {"files": {"model/model.safetensors": sys.argv[3]}}
    (folder / "manifest.json").write_text(json.dumps(weights))
"""


@pytest.fixture
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "demo_benchmark", Path(__file__).parents[2] / "benchmarks" / "demo.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def killed_run(demo: ModuleType, folder: Path, seed: int = 1, resumes: bool = True, pause: float = 0.03) -> bool:
    script = RLHF.replace("RESUMES", str(resumes)).replace("PAUSE", str(pause))
    demo.RLHF = [sys.executable, "-c", textwrap.dedent(script)]
    demo.subprocess.run([*demo.RLHF, "run", "demo", "seed=1", folder / "undisturbed"], check=True)
    good: bool = demo.killed_run(seed, folder / "killed", folder / "undisturbed")
    return good


def test_a_stage_killed_midway_and_resumed_counts(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert killed_run(demo, tmp_path)
    said = capsys.readouterr().out
    assert said.count("killed at step ") == said.count("weights equal") == 4
    assert "step None" not in said


def test_the_same_seed_is_run(demo: ModuleType, tmp_path: Path) -> None:
    assert not killed_run(demo, tmp_path, seed=2)


def test_a_stage_that_starts_over_is_a_miss(demo: ModuleType, tmp_path: Path) -> None:
    assert not killed_run(demo, tmp_path, resumes=False)


def test_a_stage_that_was_never_killed_is_a_miss(demo: ModuleType, tmp_path: Path) -> None:
    assert not killed_run(demo, tmp_path, pause=0.0)
