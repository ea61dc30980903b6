"""A run: what it leaves behind, how it ends, and what it never touches."""

import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from pipeline_world import ROWS, FakeStages, contents, write_rows

from rlhf.data.errors import DataError, RefusedError, SettingsError
from rlhf.pipeline import launch, runner
from rlhf.pipeline.errors import RunFailed, RunStopped
from rlhf.pipeline.evaluation import finished
from rlhf.pipeline.lock import held
from rlhf.pipeline.plan import Scope
from rlhf.pipeline.recipe import load_recipe
from rlhf.pipeline.summary import as_sealed, read_summary, run_status
from rlhf.stages.alone import alone_in

RUN = Path("run")


def run(*overrides: str, scope: Scope | None = None) -> list[str]:
    """Run the recipe; what it said."""
    said: list[str] = []
    runner.run(load_recipe("recipe.yaml", overrides), RUN, scope, said.append)
    return said


def summary() -> dict[str, dict[str, Any]]:
    stages: dict[str, dict[str, Any]] = json.loads((RUN / "summary.json").read_text())["stages"]
    return stages


def statuses() -> dict[str, str]:
    return {stage: entry["status"] for stage, entry in summary().items()}


def raising(error: BaseException) -> Callable[[Path], None]:
    def raise_it(folder: Path) -> None:
        raise error

    return raise_it


def test_a_run_trains_all_stages_and_sums_them_up(world: Path, stages: FakeStages) -> None:
    said = run()
    assert stages.trained == ["pretrain", "sft", "reward", "ppo"]
    for stage, entry in summary().items():
        assert entry.keys() == {"status", "folder", "model", "seconds", "metrics"}
        assert entry["status"] == "done"
        assert entry["folder"].startswith(f"{stage}-")
        assert (RUN / entry["model"] / "config.json").is_file()
        assert entry["seconds"] >= 0
        assert entry["metrics"] == {"loss": 1.5}
    assert load_recipe(str(RUN / "recipe.yaml")) == load_recipe("recipe.yaml")
    assert (RUN / "report.html").exists()
    assert any(line.startswith("sft: run sft-") and line.endswith("(not run yet)") for line in said)


def test_each_stage_starts_from_the_models_before_it(world: Path, stages: FakeStages) -> None:
    run()
    models = {stage: str((RUN / entry["model"]).absolute()) for stage, entry in summary().items()}
    settings = (RUN / summary()["ppo"]["folder"] / "settings.yaml").read_text()
    assert f"model: {models['sft']}\n" in settings
    assert f"reward_model: {models['reward']}\n" in settings


def test_a_second_run_changes_no_file(world: Path, stages: FakeStages) -> None:
    run()
    before = contents(RUN)
    said = run()
    assert contents(RUN) == before
    assert stages.trained == ["pretrain", "sft", "reward", "ppo"]
    assert stages.reports == 1
    assert [line.split()[1] for line in said] == ["reuse"] * 4


def test_checkpoints_that_a_kill_left_in_a_finished_stage_go_with_the_next_run(world: Path, stages: FakeStages) -> None:
    run()
    left = next(RUN.glob("ppo-*")) / "checkpoints" / "step-00000003"
    left.mkdir(parents=True)
    (left / "optimizer.bin").write_bytes(b"half removed")
    run()
    assert not left.parent.exists()


def test_a_missing_report_is_written_again(world: Path, stages: FakeStages) -> None:
    run()
    (RUN / "report.html").unlink()
    run()
    assert stages.reports == 2


def test_a_changed_setting_runs_beside_the_old_result(world: Path, stages: FakeStages) -> None:
    run()
    before = contents(RUN)
    run("reward.learning_rate=0.002")
    assert stages.trained[4:] == ["reward", "ppo"]
    kept = {path: found for path, found in before.items() if "-" in path}
    assert kept.items() <= contents(RUN).items()


def test_a_rerun_that_gives_the_same_model_lets_the_rest_be_reused(world: Path, stages: FakeStages) -> None:
    run()
    (next(RUN.glob("sft-*")) / "manifest.json").unlink()
    said = run()
    assert stages.trained[4:] == ["sft"]
    assert [line.split()[1] for line in said if "(" in line] == ["reuse", "resume", "reuse", "reuse"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("ppo.data=nowhere.jsonl", "no such file"),
        ("ppo.judge=nowhere:judge", "nowhere:judge"),
        ("ppo.reward_model=./nowhere", "ppo.reward_model: no folder './nowhere'"),
        ("reward.compare_with=[./nowhere]", "reward.compare_with: no folder './nowhere'"),
        ("accelerate_config=nowhere.yaml", "accelerate_config: nowhere.yaml: no such accelerate config"),
    ],
)
def test_what_is_missing_for_the_last_stage_is_found_before_the_first(
    world: Path, stages: FakeStages, override: str, message: str
) -> None:
    with pytest.raises(RefusedError, match=message):
        run(override)
    assert stages.trained == []
    assert not RUN.exists()


def test_bad_rows_are_refused_and_leave_a_finished_run_as_it_was(world: Path, stages: FakeStages) -> None:
    run()
    before = contents(RUN)
    write_rows(Path("rankings.jsonl"), [*ROWS["rankings"], {"prompt": "d"}])
    with pytest.raises(DataError, match=r"rankings\.jsonl row 3"):
        run()
    assert contents(RUN) == before
    said = run("reward.max_dropped=0.5")
    assert any(line.startswith("reward.data: kept 2 of 3 rows") for line in said)


def test_a_run_folder_that_cannot_be_one_is_refused(world: Path, stages: FakeStages) -> None:
    RUN.write_text("a file")
    with pytest.raises(SettingsError, match="--run-dir run: run is not a folder"):
        run()
    RUN.unlink()
    RUN.mkdir(mode=0o500)
    if not os.access(RUN, os.W_OK):  # root may write anywhere
        with pytest.raises(SettingsError, match="--run-dir run: run is not writable"):
            run()
    assert stages.trained == []


def test_a_failing_stage_says_what_broke_and_the_next_run_goes_on(world: Path, stages: FakeStages) -> None:
    stages.in_stage["reward"] = raising(ZeroDivisionError("no pairs"))
    with pytest.raises(RunFailed, match=r"reward: ZeroDivisionError: no pairs; .*error\.log.*correct it and run again"):
        run()
    assert statuses() == {"pretrain": "done", "sft": "done", "reward": "failed", "ppo": "planned"}
    folder = RUN / summary()["reward"]["folder"]
    assert "ZeroDivisionError" in (folder / "error.log").read_text()
    assert json.loads((folder / "status.json").read_text())["state"] == "failed"
    stages.in_stage.clear()
    said = run()
    assert stages.trained == ["pretrain", "sft", "reward", "reward", "ppo"]
    assert any(line.startswith(f"reward: resume {folder.name}") for line in said)
    assert set(statuses().values()) == {"done"}
    assert not (folder / "error.log").exists()


def test_a_stage_that_was_finished_by_hand_after_it_failed_is_done(world: Path, stages: FakeStages) -> None:
    """Before the next run says so; its model is measured, too."""
    stages.in_stage["sft"] = raising(ZeroDivisionError("no rows"))
    with pytest.raises(RunFailed):
        run()
    assert run_status(RUN)["sft"]["status"] == "failed"
    stages.in_stage.clear()
    folder = RUN / summary()["sft"]["folder"]
    stages.train("sft", folder)
    found = run_status(RUN)["sft"]
    assert (found["status"], found["model"], found["metrics"]) == ("done", f"{folder.name}/model", {"loss": 1.5})
    assert "message" not in found
    assert finished(RUN, as_sealed(RUN, read_summary(RUN))).keys() == {"pretrain", "sft"}
    (folder / "manifest.json").write_text("{")  # `rlhf verify` tells of that
    assert run_status(RUN)["sft"]["status"] == "failed"


def test_a_forced_stage_that_makes_the_same_model_leaves_the_finished_ones_after_it_done(
    world: Path, stages: FakeStages
) -> None:
    stages.alike = {"reward"}
    run()
    before = summary()
    run(scope=Scope("reward", "reward", frozenset(["reward"])))
    assert summary()["reward"]["folder"] != before["reward"]["folder"]
    assert summary()["ppo"] == before["ppo"]


def test_after_a_kill_there_is_nothing_to_correct(
    world: Path, stages: FakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what the launcher said of it is not called the stage's traceback."""

    def killed(words: list[str], *_: Any) -> launch.Ended:
        folder = Path(words[-1])
        (folder / "status.json").write_text('{"state": "running", "step": 3, "steps": 10, "message": ""}')
        return launch.Ended(-9, [], "Traceback (most recent call last):\nCalledProcessError: died with SIGKILL")

    monkeypatch.setattr(launch, "stays_in_process", lambda *_: False)
    monkeypatch.setattr(launch, "to_its_end", killed)
    with pytest.raises(RunFailed) as failed:
        run()
    log = RUN / summary()["pretrain"]["folder"] / "error.log"
    assert str(failed.value).endswith(
        f"out of memory, or killed?; no checkpoint yet (what its processes said in {log}); run again"
    )
    first, _, *said = log.read_text().splitlines()
    assert first == "No error of the stage's code; its processes and their launcher said:"
    assert said[-1] == "CalledProcessError: died with SIGKILL"


def test_a_stage_that_refuses_its_input_counts_as_refused(world: Path, stages: FakeStages) -> None:
    stages.in_stage["sft"] = raising(SettingsError("vocabulary 300 and 400 differ"))
    with pytest.raises(SettingsError, match="vocabulary 300 and 400 differ"):
        run()
    assert statuses()["sft"] == "failed"


def test_a_stage_that_leaves_no_manifest_has_failed(
    world: Path, stages: FakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "train", lambda stage, folder: None)
    with pytest.raises(RunFailed, match="pretrain: it ended without sealing its folder"):
        run()


@pytest.mark.parametrize(("stop", "code"), [(SystemExit(143), 143), (SystemExit(130), 130), (KeyboardInterrupt(), 130)])
def test_a_signal_ends_the_run_with_its_code(world: Path, stages: FakeStages, stop: BaseException, code: int) -> None:
    stages.in_stage["sft"] = raising(stop)
    with pytest.raises(RunStopped, match="no checkpoint yet; run again") as stopped:
        run()
    assert stopped.value.code == code
    assert statuses() == {"pretrain": "done", "sft": "stopped", "reward": "planned", "ppo": "planned"}


def test_what_a_stage_said_itself_is_not_said_again(world: Path, stages: FakeStages) -> None:
    def stop(folder: Path) -> None:
        (folder / "status.json").write_text('{"state": "stopped", "step": 3, "steps": 10, "message": ""}')
        (folder / "checkpoints" / ".writing").mkdir(parents=True)
        raise SystemExit(130)

    stages.in_stage["sft"] = stop
    with pytest.raises(RunStopped, match=r"^$") as stopped:
        run()
    assert stopped.value.code == 130
    stages.in_stage.clear()
    said = run()  # the stage tells which checkpoints it passes over
    assert said[1].startswith("sft: resume sft-")
    assert said[1].endswith(" (stopped; starts over)")


@pytest.mark.parametrize("left", [None, "running"])
@pytest.mark.parametrize(("error", "ended"), [(SystemExit(130), "stopped"), (RunFailed("killed"), "failed")])
def test_how_a_stage_ended_that_could_not_say_it_is_told_in_one_word(
    world: Path,
    stages: FakeStages,
    monkeypatch: pytest.MonkeyPatch,
    rlhf: Callable[..., tuple[int, str, str]],
    left: str | None,
    error: BaseException,
    ended: str,
) -> None:
    """As when a signal comes while it imports torch, or its processes were killed."""

    def end(stage: str, folder: Path, *_: Any) -> None:
        if left:
            (folder / "status.json").write_text(json.dumps({"state": left, "step": 3, "steps": 10, "message": ""}))
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(runner, "run_stage", end)
        with pytest.raises((RunStopped, RunFailed), match=r"pretrain: .*; no checkpoint yet; run again"):
            run()
    assert statuses()["pretrain"] == run_status(RUN)["pretrain"]["status"] == ended
    reason = f"{ended} before its first checkpoint; starts over"
    assert reason in rlhf("plan", "recipe.yaml", "--run-dir", "run")[1]
    assert run()[0].endswith(f" ({reason})")


def test_what_another_says_of_a_folder_in_which_it_trains_is_left_alone(
    world: Path, stages: FakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = '{"state": "running", "step": 3, "steps": 10, "message": "by hand"}'

    def end(stage: str, folder: Path, *_: Any) -> None:
        (folder / "status.json").write_text(theirs)
        by_hand.enter_context(alone_in(folder))
        raise SystemExit(130)

    monkeypatch.setattr(runner, "run_stage", end)
    with ExitStack() as by_hand:
        with pytest.raises(RunStopped):
            run()
        assert (RUN / summary()["pretrain"]["folder"] / "status.json").read_text() == theirs


def test_a_signal_too_late_to_interrupt_a_stage_still_ends_the_run(
    world: Path, stages: FakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = stages.train

    def train_and_stop(stage: str, folder: Path) -> None:
        train(stage, folder)
        if stage == "sft":
            raise SystemExit(143)

    monkeypatch.setattr(stages, "train", train_and_stop)
    with pytest.raises(RunStopped, match="sft: done; stopped after it; run again") as stopped:
        run()
    assert stopped.value.code == 143
    assert stages.trained == ["pretrain", "sft"]
    assert statuses() == {"pretrain": "done", "sft": "done", "reward": "planned", "ppo": "planned"}
    assert summary()["sft"]["metrics"] == {"loss": 1.5}
    run()
    assert stages.trained == ["pretrain", "sft", "reward", "ppo"]


def test_a_stage_that_exits_by_itself_has_failed(world: Path, stages: FakeStages) -> None:
    stages.in_stage["sft"] = raising(SystemExit(5))
    with pytest.raises(RunFailed, match="sft: ended itself with code 5"):
        run()


def test_seconds_add_up_over_attempts(world: Path, stages: FakeStages, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(runner, "monotonic", lambda: next(clock))
    stages.in_stage["pretrain"] = raising(SystemExit(143))
    with pytest.raises(RunStopped):
        run()
    assert summary()["pretrain"]["seconds"] == 10
    stages.in_stage.clear()
    run(scope=Scope(last="pretrain"))
    assert summary()["pretrain"]["seconds"] == 20


def test_seconds_outlive_a_run_of_another_recipe(
    world: Path, stages: FakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(runner, "monotonic", lambda: next(clock))
    run(scope=Scope(last="reward"))
    stages.in_stage["ppo"] = raising(SystemExit(143))
    with pytest.raises(RunStopped):
        run()
    stages.in_stage = {"reward": raising(SystemExit(143))}
    with pytest.raises(RunStopped):
        run("reward.learning_rate=0.002")
    assert summary()["ppo"]["folder"] is None
    stages.in_stage.clear()
    run()
    assert stages.trained == ["pretrain", "sft", "reward", "ppo", "reward", "ppo"]
    assert {stage: entry["seconds"] for stage, entry in summary().items()} == {
        "pretrain": 10,
        "sft": 10,
        "reward": 10,
        "ppo": 20,
    }


def test_two_runs_never_share_a_folder(world: Path, stages: FakeStages, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "SECONDS_FOR_ANOTHER", 0.0)
    RUN.mkdir()
    with held(RUN, 0), pytest.raises(SettingsError, match="another rlhf run is working here"):
        run()
    run()


def test_what_another_run_finished_before_the_lock_is_reused(
    world: Path, stages: FakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = runner._create

    def create_late(run_dir: Path) -> None:
        monkeypatch.setattr(runner, "_create", create)
        run()  # the other one, from start to end
        create(run_dir)

    monkeypatch.setattr(runner, "_create", create_late)
    run()
    assert stages.trained == ["pretrain", "sft", "reward", "ppo"]


def test_status_tells_a_running_stage_from_an_interrupted_one(world: Path, stages: FakeStages) -> None:
    seen: list[dict[str, Any]] = []
    stages.in_stage["sft"] = lambda folder: seen.append(run_status(RUN)["sft"])
    run()
    assert (seen[0]["status"], seen[0]["step"], seen[0]["steps"]) == ("running", 3, 10)
    left = {"stages": summary() | {"sft": summary()["sft"] | {"status": "running"}}}
    (RUN / "summary.json").write_text(json.dumps(left))  # as a kill -9 leaves it
    (RUN / left["stages"]["sft"]["folder"] / "manifest.json").unlink()
    assert run_status(RUN)["sft"]["status"] == "interrupted"


@pytest.mark.parametrize(
    ("rows", "left"),
    [
        # 10 steps of 2 + 0.5 s, an evaluation of 5 s, 2 steps of 8 + 2 s: 50 s for 12 steps; 18 are left
        ((
            {"step": 10, "seconds_rollout": 2.0, "seconds_update": 0.5, "seconds_sampling": 9.0},
            {"step": 10, "seconds_evaluation": 5.0},
            {"step": 12, "seconds_update": 8.0, "seconds_checkpoint": 2.0},
        ), 75.0),
        (({"step": 10, "seconds_update": 2.0}, {"step": "?"}), None),
        (({"step": 10, "seconds_update": float("inf")},), None),
        (({"step": 0, "seconds_evaluation": 2.0},), None),
        ((), None),
    ],
)  # fmt: skip
def test_status_tells_how_long_a_running_stage_has_still_to_go(
    world: Path,
    stages: FakeStages,
    rlhf: Callable[..., tuple[int, str, str]],
    rows: tuple[dict[str, Any], ...],
    left: float | None,
) -> None:
    seen: list[Any] = []

    def look(folder: Path) -> None:
        for state in ("running", "stopped"):
            (folder / "status.json").write_text(json.dumps({"state": state, "step": 12, "steps": 30}))
            (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            os.utime(folder / "metrics.jsonl", (time.time() + 1000,) * 2)  # of a clock that is ahead
            seen.append(run_status(RUN)["sft"]["seconds_left"])
            seen.append(rlhf("status", str(RUN))[1].splitlines()[2].rstrip())

    stages.in_stage["sft"] = look
    run()
    told = "step 12 of 30, about 1:15 min left" if left else "step 12 of 30"
    assert seen[0] == left
    assert seen[1].endswith(f"  {told}")
    assert (seen[2], seen[3].endswith("  step 12 of 30")) == (None, True)
    assert "seconds_left" not in run_status(RUN)["sft"]


def test_a_stage_that_has_written_nothing_for_longer_than_it_had_to_go_is_given_no_time(
    world: Path, stages: FakeStages
) -> None:
    seen = []

    def look(folder: Path) -> None:
        (folder / "status.json").write_text(json.dumps({"state": "running", "step": 10, "steps": 20}))
        (folder / "metrics.jsonl").write_text('{"step": 10, "seconds_update": 10.0}\n')  # 100 s left
        for silent in (60, 101):
            os.utime(folder / "metrics.jsonl", (time.time() - silent,) * 2)
            seen.append(run_status(RUN)["sft"]["seconds_left"])

    stages.in_stage["sft"] = look
    run()
    assert 30 < seen[0] <= 40
    assert seen[1] is None


def test_a_report_that_cannot_be_drawn_does_not_lose_the_run(
    world: Path, stages: FakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlhf.pipeline.report.render", lambda run_dir: 1 / 0)
    with pytest.raises(RunFailed, match=r"report: ZeroDivisionError.*`rlhf report run` tries again"):
        run()
    with pytest.raises(RunFailed, match="`rlhf report 'my run'` tries again"):
        runner.run(load_recipe("recipe.yaml"), Path("my run"))
    assert set(statuses().values()) == {"done"}
