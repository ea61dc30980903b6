"""The command line: with which code and which words it ends where it refuses, fails or is stopped."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pipeline_world import FakeStages, contents

Call = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "nowhere"), "nowhere: no such recipe"),
        (("run", "recipe.yaml", "ppo.kl_coeff=1"), "ppo: no setting 'kl_coeff'; did you mean 'kl_coef'?"),
        (("run", "recipe.yaml", "ppo.kl_coef=much"), "ppo.kl_coef: input should be a valid number"),
        (("run", "recipe.yaml", "sft.report_to=wandbb"), "sft.report_to: no tracker 'wandbb'; did you mean 'wandb'?"),
        (("run", "recipe.yaml", "--from", "rewrad"), "did you mean 'reward'?"),
        (("run", "recipe.yaml", "text.jsonl"), "'text.jsonl': not an override"),
        (("run", "recipe.yaml", "sft.data=gone.jsonl"), "gone.jsonl"),
        (("run", "recipe.yaml", "--run-dir", "text.jsonl"), "--run-dir text.jsonl: "),
        (("run", "recipe.yaml", "--run-dir", "/proc/run"), "--run-dir /proc/run: "),
        (("plan", "recipe.yaml", "sft.data=gone.jsonl"), "gone.jsonl"),
        (("status", "nowhere"), "nowhere: not a run folder"),
        (("report", "nowhere"), "nowhere: not a run folder"),
        (("eval", "nowhere"), "nowhere: not a run folder"),
        (("data", "check", "gone.jsonl", "--as", "text"), "gone.jsonl"),
        (("data", "check", "text.jsonl", "--as", "prose"), "prose"),
        (("data", "check", "prompts.jsonl", "--as", "prompts", "--map", "prompt"), "--map prompt: write NAME=COLUMN"),
        (("rnu", "recipe.yaml"), "Did you mean 'run'"),
    ],
)
def test_bad_input_is_refused_with_one_message(
    world: Path,
    stages: FakeStages,
    rlhf: Call,
    words: tuple[str, ...],
    message: str,
) -> None:
    before = contents(world)
    code, out, err = rlhf(*words)
    assert code == 2
    assert message in err
    assert out == ""
    assert "Traceback" not in err
    assert err.count("error: ") <= 1
    assert contents(world) == before
    assert stages.trained == []


def test_debug_shows_the_traceback_wherever_it_stands(world: Path, rlhf: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (("--debug", "run", "nowhere"), ("run", "nowhere", "--debug")):
        monkeypatch.setenv("RLHF_DEBUG", "")
        code, _, err = rlhf(*words)
        assert code == 2
        assert "Traceback" in err
        assert os.environ["RLHF_DEBUG"]  # the processes of stages read it
        assert err.splitlines()[-1].startswith("error: nowhere: no such recipe")


def test_a_broken_stage_ends_with_code_1_and_one_line(world: Path, stages: FakeStages, rlhf: Call) -> None:
    def out_of_memory(folder: Path) -> None:
        raise MemoryError("64 GiB wanted")

    stages.in_stage["pretrain"] = out_of_memory
    code, _, err = rlhf("run", "recipe.yaml")
    assert code == 1
    assert len(err.splitlines()) == 1
    assert err.startswith("error: pretrain: MemoryError: 64 GiB wanted; no checkpoint yet (traceback in runs/recipe/")


def test_a_mistake_of_ours_ends_with_code_1(
    world: Path,
    rlhf: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlhf.pipeline.plan.make_plan", lambda *_: {}["oops"])
    code, _, err = rlhf("plan", "recipe.yaml")
    assert (code, err) == (1, "error: KeyError: 'oops' (--debug shows where)\n")


def test_a_connection_that_is_lost_is_no_mistake_of_ours(
    world: Path, rlhf: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    def load_dataset(*_: object, **__: object) -> Iterator[dict[str, str]]:
        yield {"prompt": "p"}
        raise ConnectionError("gone")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    code, _, err = rlhf("data", "check", "owner/set", "--as", "prompts")
    said = "error: owner/set: the connection to the hub was lost while it was read (gone); run again\n"
    assert (code, err) == (1, said)


def raising(error: BaseException) -> Callable[..., None]:
    def raise_it(*_: object, **__: object) -> None:
        raise error

    return raise_it


@pytest.mark.parametrize(
    ("words", "fails"),
    [
        (("plan", "recipe.yaml"), "plan.make_plan"),
        (("run", "recipe.yaml"), "runner.make_plan"),
        (("run", "recipe.yaml", "--run-dir", "run"), "lock._told"),
        (("status", "run"), "summary.read_summary"),
        (("report", "run"), "report.run.read_run"),
        (("eval", "run"), "evaluation.finished"),
        (("estimate", "recipe.yaml"), "recipe.load_recipe"),
        (("clean", "run"), "clean.find"),
        (("init", "mine", "text.jsonl"), "init.recognise"),
    ],
)
def test_a_place_that_a_command_may_not_use_is_refused(
    world: Path,
    stages: FakeStages,
    rlhf: Call,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    fails: str,
) -> None:
    rlhf("run", "recipe.yaml", "--run-dir", "run", "--to", "pretrain")
    before = contents(world)
    for number, said in ((13, "change its mode, or that of its folder, or name another place"), (30, "name another")):
        monkeypatch.setattr(f"rlhf.pipeline.{fails}", raising(OSError(number, os.strerror(number), "there")))
        code, _, err = rlhf(*words)
        assert (code, err.startswith(f"error: there: {os.strerror(number)}; {said}")) == (2, True)
    monkeypatch.setattr(f"rlhf.pipeline.{fails}", raising(FileNotFoundError(2, "No such file")))  # as os.getcwd
    assert rlhf(*words)[0] == 2
    monkeypatch.setattr(f"rlhf.pipeline.{fails}", raising(OSError(28, "No space left on device")))  # of no place
    assert rlhf(*words)[0] == 1
    assert contents(world) == before


@pytest.mark.parametrize(
    ("words", "fails"),
    [
        (("run", "recipe.yaml", "--run-dir", "run"), "runner.write_recipe"),
        (("run", "recipe.yaml", "--run-dir", "run"), "runner._finished"),
        (("clean", "run"), "clean.delete"),
        (("eval", "run"), ""),  # in the evaluation itself
    ],
)
def test_a_place_that_cannot_be_used_once_something_has_begun_is_a_failure(
    world: Path,
    stages: FakeStages,
    rlhf: Call,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    fails: str,
) -> None:
    rlhf("run", "recipe.yaml", "--run-dir", "run", "--to", "pretrain")
    if words[0] == "clean":
        Path("run/.summary.json.1.writing").touch()
    denied = raising(PermissionError(13, "Permission denied", "there"))
    if words[0] == "eval":
        stages.in_evaluation = denied
    else:
        monkeypatch.setattr(f"rlhf.pipeline.{fails}", denied)
    code, _, err = rlhf(*words)
    assert (code, err.startswith("error: there: Permission denied; change its mode")) == (1, True)


def test_data_check_refuses_what_leaves_nothing_and_says_where_rows_are_left_out(world: Path, rlhf: Call) -> None:
    Path("bad.jsonl").write_text('{"prompt": ""}\n' * 2)
    code, out, _ = rlhf("data", "check", "bad.jsonl", "--as", "prompts")
    assert code == 2
    assert "(rows 1, 2)" in out
    Path("bad.jsonl").write_text('{"prompt": ""}\n' * 9 + '{"prompt": "a"}\n')
    code, out, _ = rlhf("data", "check", "bad.jsonl", "--as", "prompts")
    assert code == 0
    assert "(rows 1, 2, 3, 4, 5, …)" in out


def test_a_recipe_that_lies_in_the_run_folder_is_never_written_over(
    world: Path, stages: FakeStages, rlhf: Call
) -> None:
    before = contents(world)
    code, _, err = rlhf("run", "recipe.yaml", "--run-dir", ".")
    assert (code, err) == (
        2,
        "error: recipe.yaml: the run would write over the recipe that it reads; choose another --run-dir\n",
    )
    assert contents(world) == before
    assert rlhf("run", "recipe.yaml", "--run-dir", "run")[0] == 0
    assert rlhf("run", "run/recipe.yaml", "--run-dir", "run")[0] == 0
    code, _, err = rlhf("run", "run/recipe.yaml", "sft.num_epochs=2", "--run-dir", "run")
    assert code == 2
    assert "run/recipe.yaml: the run would write over" in err


@pytest.mark.parametrize("text", ["", "[]", '{"files": {'])
def test_a_damaged_manifest_is_refused_with_its_path(world: Path, stages: FakeStages, rlhf: Call, text: str) -> None:
    rlhf("run", "recipe.yaml", "--run-dir", "run")
    manifest = next(Path("run").glob("sft-*")) / "manifest.json"
    manifest.write_text(text)
    options = ("recipe.yaml", "--run-dir", "run")
    for words in (("plan", *options), ("run", *options)):
        code, _, err = rlhf(*words)
        assert code == 2
        assert err.startswith(f"error: {manifest}: is damaged; move its folder away")
    assert rlhf("status", "run")[0] == 0


def test_a_process_that_it_became_shows_no_traceback(world: Path) -> None:
    Path("broken.py").write_text("import sys\nif __name__ == '__main__':\n    raise OSError(f'no {sys.argv[1]}')\n")
    code = "from rlhf.pipeline.tools_cli import become; become('broken', ['disk'])"
    for debug, shown in (("", False), ("1", True)):
        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False,
            env=os.environ | {"RLHF_DEBUG": debug},
        )  # fmt: skip
        assert ended.returncode == 1
        assert ended.stderr.splitlines()[-1] == "OSError: no disk"
        assert ("Traceback" in ended.stderr) == shown


def test_ctrl_c_ends_it_without_a_word_while_it_imports_what_it_needs(world: Path) -> None:
    for imported in ("rlhf.pipeline.commands", "typer"):
        code = f"""
        import os, signal, sys
        from rlhf.pipeline.cli import main
        class Pressed:
            def find_spec(self, name, path=None, target=None):
                if name == {imported!r}:
                    os.kill(os.getpid(), signal.SIGINT)
        sys.meta_path.insert(0, Pressed())
        sys.argv[1:] = ["--help"]
        main()
        """
        ended = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
        )
        assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_ctrl_c_ends_a_process_that_it_became_without_a_word(world: Path) -> None:
    Path("slow.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    code = "from rlhf.pipeline.tools_cli import become; become('slow', [])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_with_its_code_and_says_how_to_go_on(world: Path, number: signal.Signals) -> None:
    # The stage has not set handlers of its own yet, as while it imports torch. What hangs ends itself at last.
    code = """
    import faulthandler, sys, time, types
    faulthandler.dump_traceback_later(300, exit=True)
    from rlhf.pipeline import cli, launch
    stage = types.ModuleType("rlhf.stages.pretrain.train")
    stage.train = lambda folder: (print("began", flush=True), time.sleep(60))
    sys.modules["rlhf.stages.pretrain.train"] = stage
    launch.stays_in_process = lambda *_: True
    cli.main(["run", "recipe.yaml"])
    """
    words = [sys.executable, "-c", textwrap.dedent(code)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert "began\n" in process.stdout  # reads on until then
    process.send_signal(number)
    _, err = process.communicate()
    assert process.returncode == 128 + number
    assert err == "pretrain: stopped; no checkpoint yet; run again\n"
    stages = json.loads(Path("runs/recipe/summary.json").read_text())["stages"]
    assert stages["pretrain"]["status"] == "stopped"


def test_status_of_a_stages_folder_says_what_it_is(world: Path, stages: FakeStages, rlhf: Call) -> None:
    rlhf("pretrain", "recipe.yaml", "--run-dir", "one")
    [done] = Path("one").glob("pretrain-*")
    for command in ("status", "verify", "clean", "eval", "report"):
        code, _, err = rlhf(command, str(done))
        assert (code, err) == (2, (
            f"error: {done}: not a run folder but that of one stage (done, its result is {done}); `rlhf status one`\n"
        ))  # fmt: skip
    by_hand = Path("by_hand")
    by_hand.mkdir()
    (by_hand / "settings.yaml").write_bytes((done / "settings.yaml").read_bytes())
    assert rlhf("status", "by_hand")[2].endswith("that of one stage (not begun)\n")
    (by_hand / "status.json").write_text('{"state": "stopped", "step": 3, "steps": 10, "message": ""}')
    assert rlhf("status", "by_hand")[2].endswith("that of one stage (stopped at step 3 of 10)\n")


def test_a_sweep_is_not_profiled(world: Path, stages: FakeStages, rlhf: Call) -> None:
    code, _, err = rlhf("pretrain", "recipe.yaml", "--run-dir", "one", "--sweep", "parts", "--profile")
    assert code == 2
    assert "--profile: records one stage" in err
