"""A run with a feedback step, once and in rounds: what rests on what, what it waits for, and what stays."""

import json
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pipeline_world import ROWS, FakeStages, contents, write_recipe, write_rows

from rlhf.data.errors import SettingsError
from rlhf.data.feedback.records import Answer
from rlhf.data.feedback.store import Store
from rlhf.pipeline import launch, preflight, report, runner
from rlhf.pipeline.errors import RunFailed
from rlhf.pipeline.plan import Scope, make_plan
from rlhf.pipeline.recipe import load_recipe
from rlhf.pipeline.summary import flat, run_status
from rlhf.stages.artifact import STAGES
from rlhf.stages.feedback.config import FeedbackSettings
from rlhf.stages.reward.config import RewardSettings
from rlhf.stages.settings_file import read_settings

Rlhf = Callable[..., tuple[int, str, str]]
RUN = Path("run")
ALL = ["pretrain", "sft", "feedback", "reward", "ppo", "feedback", "reward", "ppo"]
NAMES = ["pretrain", "sft", "feedback", "reward", "ppo", "feedback 2", "reward 2", "ppo 2"]
render = report.render  # before it is faked


class FakeFeedback:
    """A feedback step: waits until its store is rated where no judge is named, then leaves a ranking."""

    def __init__(self, fake: FakeStages) -> None:
        self.fake = fake

    def train(self, folder: Path) -> None:
        settings = read_settings(folder, FeedbackSettings)
        path = folder / "feedback.sqlite"
        if settings.by_people:
            with Store.open(path) if path.exists() else Store.create(path) as store:
                prompt = store.add_prompt("p")
                if not store.answers(prompt):
                    store.add_answers(prompt, [Answer("a", "m"), Answer("b", "m")])
                if not store.progress().num_rated:
                    told = {"state": "waiting", "step": 0, "steps": 1, "message": "0 of 1"}
                    (folder / "status.json").write_text(json.dumps(told))
                    return
        row = {"prompt": folder.name, "responses": ["a", "b"], "ranks": [1, 2]}
        other = {"prompt": "q", "responses": ["a", "b"], "ranks": [1, 2]}
        write_rows(folder / "rankings.jsonl", [row, other])
        self.fake.train("feedback", folder)


def fake_feedback(stages: FakeStages, patch: pytest.MonkeyPatch) -> None:
    module = ModuleType("rlhf.stages.feedback.train")
    module.train = FakeFeedback(stages).train  # type: ignore[attr-defined]
    patch.setitem(sys.modules, module.__name__, module)
    stages.metrics["feedback"] = {"num_rankings": 2}


def lay_out(folder: Path) -> None:
    """A recipe of two rounds with a function as the judge, and its files."""
    for name, rows in ROWS.items():
        write_rows(folder / f"{name}.jsonl", rows)
    (folder / "rounds_judge.py").write_text("def judge(prompts, responses):\n    return [0.0] * len(responses)\n")
    feedback = {"prompts": "prompts.jsonl", "judge": "rounds_judge:judge"}
    write_recipe(
        folder, rounds=2, pretrain={"data": "text.jsonl"}, sft={"data": "demonstrations.jsonl"}, feedback=feedback,
        reward={"learning_rate": 0.001}, ppo={"data": "prompts.jsonl"},
    )  # fmt: skip


@pytest.fixture
def stages(stages: FakeStages, monkeypatch: pytest.MonkeyPatch) -> FakeStages:
    fake_feedback(stages, monkeypatch)
    return stages


@pytest.fixture
def world(world: Path) -> Path:
    lay_out(world)
    return world


@pytest.fixture(scope="module")
def two_rounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a run whose two rounds are finished, for tests that change nothing there."""
    folder = tmp_path_factory.mktemp("two")
    lay_out(folder)
    fake = FakeStages()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for stage in STAGES:
            module = ModuleType(f"rlhf.stages.{stage}.train")
            module.train = lambda folder, stage=stage: fake.train(stage, Path(folder))  # type: ignore[attr-defined]
            patch.setitem(sys.modules, module.__name__, module)
        fake_feedback(fake, patch)
        patch.setattr(launch, "stays_in_process", lambda *_: True)
        patch.setattr(report, "render", fake.render)
        run()
    assert fake.trained == ALL
    return folder


@pytest.fixture
def finished(two_rounds: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(two_rounds)
    return two_rounds


def run(*overrides: str, scope: Scope | None = None) -> list[str]:
    said: list[str] = []
    runner.run(load_recipe("recipe.yaml", overrides), RUN, scope, said.append)
    return said


def plan(*overrides: str, scope: Scope | None = None) -> dict[str, str]:
    return {step.name: step.action for step in make_plan(load_recipe("recipe.yaml", overrides), RUN, scope)}


def summary() -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RUN / "summary.json").read_text())
    return content


def settings(name: str, entries: dict[str, Any]) -> str:
    return (RUN / entries[name]["folder"] / "settings.yaml").read_text()


def test_one_round_ranks_what_sft_answers_and_rewards_what_was_ranked(world: Path, stages: FakeStages) -> None:
    run("rounds=1")
    assert stages.trained == ALL[:5]
    found = summary()
    assert "rounds" not in found
    entries = found["stages"]
    assert list(entries) == ALL[:5]
    assert entries["feedback"]["model"] is None
    assert f"model: {(RUN / entries['sft']['model']).absolute()}\n" in settings("feedback", entries)
    data = read_settings(RUN / entries["reward"]["folder"], RewardSettings).data
    assert data is not None
    assert data.local == (RUN / entries["feedback"]["folder"] / "rankings.jsonl").absolute()


def test_a_second_round_starts_from_the_newest_policy(finished: Path) -> None:
    entries = flat(summary())
    assert list(entries) == NAMES
    models = {name: str((RUN / entry["model"]).absolute()) for name, entry in entries.items() if entry["model"]}
    feedback = read_settings(RUN / entries["feedback 2"]["folder"], FeedbackSettings)
    assert (feedback.model, feedback.round) == (models["ppo"], 2)
    assert feedback.earlier is not None
    assert feedback.earlier.local.parent == (RUN / entries["feedback"]["folder"]).absolute()
    rankings = read_settings(RUN / entries["reward 2"]["folder"], RewardSettings)
    assert rankings.model == models["sft"]
    assert rankings.data is not None
    assert rankings.data.local.parent == (RUN / entries["feedback 2"]["folder"]).absolute()
    assert f"model: {models['sft']}\n" in settings("ppo 2", entries)
    assert f"reward_model: {models['reward 2']}\n" in settings("ppo 2", entries)


def test_ppo_may_start_from_the_policy_of_the_round_before(finished: Path) -> None:
    steps = {step.name: step for step in make_plan(load_recipe("recipe.yaml", ["ppo_from=ppo"]), RUN)}
    assert [name for name, step in steps.items() if step.action == "run"] == ["ppo 2"]
    found = steps["ppo 2"].settings
    assert found is not None
    assert found.inputs()["model"] == str((RUN / flat(summary())["ppo"]["model"]).absolute())


def test_the_summarys_stages_are_those_of_the_last_round(finished: Path) -> None:
    found = summary()
    assert list(found["stages"]) == ALL[:5]
    assert found["rounds"][0].keys() == set(ALL[:5])
    assert found["rounds"][1].keys() == {"feedback", "reward", "ppo"}
    assert found["stages"]["ppo"] == found["rounds"][1]["ppo"] != found["rounds"][0]["ppo"]
    assert found["stages"]["sft"] == found["rounds"][0]["sft"]


def test_what_changes_in_the_first_round_changes_the_second(finished: Path) -> None:
    actions = plan("ppo.learning_rate=1e-3")
    assert [name for name, action in actions.items() if action == "run"] == ["ppo", "feedback 2", "reward 2", "ppo 2"]


def test_to_ends_in_the_first_round(finished: Path) -> None:
    sides = plan("ppo.learning_rate=1e-3", scope=Scope(last="ppo"))
    assert sides == dict.fromkeys(NAMES[:4], "reuse") | {"ppo": "run"} | dict.fromkeys(NAMES[5:], "skip")
    assert plan(scope=Scope(last="ppo")) == dict.fromkeys(NAMES, "reuse")


def test_until_a_round_begins_the_round_before_it_is_the_last(world: Path, stages: FakeStages) -> None:
    def breaks(folder: Path) -> None:
        if read_settings(folder, FeedbackSettings).round == 2:
            raise RuntimeError("broken")

    stages.in_stage["feedback"] = breaks
    with pytest.raises(RunFailed, match="feedback 2: RuntimeError: broken"):
        run()
    found = summary()
    assert (found["stages"]["feedback"]["status"], found["stages"]["ppo"]["status"]) == ("failed", "done")
    assert found["rounds"][1]["ppo"]["status"] == "planned"


def test_a_second_run_changes_no_file_and_more_rounds_keep_the_first(world: Path, stages: FakeStages) -> None:
    run()
    before = contents(RUN)
    assert [line.split(": ")[1].split()[0] for line in run()] == ["reuse"] * 8
    assert contents(RUN) == before
    run("rounds=3")
    assert stages.trained == [*ALL, "feedback", "reward", "ppo"]


def test_a_reward_model_of_a_later_round_is_held_against_the_bar_too(world: Path, stages: FakeStages) -> None:
    accuracies = iter((0.9, 0.4))

    def measured(folder: Path) -> None:
        stages.metrics["reward"] = {"accuracy": next(accuracies), "longer_wins_accuracy": 0.5}

    stages.in_stage["reward"] = measured
    with pytest.raises(RunFailed, match=r"held-out accuracy 0\.4 is below"):
        run("reward.min_accuracy=0.6")
    assert stages.trained == ALL[:-1]


def test_a_run_waits_for_people_and_goes_on_when_they_have_rated(
    world: Path, stages: FakeStages, rlhf: Rlhf, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["run", "recipe.yaml", "feedback.judge=null", "rounds=1", "--run-dir", "run"]
    code, out, _ = rlhf(*words)
    assert code == 3
    assert stages.trained == ["pretrain", "sft"]
    (store,) = RUN.glob("feedback-*/feedback.sqlite")
    assert summary()["stages"]["feedback"]["status"] == "waiting"
    told = run_status(RUN)["feedback"]
    assert (told["status"], told["step"], told["steps"]) == ("waiting", 0, 1)
    assert f"0 of 1 prompts are rated by a person: `rlhf rank {store}`" in rlhf("status", "run")[1]
    with monkeypatch.context() as patch:  # nothing is started as long as nothing has changed
        patch.setattr(runner, "run_stage", lambda *_: pytest.fail("it was started"))
        code, out, _ = rlhf(*words)
    assert code == 3
    assert "feedback: resume" in out
    assert "0 of 1 prompts" in out
    with Store.open(store) as opened:
        rater = opened.add_rater("ann")
        task = opened.next_prompt(rater)
        assert task is not None
        opened.rank(str(uuid.uuid4()), task.prompt_id, rater, {answer.id: 1 for answer in task.answers})
    assert "all 1 prompts are rated; run again" in rlhf("status", "run")[1]
    code, out, err = rlhf(*words)
    assert (code, err) == (0, "")
    assert stages.trained == ALL[:5]


def rank_all(run_dir: Path = RUN) -> Path:
    """A person ranks all that the one waiting step of the run has sampled; its store."""
    (path,) = run_dir.glob("feedback-*/feedback.sqlite")
    with Store.open(path) as store:
        rater = store.add_rater("ann")
        while (task := store.next_prompt(rater)) is not None:
            store.rank(str(uuid.uuid4()), task.prompt_id, rater, {answer.id: 1 for answer in task.answers})
    return path


def test_rankings_that_a_changed_setting_leaves_behind_are_told_in_plan_and_run(
    world: Path, stages: FakeStages, rlhf: Rlhf
) -> None:
    people = ["recipe.yaml", "feedback.judge=null", "rounds=1", "--run-dir", "run"]
    assert rlhf("run", *people)[0] == 3
    assert "not be taken over" not in rlhf("plan", *people, "feedback.max_length=512")[1]  # nobody has ranked yet
    store = rank_all()
    line = (
        f"feedback: 1 ranking in {store.parent.name} will not be taken over (feedback.max_length 1024 → 512; changed "
        f"back, it goes on with them); to keep them: `rlhf data export {store} ranked.jsonl --as rankings`"
    )
    assert line in rlhf("plan", *people, "feedback.max_length=512")[1]
    assert line in rlhf("run", *people, "feedback.max_length=512")[1]
    assert line in rlhf("plan", *people, "feedback.max_length=512")[1]  # as long as it waits
    assert "not be taken over (its input sft will be new)" in rlhf("plan", *people, "sft.learning_rate=0.5")[1]
    assert "not be taken over" not in rlhf("plan", *people)[1]  # back again
    assert "not be taken over" not in rlhf("plan", *people, "feedback.target=2")[1]
    assert rlhf("run", *people, "--run-dir", "my run")[0] == 3
    store = rank_all(Path("my run"))
    copied = f"`rlhf data export '{store}' ranked.jsonl --as rankings`"
    assert copied in rlhf("plan", *people, "feedback.max_length=512", "--run-dir", "my run")[1]
    assert rlhf("run", *people)[0] == 0


SHORT = ("sft.max_length=64", "reward.max_length=64", "ppo.max_prompt_length=5", "ppo.max_new_tokens=59")


def test_answers_longer_than_the_models_positions_are_refused_before_sft_is_trained(
    world: Path, stages: FakeStages
) -> None:
    Path("base").mkdir()
    Path("base/config.json").write_text('{"max_position_embeddings": 64}')
    short = ["pretrain=null", "sft.model=./base", "rounds=1", "feedback.judge=null", *SHORT]
    told = r"^feedback\.max_length is 1024, .* 64 positions; set feedback\.max_length=64 feedback\.max_new_tokens=32$"
    with pytest.raises(SettingsError, match=told):
        run(*short)
    with pytest.raises(SettingsError, match=r"^reward\.max_length is 65, .* 64 positions; set reward\.max_length=64$"):
        run(*short, "feedback.max_length=64", "feedback.max_new_tokens=32", "reward.max_length=65")
    assert not RUN.exists()


def test_what_people_have_ranked_is_gone_on_with_however_long_it_may_be(
    world: Path, stages: FakeStages, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("feedback.judge=null", "rounds=1", *SHORT)
    rank_all()
    monkeypatch.setattr(preflight, "positions_in", lambda _: 64)
    run("feedback.judge=null", "rounds=1", *SHORT)
    assert stages.trained == ALL[:5]


def test_a_judge_at_the_top_does_not_take_peoples_place(world: Path) -> None:
    write_recipe(
        world, judge="rounds_judge:judge", feedback={"prompts": "prompts.jsonl"}, reward={"model": "owner/name"}
    )
    loaded = load_recipe("recipe.yaml")
    assert loaded.feedback is not None
    assert loaded.reward is not None
    assert (loaded.feedback.judge, loaded.reward.judge) == (None, "rounds_judge:judge")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["feedback=null", "rounds=1"], "reward.data: not set; name rankings"),
        (["reward.data=rankings.jsonl"], "the rankings come from the feedback step"),
        (["ppo=null"], "rounds: 2 needs the sections feedback, reward and ppo; add ppo"),
        (["feedback.model=owner/name"], "rounds: 2 has no use for a feedback.model"),
        (["ppo.reward_model=owner/name"], "rounds: 2 has no use for a ppo.reward_model"),
        (["ppo.model=owner/name", "ppo_from=ppo"], "ppo_from: ppo has no effect beside ppo.model"),
        (["feedback.promts=x"], "did you mean 'prompts'"),
        (["pretrain.context_length=256", "reward.max_length=256", "sft.max_length=256", "ppo=null", "rounds=1"],
         "feedback.max_length: 1024 exceeds pretrain.context_length"),
    ],
)  # fmt: skip
def test_recipes_that_cannot_be_gone_through_are_refused(world: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_recipe("recipe.yaml", overrides)


def test_prompts_that_are_not_there_are_refused_before_anything_is_trained(world: Path, stages: FakeStages) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.jsonl"):
        run("feedback.prompts=nowhere.jsonl")
    write_rows(world / "empty.jsonl", [{"prompt": ""}])
    with pytest.raises(ValueError, match="empty prompt"):
        run("feedback.prompts=empty.jsonl")
    assert stages.trained == []


def test_clean_knows_the_rounds_and_never_deletes_what_people_said(world: Path, stages: FakeStages, rlhf: Rlhf) -> None:
    run()
    before = contents(RUN)
    assert rlhf("clean", "run", "--yes")[1].endswith("0 bytes freed\n")
    assert contents(RUN) == before
    run("feedback.judge=null", "rounds=1")
    (waiting,) = (path.parent for path in RUN.glob("feedback-*/feedback.sqlite"))
    run("rounds=1")
    code, out, _ = rlhf("clean", "run", "--yes")
    assert code == 0
    assert "not finished, and recipe.yaml does not lead to it" in out
    assert [path.name for path in waiting.iterdir()] == ["feedback.sqlite"]
    assert len(list(RUN.glob("ppo-*"))) == 1


def test_verify_takes_a_store_for_ours(world: Path, stages: FakeStages, rlhf: Rlhf) -> None:
    run("feedback.judge=null", "rounds=1")
    code, out, _ = rlhf("verify", "run")
    assert code == 0
    assert "is not ours" not in out


def test_the_report_shows_what_each_round_gained(world: Path, stages: FakeStages) -> None:
    qualities = iter((0.5, 0.75))

    def measured(folder: Path) -> None:
        stages.metrics["ppo"] = {"true_quality": next(qualities), "sft_true_quality": 0.4, "win_rate": 0.6, "kl": 1.0}

    stages.in_stage["ppo"] = measured
    run()
    page = render(RUN).read_text()
    table = page[page.index("<h2>Rounds</h2>") : page.index(">Curves</h2>")]
    assert "+0.100" in table
    assert "+0.250" in table
    assert page.count('<th scope="row">PPO</th>') == 1
    run("rounds=1")
    assert "<h2>Rounds</h2>" not in render(RUN).read_text()
