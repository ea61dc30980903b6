"""`rlhf sample` and `rlhf judge` as commands: what they pass on, refuse and print."""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rlhf.data.feedback.records import Answer
from rlhf.data.feedback.store import Store
from rlhf.pipeline import progress, sample_cli

Rlhf = Callable[..., tuple[int, str, str]]
JUDGE = "def marks(prompts, responses):\n    return [text.count('!') for text in responses]\n"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "cli_judge.py").write_text(JUDGE + "def broken(prompts, responses):\n    return 1 / 0\n")
    with Store.create("s.sqlite") as made:
        made.add_answers(made.add_prompt("p"), [Answer("a!", "m"), Answer("b", "m")])
    return "s.sqlite"


def test_sampling_turns_into_a_process_of_its_own(rlhf: Rlhf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "run/sft-1234/model"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.json").touch()
    (tmp_path / "run/sft-1234/manifest.json").write_text('{"files": {}, "made_with": {"finished": ""}}')
    passed: list[tuple[str, list[str]]] = []
    monkeypatch.setattr(sample_cli, "become", lambda module, words: passed.append((module, words)))
    options = ["--num-answers", "2", "--temperature", "0.7,1.0", "--seed", "3", "--round", "2", "--max-dropped", "0.1"]
    options += ["--overlap", "5"]
    words = ["--prompts", "p.csv", "--map", "prompt=question", "--store", "s", *options]
    assert rlhf("sample", "a", "run", "run/sft-1234", *words) == (0, "", "")
    ((module, found),) = passed
    assert module == "rlhf.stages.sample"
    assert found[:3] == ["a", *["run/sft-1234/model"] * 2]
    source = json.loads(found[found.index("--prompts") + 1])
    assert (source["path"], source["map"]) == ("p.csv", {"prompt": "question"})
    given = dict(zip(found[3::2], found[4::2], strict=True))
    assert given | dict(zip(options[::2], options[1::2], strict=True)) == given


def test_a_function_judges_and_running_again_finds_nothing_to_do(store: str, rlhf: Rlhf) -> None:
    code, out, err = rlhf("judge", store, "--with", "cli_judge:marks")
    assert (code, err) == (0, "")
    assert "s.sqlite: 1 prompts judged by cli_judge:marks, 0 not" in out
    assert "0 prompts judged" in rlhf("judge", store, "--with", "cli_judge:marks")[1]


def test_a_function_that_breaks_is_a_failure_and_one_that_is_not_there_a_refusal(store: str, rlhf: Rlhf) -> None:
    code, _, err = rlhf("judge", store, "--with", "cli_judge:broken")
    assert code == 1
    assert "cli_judge:broken: ZeroDivisionError" in err
    code, _, err = rlhf("judge", store, "--with", "cli_judge:nothing")
    assert code == 2
    assert "cli_judge:nothing" in err


def test_replies_that_can_no_longer_be_written_are_a_failure(
    store: str, rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: Any) -> None:
        raise PermissionError(13, "Permission denied", "s.sqlite.replies.jsonl")

    monkeypatch.setattr("rlhf.stages.judging.judge_store", denied)
    code, _, err = rlhf("judge", store, "--with", "cli_judge:marks")
    assert (code, err.startswith("error: s.sqlite.replies.jsonl: Permission denied; ")) == (1, True)


def test_a_server_that_is_not_there_is_a_failure(store: str, rlhf: Rlhf) -> None:
    code, out, err = rlhf("judge", store, "--endpoint", "http://127.0.0.1:1", "--model", "m")
    assert code == 1
    assert re.search("[12] requests, 0 tokens", out)  # of two questions about a prompt, when the first has failed
    assert "1 prompts could not be judged" in err
    assert "cannot be reached" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say who judges"),
        (["--with", "a:b", "--endpoint", "http://h", "--model", "m"], "say who judges"),
        (["--endpoint", "http://h"], "say who judges"),
        (["--with", "a:b", "--key-variable", "K"], "--key-variable goes with --endpoint"),
        (["--endpoint", "http://h", "--model", "m", "--key-variable", "NO_SUCH_KEY"], "no NO_SUCH_KEY"),
    ],
)
def test_who_judges_must_be_said(store: str, rlhf: Rlhf, words: list[str], message: str) -> None:
    code, _, err = rlhf("judge", store, *words)
    assert code == 2
    assert message in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--with", "cli_judge:marks"], "asking the judge cli_judge:marks"),
        (["--endpoint", "http://127.0.0.1:1", "--model", "m"], "asking the judge m at http://127.0.0.1:1"),
    ],
)
def test_who_is_asked_is_shown_while_one_waits(
    store: str, rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch, words: list[str], told: str
) -> None:
    waited: list[str] = []

    @contextmanager
    def telling(what: str, say: Callable[[str], None]) -> Iterator[Callable[[str], None]]:
        waited.append(what)
        yield say

    monkeypatch.setattr(progress, "telling", telling)
    rlhf("judge", store, *words)
    assert waited == [told]
