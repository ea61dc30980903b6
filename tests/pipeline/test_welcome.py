"""What `rlhf` alone says, and what is shown while one waits."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from time import monotonic, sleep

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
    def isatty(self) -> bool:
        return True


def impatient(monkeypatch: pytest.MonkeyPatch, terminal: io.StringIO) -> None:
    """Have it for stderr, and nobody before it who waits long. Not in a fixture: between it and the test pytest puts
    a stderr of its own in place."""
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    monkeypatch.setenv("TERM", "xterm")


def test_a_long_wait_says_for_what_and_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(monkeypatch, shown := Terminal())
    with waiting("hashing") as tell:
        come(shown, "hashing")
        tell("half [of] it")
        come(shown, "half [of] it")


def come(terminal: Terminal, text: str) -> None:
    """Wait until it is shown."""
    until = monotonic() + 20
    while text not in terminal.getvalue():
        assert monotonic() < until
        sleep(0.02)


def test_a_short_wait_says_nothing_nor_does_one_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, seconds in ((Terminal(), 0.0), (io.StringIO(), 0.1)):
        impatient(monkeypatch, stream)
        with waiting("hashing") as tell:
            tell("half")
            sleep(seconds)
        sleep(0.1)
        assert stream.getvalue() == ""
