"""The command line: exit codes, what goes where, and that it never waits for torch."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_world import FakeStages, contents

from rlhf.pipeline import cli

Call = Callable[..., tuple[int, str, str]]


def test_run_shows_stages_then_a_table_then_the_report(world: Path, stages: FakeStages, rlhf: Call) -> None:
    code, out, err = rlhf("run", "recipe.yaml", "--to", "sft")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].startswith("pretrain: run pretrain-")
    assert lines[1].startswith("pretrain: done in 0.")
    table = next(place for place, line in enumerate(lines) if line.startswith("stage "))
    assert [line.split()[:2] for line in lines[table : table + 5]] == [
        ["stage", "status"],
        ["pretrain", "done"],
        ["sft", "done"],
        ["reward", "planned"],
        ["ppo", "planned"],
    ]
    assert lines[-2] == "report: runs/recipe/report.html"
    assert lines[-1].startswith("next: rlhf chat runs/recipe, rlhf eval runs/recipe ")


def test_help_lists_the_commands_in_the_order_in_which_they_are_wanted(rlhf: Call) -> None:
    code, out, _ = rlhf("--help")
    listed = [line.split()[0] for line in out[out.index("Commands:") :].splitlines()[1:] if line[2:3].strip()]
    assert (code, listed) == (0, [
        "init", "run", "follow", "plan", "status", "pretrain", "sft", "reward", "ppo", "eval", "report", "estimate",
        "verify", "clean", "schema", "chat", "export", "sample", "judge", "rank", "data",
    ])  # fmt: skip


def test_plan_and_status_tell_and_touch_nothing(world: Path, stages: FakeStages, rlhf: Call) -> None:
    rlhf("run", "recipe.yaml", "--run-dir", "here")
    before = contents(world)
    code, out, _ = rlhf("plan", "recipe.yaml", "reward.learning_rate=2e-3", "--run-dir", "here")
    assert code == 0
    assert "reward.learning_rate 0.001 → 0.002" in out
    assert "its input reward will be new" in out
    code, out, _ = rlhf("status", "here", "--json")
    assert code == 0
    assert [s["status"] for s in json.loads(out)["stages"].values()] == ["done"] * 4
    assert contents(world) == before


def test_one_stage_alone_takes_its_input_from_the_run_folder_or_the_recipe(
    world: Path,
    stages: FakeStages,
    rlhf: Call,
) -> None:
    code, _, err = rlhf("sft", "recipe.yaml", "--run-dir", "one")
    assert code == 2
    assert "sft.model: not set, and one has no finished pretrain" in err
    assert not Path("one").exists()
    assert rlhf("sft", "recipe.yaml", "sft.model=owner/name", "--run-dir", "one")[0] == 0
    assert rlhf("reward", "recipe.yaml", "--run-dir", "one")[0] == 0
    assert stages.trained == ["sft", "reward"]
    assert rlhf("reward", "recipe.yaml", "--run-dir", "one", "--force")[0] == 0
    assert stages.trained == ["sft", "reward", "reward"]
    code, _, err = rlhf("ppo", "recipe.yaml", "ppo=null", "--run-dir", "one")
    assert code == 2
    assert "no section 'ppo'" in err


def test_status_marks_an_over_optimised_run(world: Path, stages: FakeStages, rlhf: Call) -> None:
    assert rlhf("run", "recipe.yaml", "--run-dir", "run")[0] == 0
    summary = json.loads(Path("run/summary.json").read_text())
    summary["stages"]["ppo"]["metrics"] |= {"over_optimised": True, "findings": ["kl_blow_up"]}
    Path("run/summary.json").write_text(json.dumps(summary))
    out = rlhf("status", "run")[1]
    assert [line.split("  ")[0] for line in out.splitlines() if "done, over-optimised" in line] == ["ppo"]
    assert json.loads(rlhf("status", "run", "--json")[1])["stages"]["ppo"]["status"] == "done"


def test_metrics_have_the_digits_of_the_report_and_all_of_them_in_json(
    world: Path, stages: FakeStages, rlhf: Call
) -> None:
    stages.metrics = {
        "pretrain": {"val_loss": 2.16449, "vocab_size": 50257},
        "ppo": {"true_quality": 0.37964, "win_rate": 0.84321, "score": -0.38725, "kl": 12.3456, "eos_share": 0.99123},
    }
    out = rlhf("run", "recipe.yaml", "--run-dir", "run")[1]
    for shown in (
        "val_loss 2.16  vocab_size 50,257", "true_quality 0.380  win_rate 0.84  score -0.387  kl 12.3  eos_share 0.99"
    ):  # fmt: skip
        assert out.count(shown) == 2  # at the end of the stage, and in the table
        assert shown in rlhf("status", "run")[1]
    told = json.loads(rlhf("status", "run", "--json")[1])["stages"]["ppo"]["metrics"]
    assert told == {"loss": 1.5, **stages.metrics["ppo"]}


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


def test_data_check_counts_rows(world: Path, rlhf: Call) -> None:
    code, out, _ = rlhf("data", "check", "rankings.jsonl", "--as", "preferences", "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["kind"], found["rows"], found["kept"], found["pairs"]) == ("preferences", 2, 2, 2)
    Path("body.jsonl").write_text('{"body": "words"}\n{"body": " "}\n')
    code, out, _ = rlhf("data", "check", "body.jsonl", "--as", "text", "--map", "text=body")
    assert code == 0
    assert "rows 2  kept 1" in out
    Path("faq.jsonl").write_text('{"question": "Who?", "answer": "Me."}\n')
    mapping = ("--map", "prompt=question", "--map", "response=answer")
    code, out, _ = rlhf("data", "check", "faq.jsonl", "--as", "demonstrations", *mapping)
    assert code == 0
    assert "rows 1  kept 1" in out


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


def test_chat_becomes_a_process_that_may_import_torch(rlhf: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, words: became.append(words))
    monkeypatch.setenv("RLHF_DEBUG", "")
    rlhf("chat", "owner/name", "--debug")
    monkeypatch.setenv("RLHF_DEBUG", "")
    rlhf("chat", "owner/name", "--temperature", "1.5", "--max-new-tokens", "9", "--multi-turn", "--seed", "3")
    chat = [sys.executable, "-m", "rlhf.stages.chat", "owner/name"]
    assert became[0] == [*chat, "--temperature", "0.7", "--max-new-tokens", "256"]
    assert became[1][:2] == [sys.executable, "-c"]
    assert became[1][5:] == ["--temperature", "1.5", "--max-new-tokens", "9", "--multi-turn", "--seed", "3"]


def test_attention_is_drawn_of_the_last_stage_or_the_named_one(
    world: Path, stages: FakeStages, rlhf: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    rlhf("run", "recipe.yaml", "--run-dir", "run", "--to", "sft")
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, words: became.append(words))
    rlhf("eval", "run", "--attention", "a fox")
    rlhf("eval", "run", "--attention", "a fox", "--stage", "pretrain")
    for words, stage in zip(became, ("sft", "pretrain"), strict=True):
        model = next(Path("run").glob(f"{stage}-*")) / "model"
        assert words[3:] == ["rlhf.stages.attention", str(model), "run/attention.html", "a fox"]
    for words, message in (
        (("--attention", "a", "--stage", "reward"), "--stage reward: not a stage with a language model"),
        (("--attention", "a", "--stage", "ppo"), "run: no finished ppo stage here"),
        (("--stage", "sft"), "--stage sft: goes with --attention TEXT"),
    ):
        code, _, err = rlhf("eval", "run", *words)
        assert (code, message in err) == (2, True)


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


def test_help_plan_status_and_a_finished_run_import_nothing_heavy(world: Path, stages: FakeStages) -> None:
    cli_run = ["run", "recipe.yaml", "--run-dir", "run"]
    with pytest.raises(SystemExit):
        cli.main(cli_run)
    for words in (["--help"], ["plan", "recipe.yaml", "--run-dir", "run"], ["status", "run"], cli_run):
        code = f"""
        import sys
        from rlhf.pipeline import cli
        try:
            cli.main({words!r})
        except SystemExit as ended:
            assert not ended.code
        heavy = {{"torch", "transformers", "datasets", "trl", "accelerate", "matplotlib", "pyarrow", "pandas"}}
        assert not heavy & set(sys.modules), heavy & set(sys.modules)
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True)


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


def test_profile_reaches_the_stage_and_tells_where_the_trace_lies(
    world: Path, stages: FakeStages, rlhf: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHF_PROFILE", "")  # so that what the command sets is taken back
    monkeypatch.delenv("RLHF_PROFILE")
    seen: list[str | None] = []

    def record(folder: Path) -> None:
        seen.append(os.environ.get("RLHF_PROFILE"))
        (folder / "profile").mkdir()
        (folder / "profile" / "trace.json.gz").write_bytes(b"")

    rlhf("pretrain", "recipe.yaml", "--run-dir", "one")
    assert "RLHF_PROFILE" not in os.environ
    stages.in_stage["sft"] = record
    code, out, _ = rlhf("sft", "recipe.yaml", "--run-dir", "one", "--profile")
    assert (code, seen) == (0, ["1"])
    [folder] = Path("one").glob("sft-*")
    assert out.splitlines()[-1] == f"profile: {folder}/profile/trace.json.gz"


def test_profile_of_a_finished_stage_says_which_command_records_one_and_leaves_its_run_alone(
    world: Path, stages: FakeStages, rlhf: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the same models, whatever the recipe leaves empty."""
    monkeypatch.setenv("RLHF_PROFILE", "")
    rlhf("run", "recipe.yaml", "--run-dir", "one")
    [sft], [reward] = Path("one").glob("sft-*"), Path("one").glob("reward-*")
    before, entries = contents(Path("one")), json.loads(Path("one/summary.json").read_text())["stages"]
    code, out, _ = rlhf("ppo", "recipe.yaml", "ppo.kl_coef=0.05", "--run-dir", "one", "--profile")
    assert code == 0
    told = out.splitlines()[-1]
    assert told == (
        f"profile: none, since ppo was finished before; `rlhf ppo recipe.yaml ppo.kl_coef=0.05 ppo.model={sft}/model "
        f"ppo.reward_model={reward}/model --run-dir one-profiled --profile` trains it once more elsewhere"
    )
    assert rlhf(*told.split("`")[1].split()[1:])[0] == 0
    assert [path.name for path in Path("one-profiled").glob("ppo-*")] == [entries["ppo"]["folder"]]  # the same result
    assert contents(Path("one")).keys() == before.keys()


def test_force_says_which_finished_stages_have_to_run_again(world: Path, stages: FakeStages, rlhf: Call) -> None:
    rlhf("run", "recipe.yaml", "--run-dir", "one")
    told = "has to be made again, unless the new one is the same: reward, ppo; old results stay"
    for words in (("plan", "recipe.yaml", "--force", "sft"), ("sft", "recipe.yaml", "--force")):
        out = rlhf(*words, "--run-dir", "one")[1]
        assert [line.partition(":")[0] for line in out.splitlines() if told in line] == ["sft"]
    assert "has to be made again" not in rlhf("plan", "recipe.yaml", "--run-dir", "one", "--force", "ppo")[1]


def test_status_tells_messages_below_a_table_that_fits_80_columns(world: Path, stages: FakeStages, rlhf: Call) -> None:
    def broken(folder: Path) -> None:
        raise RuntimeError(f"weights are not finite\nin layer 3 {'of many ' * 40}")

    stages.in_stage["sft"] = broken
    rlhf("run", "recipe.yaml", "--run-dir", "one")
    *table, message = rlhf("status", "one")[1].splitlines()
    assert [line.split()[:2] for line in table] == [
        ["stage", "status"], ["pretrain", "done"], ["sft", "failed"], ["reward", "planned"], ["ppo", "planned"]
    ]  # fmt: skip
    assert max(map(len, table)) <= 80
    assert "step 3 of 10" in table[2]
    assert message.startswith("sft: weights are not finite in layer 3 of many of many ")


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
