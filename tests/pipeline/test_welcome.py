"""What `rlhf` alone says, and what is shown while one waits."""

import io
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from threading import Condition
from typing import Any

import pytest
from pipeline_world import FakeStages

from rlhf.pipeline import progress
from rlhf.pipeline.progress import waiting

Call = Callable[..., tuple[int, str, str]]


def test_alone_in_an_empty_folder_it_says_how_to_begin(
    tmp_path: Path, rlhf: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = rlhf()
    assert (code, err) == (0, "")
    for command in ("rlhf run demo", "rlhf init my-run FILES", "rlhf --help", "rlhf --install-completion"):
        assert command in out
    assert "here:" not in out
    assert len(out.splitlines()) < 15


def test_it_names_recipes_and_how_to_go_on_with_each_run(world: Path, stages: FakeStages, rlhf: Call) -> None:
    assert rlhf("run", "recipe.yaml", "--run-dir", "runs/finished")[0] == 0
    assert rlhf("run", "recipe.yaml", "--to", "sft")[0] == 0
    Path("other.yaml").write_text("a: 1\n")
    Path("runs/broken").mkdir()
    Path("runs/broken/summary.json").write_text("{")
    lines = [line.split("  ") for line in rlhf()[1].splitlines() if line.startswith("  rlhf ")]
    told = {words[1]: words[-1].strip() for words in lines}
    assert told["rlhf run recipe.yaml"] == "pretrain, sft, reward, ppo"
    assert told["rlhf run runs/recipe/recipe.yaml --run-dir runs/recipe"] == "reward not begun; this goes on"
    assert told["rlhf chat runs/finished"] == "finished; or read runs/finished/report.html"
    assert "cannot be read" in told["rlhf verify runs/broken"]
    assert not any("other.yaml" in command for command in told)


def test_each_command_can_be_copied_where_names_have_spaces(world: Path, stages: FakeStages, rlhf: Call) -> None:
    Path("recipe.yaml").rename("my recipe.yaml")
    for folder, words in (("a run", ["--to", "sft"]), ("its end", []), ("runs/no manifest", [])):
        assert rlhf("run", "my recipe.yaml", "--run-dir", folder, *words)[0] == 0
    Path("runs/broken one").mkdir()
    Path("runs/broken one/summary.json").write_text("{")
    next(Path("runs/no manifest").glob("ppo-*/manifest.json")).unlink()
    lines = [line.strip().split("  ")[0] for line in rlhf()[1].splitlines()]
    told = [shlex.split(line)[1:] for line in lines if line.startswith("rlhf ")]
    for words in (
        ["run", "my recipe.yaml"], ["run", "a run/recipe.yaml", "--run-dir", "a run"], ["chat", "its end"],
        ["verify", "runs/no manifest"], ["verify", "runs/broken one"],
    ):  # fmt: skip
        assert words in told


@pytest.mark.parametrize("damage", ["cut", "manifest gone", "model gone", "no folder named"])
def test_no_chat_is_suggested_with_a_run_that_is_damaged(
    world: Path, stages: FakeStages, rlhf: Call, damage: str
) -> None:
    assert rlhf("run", "recipe.yaml", "--run-dir", "run")[0] == 0
    assert "rlhf chat run " in rlhf()[1]
    (folder,) = Path("run").glob("ppo-*")
    if damage == "cut":
        (folder / "manifest.json").write_text('{"files": ')
    elif damage == "no folder named":
        summary = json.loads(Path("run/summary.json").read_text())
        summary["stages"]["ppo"]["folder"] = None
        Path("run/summary.json").write_text(json.dumps(summary))
    elif damage == "manifest gone":
        (folder / "manifest.json").unlink()
    else:
        next(path for path in (folder / "model").rglob("*") if path.is_file()).unlink()
    code, out, _ = rlhf()
    assert code == 0
    assert "rlhf chat" not in out
    assert "rlhf verify run  " in out


def test_the_command_that_it_names_goes_on(world: Path, stages: FakeStages, rlhf: Call) -> None:
    def broken(folder: Path) -> None:
        raise OSError("disk full")

    stages.in_stage["sft"] = broken
    assert rlhf("run", "recipe.yaml")[0] == 1
    (line,) = [line for line in rlhf()[1].splitlines() if "--run-dir" in line]
    assert "sft failed at step 3 of 10" in line
    del stages.in_stage["sft"]
    words = line.split("  ")[1].split()[1:]
    assert rlhf(*words)[0] == 0
    assert {entry["status"] for entry in json.loads(rlhf("status", "runs/recipe", "--json")[1])["stages"].values()} == {
        "done"
    }


def test_a_shell_is_told_what_could_be_typed_next(rlhf: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["rlhf"])
    assert "_RLHF_COMPLETE" in rlhf("--show-completion", "bash")[1]
    monkeypatch.setenv("_RLHF_COMPLETE", "complete_bash")
    for typed, expected in (("rlhf st", {"status"}), ("rlhf data c", {"check", "convert"})):
        monkeypatch.setenv("COMP_WORDS", typed)
        monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
        assert set(rlhf()[1].split()) == expected


class Terminal(io.StringIO):
    """One that can be waited for to show something."""

    def __init__(self) -> None:
        super().__init__()
        self._came = Condition()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._came:
            self._came.notify_all()
            return super().write(text)

    def shows(self, text: str) -> bool:
        """Whether it does at last; what never comes is waited for for long."""
        with self._came:
            return self._came.wait_for(lambda: text in self.getvalue(), timeout=300)


def watch(monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO) -> None:
    """Have it for stderr. Not in a fixture: between it and the test pytest puts a stderr of its own in place."""
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")


def test_a_long_wait_says_for_what_and_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    watch(monkeypatch, shown := Terminal())
    with waiting("hashing") as tell:
        assert shown.shows("hashing")
        tell("half [of] it")
        assert shown.shows("half [of] it")


class Held:
    """A timer whose time is up when the test says so."""

    def __init__(self, seconds: float, function: Callable[[], None]) -> None:
        self.function = function
        self.has_begun = self.is_off = False

    def start(self) -> None:
        self.has_begun = True

    def cancel(self) -> None:
        self.is_off = True


def test_a_short_wait_says_nothing_nor_does_one_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    timers: list[Held] = []

    def timer(*arguments: Any) -> Held:
        timers.append(Held(*arguments))
        return timers[-1]

    monkeypatch.setattr(progress, "Timer", timer)
    watch(monkeypatch, shown := Terminal())
    with waiting("hashing") as tell:
        tell("half")
    (one,) = timers
    assert one.has_begun
    assert one.is_off
    one.function()  # its time was up in that very moment
    assert shown.getvalue() == ""
    watch(monkeypatch, elsewhere := io.StringIO())
    with waiting("hashing") as tell:
        tell("half")
    assert timers == [one]  # nothing is to come
    assert elsewhere.getvalue() == ""
