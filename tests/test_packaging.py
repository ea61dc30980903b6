import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from wheels import PACKAGES, ROOT, build_wheel

HEAVY = {
    "starlette",
    "uvicorn",
    "torch",
    "transformers",
    "trl",
    "peft",
    "accelerate",
    "datasets",
    "matplotlib",
    "pandas",
}
# Nothing but what is installed may be found.
CLEAN = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("build"))


def python(code: str, cwd: Path, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=CLEAN | environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def test_the_wheel_holds_every_file_of_ours(wheel: Path) -> None:
    ours = {
        f"rlhf/{path.relative_to(ROOT).as_posix()}"
        for name in PACKAGES
        for path in (ROOT / name).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }
    assert {"rlhf/data/py.typed", "rlhf/stages/ppo/py.typed", "rlhf/recipes/demo.yaml"} <= ours
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert ours - packed == set()


def test_the_wheel_holds_nothing_else(wheel: Path) -> None:
    """No top-level `data` or `stages`, which would shadow those of other people."""
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert tops == {"rlhf", "rlhf_toolkit-0.1.0.dist-info"}


@pytest.mark.parametrize("install", ["as it is installed here", "from the wheel"])
def test_ours_is_found_beside_folders_of_the_same_name(install: str, wheel: Path, tmp_path: Path) -> None:
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise SystemExit('the folder of the user was imported')")
    environment = {}
    if install == "from the wheel":
        zipfile.ZipFile(wheel).extractall(tmp_path / "site")
        environment["PYTHONPATH"] = str(tmp_path / "site")
    modules = "rlhf.data.rows, rlhf.stages.artifact, rlhf.stages.ppo.config, rlhf.pipeline.cli, rlhf.recipes"
    found = python(f"import {modules}; print(rlhf.stages.artifact.__file__)", tmp_path, **environment)
    expected = ROOT if install != "from the wheel" else tmp_path / "site" / "rlhf"
    assert Path(found).resolve() == (expected / "stages" / "artifact.py").resolve()


@pytest.mark.parametrize("module", ["cli", "plan", "runner", "report"])
def test_the_pipeline_starts_without_the_heavy_libraries(module: str, tmp_path: Path) -> None:
    names = "sorted({name.split('.')[0] for name in sys.modules})"
    loaded = set(python(f"import sys, rlhf.pipeline.{module}; print(*{names})", tmp_path).split())
    assert "rlhf" in loaded
    assert loaded & HEAVY == set()
