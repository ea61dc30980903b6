"""What a stage tells: the same rows reach metrics.jsonl and every tracker, and no tracker can end a training."""

import io
import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from rich.console import Console
from stages_world import inputs, run_stage

from rlhf.data.errors import SettingsError
from rlhf.stages import logs
from rlhf.stages.artifact import Artifact, identify
from rlhf.stages.runtime import Runtime
from rlhf.stages.settings import TRACKERS, StageSettings
from rlhf.stages.sft.config import SFTSettings


class FakeTracker(GeneralTracker):
    """Keeps what it is told, and fails where it is asked to."""

    name = "fake"
    requires_logging_directory = False
    made: list["FakeTracker"]
    fails_in = ""

    def __init__(self, project: str) -> None:
        self.project, self.told, self.config, self.finished = project, [], {}, 0
        self.made.append(self)

    @property
    def tracker(self) -> "FakeTracker":
        return self

    def _may_fail(self, where: str) -> None:
        if self.fails_in == where:
            raise ConnectionError("the network is gone\nand more")

    def start(self) -> None:
        self._may_fail("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = values

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.told.append({"step": step, **values})
        self._may_fail("log")

    def finish(self) -> None:
        self.finished += 1
        self._may_fail("finish")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeTracker]:
    """Two trackers that are installed: fake and another."""
    for name in ("fake", "another"):
        monkeypatch.setitem(TRACKERS, name, ("json",))
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, FakeTracker)
    monkeypatch.setattr(FakeTracker, "made", [], raising=False)
    return FakeTracker


def test_a_tracker_gets_every_row_of_metrics_once(tmp_path: Path, fake: type[FakeTracker]) -> None:
    folders = {stage: tmp_path / "my-run" / f"{stage}-0123abcd" for stage in ("pretrain", "sft")}
    for stage, folder in folders.items():  # our own loop, and the trainer's
        run_stage(stage, folder, report_to="fake", **inputs(stage, folders))
        tracker = fake.made.pop()
        assert tracker.told == Artifact(folder).metrics
        assert tracker.finished == 1
        assert tracker.project == "my-run"
        assert (tracker.config["stage"], tracker.config["log_every"]) == (stage, 1)
    assert fake.made == []


@pytest.mark.parametrize("where", ["start", "log", "finish"])
def test_a_tracker_that_fails_is_told_of_once_and_done_without(
    where: str, tmp_path: Path, fake: type[FakeTracker], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(fake, "fails_in", where)
    run_stage("pretrain", tmp_path / "pretrain", report_to=["fake"])
    assert Artifact(tmp_path / "pretrain").sealed
    assert capsys.readouterr().out.count(
        "warning: fake failed (ConnectionError: the network is gone); training goes on without it"
    ) == 1  # fmt: skip
    assert len(fake.made[0].told) == {"start": 0, "log": 1, "finish": 6}[where]


def test_one_tracker_that_fails_leaves_the_other_alone(
    tmp_path: Path, fake: type[FakeTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(fake):  # type: ignore[misc, valid-type]
        fails_in = "log"

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "fake", Failing)
    run_stage("pretrain", tmp_path / "pretrain", report_to=["fake", "another"])
    assert [len(tracker.told) for tracker in fake.made] == [1, 6]


def test_only_the_main_process_has_trackers(tmp_path: Path, fake: type[FakeTracker]) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    data = str(tmp_path / "rows.jsonl")
    settings = SFTSettings.load({"data": data, "model": "a/b", "report_to": "fake"}, "sft")
    run = Runtime(settings, tmp_path)
    run.is_main = False
    run.begin(0)
    run.close()
    assert fake.made == []


def test_what_trackers_write_is_no_part_of_the_result(tmp_path: Path) -> None:
    (tmp_path / "stage" / "logs" / "tensorboard").mkdir(parents=True)
    (tmp_path / "stage" / "logs" / "tensorboard" / "events").write_text("x")
    run_stage("pretrain", tmp_path / "stage")
    assert not [name for name in Artifact(tmp_path / "stage").manifest["files"] if name.startswith("logs")]


def test_settings_reach_a_tracker_as_plain_values_under_dotted_names() -> None:
    nested = {"rate": 0.1, "none": None, "data": {"path": "x", "map": {}}, "names": ["a", "b"], "on": True}
    rewards = {"rewards": [{"weight": 1.0}, {"weight": 2.0, "model": None}]}
    assert logs.flat(nested | rewards) == {
        "rate": 0.1, "data.path": "x", "names": "a, b", "on": True, "rewards.0.weight": 1.0, "rewards.1.weight": 2.0,
    }  # fmt: skip


def test_tensorboard_is_there_by_default_where_it_is_installed(
    tmp_path: Path, fake: type[FakeTracker], monkeypatch: pytest.MonkeyPatch
) -> None:
    class FakeBoard(fake):  # type: ignore[misc, valid-type]
        def __init__(self, project: str, logging_dir: str, purge_step: int) -> None:
            super().__init__(project)
            assert (project, logging_dir, purge_step) == ("tensorboard", str(tmp_path / "pretrain" / "logs"), 1)

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", FakeBoard)
    monkeypatch.setitem(TRACKERS, "tensorboard", ("nothing_of_that_name",))
    run_stage("pretrain", tmp_path / "without", report_to=None)
    assert fake.made == []
    monkeypatch.setitem(TRACKERS, "tensorboard", ("nothing_of_that_name", "json"))
    run_stage("pretrain", tmp_path / "pretrain", report_to=None)
    assert len(fake.made[0].told) == 6


def test_a_run_is_found_again_by_its_name_and_a_new_one_has_another(tmp_path: Path) -> None:
    first = logs._run_id(tmp_path, new=True)
    assert logs._run_id(tmp_path, new=False) == first
    assert logs._run_id(tmp_path, new=True) != first


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    settings = SFTSettings.load({"data": "x.jsonl", "report_to": "tensorboard"}, "sft")
    for start, values in ((0, [5.0, 4.0, 9.0]), (2, [3.0, 2.0])):  # killed in step 4, resumed after 2
        trackers = logs.Trackers(settings, tmp_path, print)
        trackers.start(start)
        for step, value in enumerate(values, start + 1):
            trackers.log({"step": step, "loss": value, "note": "no number"})
        trackers.close()
    seen = events.EventAccumulator(str(tmp_path / "logs" / "tensorboard"))
    seen.Reload()
    assert [(event.step, event.value) for event in seen.Scalars("loss")] == [(1, 5.0), (2, 4.0), (3, 3.0), (4, 2.0)]


def test_an_unknown_tracker_is_refused_with_those_there_are() -> None:
    with pytest.raises(SettingsError, match=r"sft\.report_to: no tracker 'wandbb'; did you mean 'wandb'\?"):
        SFTSettings.load({"data": "x.jsonl", "report_to": ["wandbb"]}, "sft")
    with pytest.raises(SettingsError, match=r"no tracker 'none'; there are aim, .*, wandb \(\[\] for none\)"):
        SFTSettings.load({"data": "x.jsonl", "report_to": "none"}, "sft")


def test_a_tracker_that_is_not_installed_is_refused_with_the_cure(
    fake: type[FakeTracker], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "left_by_a_tracker").mkdir()  # wandb leaves ./wandb behind, which Python would import
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(TRACKERS, "wandb", ("left_by_a_tracker",))
    with pytest.raises(SettingsError, match=r"sft\.report_to: 'wandb' is not installed \(.*fake.*\); pip install"):
        SFTSettings.load({"data": "x.jsonl", "report_to": "wandb"}, "sft")


def test_the_trainer_has_no_trackers_of_its_own() -> None:
    with pytest.raises(SettingsError, match="'report_to' has a setting of its own"):
        SFTSettings.load({"data": "x.jsonl", "args": {"report_to": "wandb"}}, "sft")


def test_where_metrics_go_is_not_in_the_key(fake: type[FakeTracker], tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}\n")
    found = [
        SFTSettings.load({"data": str(tmp_path / "rows.jsonl"), "model": "a/b", "report_to": names}, "sft")
        for names in (None, [], "fake")
    ]
    assert len({identify(settings).key for settings in found}) == 1
    assert "report_to" in StageSettings.not_in_key


def test_every_row_and_the_end_tell_the_most_memory_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter(range(1, 9))  # GiB
    monkeypatch.setattr(logs, "peak_memory", lambda device: next(peaks) * 2**30)
    metrics = run_stage("pretrain", tmp_path / "pretrain")
    assert [row["peak_gib"] for row in Artifact(tmp_path / "pretrain").metrics] == [1, 2, 3, 4, 5, 6]
    assert metrics["peak_gib"] == 7


def test_memory_is_counted_in_bytes_on_every_system(monkeypatch: pytest.MonkeyPatch) -> None:
    class Usage:
        ru_maxrss = 3000

    monkeypatch.setattr(resource, "getrusage", lambda who: Usage)
    monkeypatch.setattr("sys.platform", "linux")
    assert logs.peak_memory(torch.device("cpu")) == 3000 * 1024
    monkeypatch.setattr("sys.platform", "darwin")
    assert logs.peak_memory(torch.device("cpu")) == 3000
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 77)
    assert logs.peak_memory(torch.device("cuda")) == 77


def test_rows_of_a_lost_stretch_are_dropped(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        logs.write_row(tmp_path, {"step": step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')  # killed while writing
    logs.forget_rows_after(tmp_path, 2)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_on_a_narrow_terminal_the_figures_stand_below_the_bar_each_in_one_piece() -> None:
    terminal = logs.Terminal("ppo", quiet=False)
    shown = io.StringIO()
    terminal._console = Console(file=shown, width=40, force_terminal=True, color_system=None, legacy_windows=False)
    row = {"step": 5, "score": -3.7, "kl": 0.01, "entropy": 6.05, "eos_share": 0.5, "explained_variance": -110.8}
    terminal.show(row, 10, 1.0)
    terminal.close()
    lines = [line.strip() for line in shown.getvalue().split("\n")]
    assert "5/10" in lines[-4]
    assert lines[-3:-1] == ["score -3.7  kl 0.01  entropy 6.05", "eos_share 0.5  explained_variance -110.8"]


def test_a_failure_is_told_where_nothing_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which may be what failed; a traceback of the telling would hide it."""

    def refuse(path: Path, _text: str) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    monkeypatch.setattr(logs, "replace_text", refuse)
    monkeypatch.delenv("RLHF_RUN", raising=False)
    logs.tell_failure(tmp_path, "failed", "no room")
    assert capsys.readouterr().err == "error: no room\n"
