"""The command line: what its commands show, and that they never wait for torch."""

import json
import os
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


def test_a_plan_of_what_the_model_has_no_positions_for_is_refused_as_the_run_is(
    world: Path, stages: FakeStages, rlhf: Call
) -> None:
    Path("base").mkdir()
    Path("base/config.json").write_text('{"max_position_embeddings": 64}')
    words = "recipe.yaml", "sft.model=./base", "sft.max_length=65", "reward.max_length=64"
    short = "ppo.max_prompt_length=5", "ppo.max_new_tokens=59"
    code, out, err = rlhf("plan", *words, *short)
    assert code == 2
    assert [line.split()[0] for line in out.splitlines()[:5]] == ["stage", "pretrain", "sft", "reward", "ppo"]
    assert (
        err
        == rlhf("run", *words, *short)[2]
        == "error: sft.max_length is 65, but the model has 64 positions; set sft.max_length=64\n"
    )


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


def test_one_stage_alone_tells_of_no_other_but_what_it_starts_from(world: Path, stages: FakeStages, rlhf: Call) -> None:
    stages.metrics = {"sft": {"eval_loss": 1.0, "base_eval_loss": 2.0}}
    words = ("recipe.yaml", "sft.model=owner/name", "--run-dir", "one")
    first = rlhf("sft", *words)[1].splitlines()
    assert [line.split()[0] for line in first[:4]] == ["sft:", "sft:", "stage", "sft"]
    assert not [line for line in first if line.startswith(("pretrain", "reward", "ppo"))]
    second = rlhf("reward", *words)[1].splitlines()
    assert [line.split()[0] for line in second[:5]] == ["sft:", "reward:", "reward:", "stage", "reward"]
    assert second[0].startswith("sft: reuse sft-")
    assert not [line for line in second[5:] if line.startswith(("sft", "ppo")) or "SFT" in line]
    assert "ppo: skip (after reward)" in rlhf("run", *words, "--to", "reward")[1].splitlines()


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
        raise RuntimeError(f"weights are \x1b[31mnot finite\nin layer 3 {'of many ' * 40}")

    stages.in_stage["sft"] = broken
    rlhf("run", "recipe.yaml", "--run-dir", "one")
    *table, message = rlhf("status", "one")[1].splitlines()
    assert [line.split()[:2] for line in table] == [
        ["stage", "status"], ["pretrain", "done"], ["sft", "failed"], ["reward", "planned"], ["ppo", "planned"]
    ]  # fmt: skip
    assert max(map(len, table)) <= 80
    assert "step 3 of 10" in table[2]
    assert message.startswith("sft: weights are  [31mnot finite in layer 3 of many of many ")
