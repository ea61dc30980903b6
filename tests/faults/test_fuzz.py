"""Spoilt recipes and data end in success or in a message that names the place. benchmarks/fuzz.py has two thousand."""

import sys
import time
from pathlib import Path

import pytest
from faults_world import RECIPE, Server
from fuzzing import Case, Result, run_case
from spoilt_data import data_files
from spoilt_recipes import recipes

from rlhf.data.errors import RefusedError
from rlhf.pipeline import commands

NUM_CASES = 100


def failures(results: list[Result]) -> list[tuple[list[str], str, list[str], str]]:
    return [(r.case.words, r.case.what, r.problems, r.message[-300:]) for r in results if r.problems]


def test_spoilt_recipes_are_planned_or_refused(world: Path, server: Server) -> None:
    results = [run_case(case, world, server) for case in recipes(6, NUM_CASES, run_share=0.1)]
    assert failures(results) == []
    assert {result.code for result in results} == {0, 2}


def test_spoilt_data_is_counted_or_refused(world: Path, server: Server) -> None:
    (world / "good.yaml").write_text(RECIPE)
    results = [run_case(case, world, server) for case in data_files(6, NUM_CASES, run_share=0.1)]
    assert failures(results) == []
    assert {result.code for result in results} == {0, 2}
    assert any(result.case.words[0] == "run" for result in results)


@pytest.mark.parametrize(
    ("breaks", "problem"),
    [
        ("raise TypeError('x')", "ends with 1"),
        ("raise RefusedError('no')", "names no place"),
        ("open('stray', 'w').close()", "touches stray"),
        ("print('Traceback', file=sys.stderr)", "shows a traceback"),
        ("time.sleep(600)", "hangs for more than 1 s"),
    ],
)
def test_the_fuzzer_sees_what_is_wrong(
    world: Path, server: Server, monkeypatch: pytest.MonkeyPatch, breaks: str, problem: str
) -> None:
    if "hangs" in problem:
        monkeypatch.setattr("fuzzing.SECONDS", 1)
    monkeypatch.setattr(
        commands, "app", lambda *_, **__: exec(breaks, {"sys": sys, "time": time, "RefusedError": RefusedError})
    )
    result = run_case(Case("", "recipe.yaml", b"", ["plan", "recipe.yaml"]), world, server)
    assert result.problems == [problem]
