"""The plan: run, resume or reuse, and the reason given."""

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from pipeline_world import FakeStages, write_recipe, write_rows

from rlhf.data.errors import SettingsError
from rlhf.pipeline.plan import Scope, Step, make_plan
from rlhf.pipeline.recipe import load_recipe
from rlhf.pipeline.runner import run
from rlhf.stages.artifact import Identity, identify
from rlhf.stages.checkpoints import clear, swap_in
from rlhf.stages.settings import StageSettings

RUN = Path("run")


def plan(*overrides: str, scope: Scope | None = None) -> dict[str, Step]:
    return {step.stage: step for step in make_plan(load_recipe("recipe.yaml", overrides), RUN, scope)}


def actions(steps: dict[str, Step]) -> list[str]:
    return [step.action for step in steps.values()]


@pytest.fixture
def finished(world: Path, stages: FakeStages) -> Path:
    """A run whose four stages are sealed."""
    run(load_recipe("recipe.yaml"), RUN, say=lambda text: None)
    return world / RUN


def test_nothing_there_means_that_all_stages_run(world: Path) -> None:
    steps = plan()
    assert actions(steps) == ["run"] * 4
    assert steps["pretrain"].reason == "not run yet"
    assert steps["ppo"].reason == "its input sft and reward will be new"
    assert not RUN.exists()


def test_finished_stages_are_reused(finished: Path) -> None:
    assert actions(plan()) == ["reuse"] * 4


def test_a_changed_setting_is_the_reason_and_what_rests_on_it_runs_too(finished: Path) -> None:
    steps = plan("reward.learning_rate=0.002")
    assert actions(steps) == ["reuse", "reuse", "run", "run"]
    assert steps["reward"].reason == "reward.learning_rate 0.001 → 0.002"
    assert steps["ppo"].reason == "its input reward will be new"
    nested = plan("sft.lora={r: 4}")["sft"].reason
    assert "sft.lora" in nested


def test_changed_rows_are_the_reason(finished: Path) -> None:
    write_rows(Path("demonstrations.jsonl"), [{"prompt": "a", "response": "other"}])
    steps = plan()
    assert actions(steps) == ["reuse", "run", "run", "run"]
    assert steps["sft"].reason == "sft.data changed"


def test_a_model_to_train_further_is_an_input_of_pretraining(finished: Path) -> None:
    Path("base").mkdir()
    Path("base/config.json").write_text("{}")
    step = plan("pretrain.model=base")["pretrain"]
    assert (step.action, step.reason) == ("run", "pretrain.model changed")
    with pytest.raises(SettingsError, match=r"pretrain\.model: no folder './none'"):
        plan("pretrain.model=./none")


def test_a_weight_is_a_reason(finished: Path) -> None:
    steps = plan("pretrain.data={path: text.jsonl, weight: 2}")
    assert (steps["pretrain"].action, steps["pretrain"].reason) == ("run", "pretrain.data changed")


def test_another_input_is_the_reason(finished: Path) -> None:
    assert plan("sft.model=owner/name")["sft"].reason == "sft.model changed"


def test_a_functions_file_and_another_function_are_reasons(
    finished: Path, monkeypatch: pytest.MonkeyPatch, stages: FakeStages
) -> None:
    monkeypatch.syspath_prepend(str(finished.parent))
    file = finished.parent / "plan_rewards.py"
    file.write_text("def long(prompts, responses): ...\ndef short(prompts, responses): ...\n")
    long, short = (f"ppo.rewards=[{{function: plan_rewards:{name}}}]" for name in ("long", "short"))
    run(load_recipe("recipe.yaml", [long]), RUN, say=lambda text: None)
    assert plan(long)["ppo"].action == "reuse"
    assert plan(short)["ppo"].reason == "ppo.rewards.0 plan_rewards:long → plan_rewards:short"
    with file.open("a") as appended:
        appended.write("# a comment\n")
    assert (plan(long)["ppo"].action, plan(long)["ppo"].reason) == ("run", "the file of plan_rewards:long changed")


def test_what_cannot_change_the_result_is_no_reason(finished: Path) -> None:
    assert actions(plan("reward.log_every=3", "ppo.save_every=7", "num_processes=2")) == ["reuse"] * 4


def test_the_nearest_of_several_results_gives_the_reason(finished: Path) -> None:
    run(load_recipe("recipe.yaml", ["reward.learning_rate=0.5"]), RUN, say=lambda text: None)
    assert plan("reward.learning_rate=0.5", "reward.centering=1")["reward"].reason == "reward.centering 0.0 → 1.0"
    assert actions(plan()) == ["reuse"] * 4


@pytest.mark.parametrize(
    ("state", "ended"),
    [("stopped", "stopped"), ("failed", "failed"), ("refused", "failed"), ("running", "interrupted")],
)
def test_how_a_stage_ended_is_the_reason_to_resume_it(finished: Path, state: str, ended: str) -> None:
    folder = plan()["reward"].folder
    assert folder is not None
    (folder / "manifest.json").unlink()
    (folder / "status.json").write_text(json.dumps({"state": state, "step": 3, "steps": 10, "message": ""}))
    assert plan()["reward"].reason == f"{ended} before its first checkpoint; starts over"
    (clear(folder) / "weights").write_text("abc")
    swap_in(folder, 3, processes=1, device="cpu", state={})
    assert plan()["reward"].reason == f"{ended}; goes on from step 3 of 10"


def test_what_another_run_trains_at_this_moment_is_running(
    world: Path, stages: FakeStages, rlhf: Callable[..., tuple[int, str, str]]
) -> None:
    seen: list[str] = []

    def look(folder: Path) -> None:
        for step in (50, None):  # it trains; it is loading
            told = {"state": "running", "step": step, "steps": 120} if step else {}
            (folder / "status.json").write_text(json.dumps(told))
            seen.extend(
                line for line in rlhf("plan", "recipe.yaml", "--run-dir", "run")[1].splitlines() if "sft-" in line
            )

    stages.in_stage["sft"] = look
    run(load_recipe("recipe.yaml"), RUN, say=lambda text: None)
    who = f"in another rlhf run (pid {os.getpid()} on {socket.gethostname()}, for 0 min)"
    assert [" ".join(line.split()[3:]) for line in seen] == [f"running, step 50 of 120, {who}", f"running, {who}"]


def test_what_a_kill_left_is_interrupted_while_another_run_works_on_something_else(
    world: Path, stages: FakeStages, rlhf: Callable[..., tuple[int, str, str]]
) -> None:
    seen: list[str] = []

    def look(folder: Path) -> None:
        (left / "manifest.json").unlink()
        (left / "status.json").write_text(json.dumps({"state": "running", "step": 3, "steps": 10}))
        seen.append(rlhf("plan", "recipe.yaml", "--run-dir", "run")[1])

    run(load_recipe("recipe.yaml"), RUN, say=lambda text: None)
    left = next(RUN.glob("sft-*"))
    stages.in_stage["reward"] = look
    run(load_recipe("recipe.yaml", ["reward.learning_rate=0.5"]), RUN, say=lambda text: None)
    assert "interrupted before its first checkpoint; starts over" in seen[0]
    assert "another rlhf run" not in seen[0]


def test_a_folder_without_manifest_is_resumed_from_its_newest_whole_checkpoint(finished: Path) -> None:
    folder = plan()["reward"].folder
    assert folder is not None
    (folder / "manifest.json").unlink()
    assert plan()["reward"].reason == "interrupted before its first checkpoint; starts over"
    for step in (4, 6):
        (clear(folder) / "weights").write_text("abc")
        swap_in(folder, step, processes=1, device="cpu", state={})
    (folder / "checkpoints" / "step-00000006" / "weights").write_text("ab")
    steps = plan()
    assert actions(steps) == ["reuse", "reuse", "resume", "run"]
    passed_over = "passed over the checkpoint step-00000006: weights has 2 bytes, not 3"
    assert steps["reward"].reason == f"interrupted; {passed_over}; goes on from step 4 of 10"
    (folder / "checkpoints" / "step-00000004" / "state.json").unlink()
    assert plan()["reward"].reason.endswith(
        "passed over the checkpoint step-00000004: it has no state.json; starts over"
    )


def test_force_makes_a_sibling_and_later_runs_use_it(finished: Path, stages: FakeStages) -> None:
    first = plan()["sft"].folder
    forced = plan(scope=Scope(force=frozenset(["sft"])))
    assert actions(forced) == ["reuse", "run", "run", "run"]
    assert forced["sft"].reason == "--force; the earlier result is kept"
    run(load_recipe("recipe.yaml"), RUN, Scope(force=frozenset(["sft"])), say=lambda text: None)
    again = plan()
    assert actions(again) == ["reuse"] * 4
    assert again["sft"].folder == forced["sft"].folder != first
    assert first is not None
    assert (first / "manifest.json").exists()
    third = plan(scope=Scope(force=frozenset(["sft"])))["sft"].folder
    assert third not in (None, first, again["sft"].folder)


def test_data_and_models_are_hashed_once_whatever_the_attempt(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        run(load_recipe("recipe.yaml"), RUN, Scope(force=frozenset(["sft"])), say=lambda text: None)
    hashed: list[StageSettings] = []

    def counted(settings: StageSettings) -> Identity:
        hashed.append(settings)
        return identify(settings)

    monkeypatch.setattr("rlhf.pipeline.plan.identify", counted)
    forced = plan(scope=Scope(last="sft", force=frozenset(["sft"])))["sft"]
    assert [settings.stage for settings in hashed] == ["pretrain", "sft"]
    assert forced.settings is not None
    assert forced.settings.attempt == 3
    assert forced.identity == identify(forced.settings)


def test_a_folder_is_not_believed_by_its_name(finished: Path) -> None:
    first = plan()["reward"].folder
    other = plan("reward.learning_rate=0.002")["reward"].folder
    assert first is not None
    assert other is not None
    shutil.copytree(first, other)
    for scope in (None, Scope(first="ppo")):
        with pytest.raises(SettingsError, match=rf"{other}: its manifest.json has the key .* move it out of the run"):
            plan("reward.learning_rate=0.002", scope=scope)


def test_only_the_part_asked_for_is_run(finished: Path) -> None:
    shutil.rmtree(next(RUN.glob("ppo-*")))
    assert actions(plan("sft.num_epochs=2", scope=Scope(last="sft"))) == ["reuse", "run", "skip", "skip"]
    steps = plan("sft.num_epochs=2", scope=Scope(first="reward", last="reward"))
    assert actions(steps) == ["reuse", "reuse", "reuse", "skip"]
    assert steps["sft"].reason == "before reward; the newest one here, made differently: sft.num_epochs 1.0 → 2.0"


def test_a_recipe_for_one_stage_finds_its_inputs_in_the_run_folder(finished: Path, world: Path) -> None:
    write_recipe(world, reward={"data": "rankings.jsonl", "centering": 1})
    steps = plan(scope=Scope("reward", "reward"))
    assert actions(steps) == ["reuse", "reuse", "run"]
    sft = steps["sft"].folder
    assert sft is not None
    assert steps["reward"].settings is not None
    assert steps["reward"].settings.model_dump()["model"] == str(sft.absolute() / "model")


def test_a_missing_input_names_its_key(world: Path) -> None:
    with pytest.raises(SettingsError, match=r"ppo.model: not set, and run has no finished sft; name a model"):
        plan("pretrain=null", "sft=null", "reward=null")
    with pytest.raises(SettingsError, match=r"reward.model: not set"):
        plan(scope=Scope(first="reward"))
    with pytest.raises(SettingsError, match=r"sft.model: no folder './nowhere'"):
        plan("sft.model=./nowhere")


def test_stage_names_are_checked(world: Path) -> None:
    for scope, message in (
        (Scope(first="rewrad"), "--from rewrad: no such stage; did you mean 'reward'?"),
        (Scope(force=frozenset(["sftt"])), "--force sftt: no such stage; did you mean 'sft'?"),
        (Scope("ppo", "sft"), "--from ppo comes after --to sft"),
        (Scope(last="sft", force=frozenset(["ppo"])), "--force ppo: lies outside of --from and --to"),
    ):
        with pytest.raises(SettingsError) as refused:
            plan(scope=scope)
        assert message in str(refused.value)
    with pytest.raises(SettingsError, match="ppo: the recipe has no section 'ppo'"):
        plan("ppo=null", scope=Scope(last="ppo"))


def test_missing_data_is_told_by_the_plan(world: Path) -> None:
    Path("text.jsonl").unlink()
    with pytest.raises(ValueError, match=r"text\.jsonl"):
        plan()


def test_rows_are_not_read_and_the_plan_says_who_reads_them(
    world: Path, stages: FakeStages, rlhf: Callable[..., tuple[int, str, str]]
) -> None:
    write_rows(Path("faulty.jsonl"), [{"prompt": "a", "chosen": "", "rejected": "b"}])
    words = ("recipe.yaml", "--run-dir", "run")
    told = "rows were not read: `rlhf run` does so before it trains, `rlhf data check PATH --as KIND` at once\n"
    code, out, _ = rlhf("plan", *words, "reward.data=faulty.jsonl")
    assert (code, out.count(told)) == (0, 1)
    assert rlhf("run", *words, "reward.data=faulty.jsonl")[0] == 2
    assert rlhf("run", *words)[0] == 0
    assert told not in rlhf("plan", *words)[1]  # nothing runs, and none of them would be read
