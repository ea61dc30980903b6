"""Benchmarks can be started: what they take from elsewhere is there. What they measure is theirs to say."""

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "benchmarks"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_finds_all_that_it_imports(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    assert "__file__" in runpy.run_path(str(path), run_name="not main")
