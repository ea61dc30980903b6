"""The feedback step: it samples, is judged or waits for people, and leaves rankings."""

import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from stages_world import byte_tokenizer, tiny_policy

from rlhf.data.errors import DataError, SettingsError
from rlhf.data.feedback.records import Answer, Task
from rlhf.data.feedback.store import Store
from rlhf.stages.artifact import Artifact, identify
from rlhf.stages.feedback.config import FeedbackSettings
from rlhf.stages.feedback.stores import left_behind
from rlhf.stages.feedback.train import train
from rlhf.stages.models import save_folder
from rlhf.stages.settings_file import read_settings, write_settings

JUDGE = "def length(prompts, responses):\n    return [float(len(text)) for text in responses]\n"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("policy") / "sft-12345678" / "model"
    folder.parent.mkdir()
    save_folder(folder, tiny_policy(), byte_tokenizer())
    return str(folder)


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder, with three prompts and a judge of its own beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "feedback_judge.py").write_text(JUDGE)
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{text}"}}\n' for text in ("one", "two", "three")))
    return tmp_path


def begun(policy: str, **settings: Any) -> Path:
    """A step's folder, named as the pipeline names it."""
    given = {"model": policy, "prompts": "prompts.jsonl", "max_new_tokens": 8, "max_length": 64, "report_to": []}
    found = FeedbackSettings.load(given | settings, "feedback")
    folder = Path(identify(found).folder_name)
    write_settings(folder, found)
    return folder


def status(folder: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((folder / "status.json").read_text())
    return told


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rankings.jsonl").read_text().splitlines()]


def rate(folder: Path, name: str, number: int = 99, target: int = 9) -> list[Task]:
    """A person ranks so many prompts: longer answers are worse."""
    with Store.open(folder / "feedback.sqlite") as store:
        rater = store.add_rater(name)
        done = list[Task]()
        while len(done) < number and (task := store.next_prompt(rater, target=target)) is not None:
            order = sorted(task.answers, key=lambda answer: len(answer.text))
            ranks = {answer.id: place for place, answer in enumerate(order, 1)}
            store.rank(str(uuid.uuid4()), task.prompt_id, rater, ranks)
            done.append(task)
    return done


def test_a_judge_ranks_the_answers_and_the_step_is_sealed(policy: str) -> None:
    folder = begun(policy, judge="feedback_judge:length", num_answers=3, temperatures=[0.7, 1.0])
    metrics = train(folder)
    assert (metrics["num_prompts"], metrics["num_rankings"]) == (3, 3)
    for row in rows(folder):
        assert row["strengths"] == [len(text) for text in row["responses"]]
        longest = max(row["strengths"])
        assert [rank == 1 for rank in row["ranks"]] == [strength == longest for strength in row["strengths"]]
    manifest = Artifact(folder).manifest
    assert manifest["data"].keys() == {"prompts", "judge"}
    assert set(manifest["files"]) == {"settings.yaml", "rankings.jsonl"}  # people may rate on in the store
    with Store.open(folder / "feedback.sqlite") as store:
        answers = store.answers(1)
    assert [(answer.model, answer.temperature) for answer in answers] == [
        ("sft-12345678", 0.7), ("sft-12345678", 1.0), ("sft-12345678", 0.7),
    ]  # fmt: skip


def test_without_a_judge_it_waits_until_people_have_rated_enough(policy: str) -> None:
    folder = begun(policy, num_answers=2, target=2)
    assert train(folder) == {}
    assert not Artifact(folder).sealed
    told = status(folder)
    assert (told["state"], told["step"], told["steps"]) == ("waiting", 0, 3)
    assert f"`rlhf rank {folder}/feedback.sqlite --target 2`" in told["message"]
    assert len(rate(folder, "ann")) == 3
    rate(folder, "bob", 2)
    assert train(folder) == {}
    assert (status(folder)["step"], status(folder)["message"][:7]) == (2, "2 of 3 ")
    rate(folder, "bob")
    assert train(folder)["num_votes"] == 6
    assert Artifact(folder).sealed


def test_a_length_that_the_model_has_no_positions_for_is_refused_before_people_rate_and_not_after(policy: str) -> None:
    folder = begun(policy, num_answers=2, max_length=65)
    with pytest.raises(SettingsError, match=r"feedback\.max_length is 65, but the model has 64 positions; lower it"):
        train(folder)
    with Store.open(folder / "feedback.sqlite") as store:
        for prompt in (1, 2, 3):
            assert store.answers(prompt) == []
            store.add_answers(prompt, [Answer("a", "m"), Answer("b", "m")])  # as a release that did not refuse it
    rate(folder, "ann")
    assert train(folder)["num_votes"] == 3


def test_what_people_ranked_elsewhere_and_this_step_will_not_have_is_found(policy: str) -> None:
    def lost(folder: Path) -> list[tuple[str, int, bool]]:
        found = left_behind(read_settings(folder, FeedbackSettings), Path(), folder)
        return [(store.parent.name, number, alike) for store, number, alike in found]

    one = begun(policy, num_answers=2)
    train(one)
    rate(one, "ann", 2)
    other = begun(policy, num_answers=2, max_length=63)
    assert lost(other) == [(one.name, 2, False)]
    higher = begun(policy, num_answers=2, target=2)
    assert lost(higher) == []  # it begins with them
    train(higher)
    rate(higher, "bob", 1)
    assert lost(higher) == []
    assert lost(one) == []  # where bob went on is taken over
    rate(one, "cleo", 1)  # in both
    assert lost(one) == [(higher.name, 1, True)]
    assert lost(higher) == [(one.name, 1, True)]
    unknown = left_behind(read_settings(other, FeedbackSettings), Path(), None)
    assert {store.parent.name: number for store, number, _ in unknown} == {one.name: 3, higher.name: 3}
    second = read_settings(other, FeedbackSettings).model_copy(update={"round": 2})
    assert list(left_behind(second, Path(), None)) == []  # what was ranked in another round is another step's


def test_a_prompt_that_is_skipped_or_flagged_keeps_nobody_waiting(policy: str) -> None:
    folder = begun(policy, num_answers=2)
    train(folder)
    with Store.open(folder / "feedback.sqlite") as store:
        ann = store.add_rater("ann")
        first = store.next_prompt(ann)
        assert first is not None
        store.skip(str(uuid.uuid4()), first.prompt_id, ann)
        second = store.next_prompt(ann)
        assert second is not None
        store.flag(str(uuid.uuid4()), second.prompt_id, ann, "x")
    train(folder)
    assert (status(folder)["step"], status(folder)["steps"]) == (2, 3)
    rate(folder, "ann")
    metrics = train(folder)
    assert (metrics["num_rankings"], metrics["num_prompts_skipped"], metrics["num_prompts_flagged"]) == (1, 1, 1)


def test_another_target_goes_on_with_what_people_rated_and_other_answers_do_not(policy: str) -> None:
    one = begun(policy, num_answers=2)
    train(one)
    rate(one, "ann")
    train(one)
    two = begun(policy, num_answers=2, target=2)
    train(two)
    assert status(two)["state"] == "waiting"
    rate(two, "bob")
    assert train(two)["num_votes"] == 6
    other = begun(policy, num_answers=2, seed=1)
    train(other)
    assert status(other)["step"] == 0


def test_a_target_that_is_lowered_again_finds_what_was_rated_for_the_higher_one(policy: str) -> None:
    low = begun(policy, num_answers=2)
    train(low)
    rate(low, "ann", 1)
    high = begun(policy, num_answers=2, target=2)
    train(high)
    rate(high, "bob")
    rate(low, "cleo", 1, target=1)  # which the other store has not
    train(low)
    assert status(low)["step"] == 2
    with Store.open(low / "feedback.sqlite") as store, Store.open(high / "feedback.sqlite") as other:
        assert len(store.request_ids()) == 2
        for act in store.request_ids() - other.request_ids():  # as if it had been said there, too
            other.skip(act, 3, other.add_rater("cleo"))
    assert train(low)["num_votes"] == 4


def test_so_many_prompts_are_for_everybody(policy: str) -> None:
    folder = begun(policy, num_answers=2, overlap=2)
    train(folder)
    assert len(rate(folder, "ann")) == 3
    with Store.open(folder / "feedback.sqlite") as store:
        bob = store.add_rater("bob")
        while (task := store.next_prompt(bob)) is not None:  # of the target that is reached already
            store.rank(str(uuid.uuid4()), task.prompt_id, bob, {answer.id: 1 for answer in task.answers})
        assert store.progress(bob).raters[0].num_rated == 2
    train(folder)
    more = begun(policy, num_answers=2, overlap=3)  # another step, with what people have rated
    assert train(more)["num_votes"] == 5
    with Store.open(more / "feedback.sqlite") as store:
        assert store.progress(bob).raters[0].num_left == 1


def test_a_second_round_adds_to_the_rankings_of_the_first(policy: str) -> None:
    judged = {"judge": "feedback_judge:length", "num_answers": 2}
    first = begun(policy, **judged)
    train(first)
    second = begun(policy, **judged, round=2, earlier=str(first.absolute() / "rankings.jsonl"))
    assert train(second)["num_rankings"] == 6
    both = [(row["prompt"], tuple(row["responses"])) for row in rows(second)]
    old = [(row["prompt"], tuple(row["responses"])) for row in rows(first)]
    assert set(old) < set(both)
    assert len(set(both)) == 6
    with Store.open(second / "feedback.sqlite") as store:
        assert {answer.round for answer in store.answers(1)} == {1, 2}
    with Store.open(first / "feedback.sqlite") as store:
        assert {answer.round for answer in store.answers(1)} == {1}


def test_a_second_round_counts_its_own_prompts_and_says_how_many_the_first_had(policy: str) -> None:
    Path("prompts.jsonl").write_text("".join(f'{{"prompt": "{number}"}}\n' for number in range(5)))
    some = {"num_answers": 2, "num_prompts": 3}  # of five, so that one at least is in both rounds
    first = begun(policy, **some)
    train(first)
    rate(first, "ann")
    train(first)
    second = begun(policy, **some, round=2, earlier=str(first.absolute() / "rankings.jsonl"))
    train(second)
    assert status(second)["message"].startswith("round 2: 0 of 3 prompts are rated by a person (3 of round 1): `rlhf")
    assert [task.round for task in rate(second, "bob", 2)] == [2, 2]
    train(second)
    assert (status(second)["step"], status(second)["steps"]) == (2, 3)
    with Store.open(second / "feedback.sqlite") as store:
        [ann, bob] = store.progress(target=1, round=2).raters
    assert [(own.num_rated, own.num_left) for own in (ann, bob)] == [(0, 1), (2, 1)]
    rate(second, "bob")
    metrics = train(second)
    assert (metrics["num_prompts"], metrics["num_rankings"]) == (3, 6)


def test_a_second_round_without_the_store_of_the_first_is_refused(policy: str) -> None:
    judged = {"judge": "feedback_judge:length", "num_answers": 2}
    first = begun(policy, **judged)
    train(first)
    (first / "feedback.sqlite").unlink()
    second = begun(policy, **judged, round=2, earlier=str(first.absolute() / "rankings.jsonl"))
    with pytest.raises(DataError, match=r"feedback.sqlite: no such file; the store of the round before is wanted"):
        train(second)


def test_what_a_kill_left_of_a_deleted_store_does_not_come_back(policy: str) -> None:
    folder = begun(policy, num_answers=2)
    with Store.create(folder / "feedback.sqlite") as store:
        store.add_answers(store.add_prompt("old"), [Answer("a", "m"), Answer("b", "m")])
        log = (folder / "feedback.sqlite-wal").read_bytes()  # closing would empty it
    (folder / "feedback.sqlite").unlink()
    (folder / "feedback.sqlite-wal").write_bytes(log)
    train(folder)
    assert status(folder)["steps"] == 3
    with Store.open(folder / "feedback.sqlite") as store:
        assert [answer.model for answer in store.answers(1)] == ["sft-12345678"] * 2


def test_a_step_says_what_sampling_came_to(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("prompts.jsonl").write_text(f'{{"prompt": "{"x" * 99}"}}\n{{"prompt": "one"}}\n')
    folder = begun(policy, num_answers=2)
    train(folder)
    told = capsys.readouterr().out
    assert "4 answers to 2 prompts added, round 1" in told
    assert "1 prompts were cut on the left" in told
    train(folder)
    assert "answers to" not in capsys.readouterr().out


def test_a_server_that_is_not_there_fails_the_step_and_keeps_the_answers(policy: str) -> None:
    folder = begun(policy, num_answers=2, judge_from={"url": "http://127.0.0.1:1", "model": "big"})
    with pytest.raises(RuntimeError, match=r"3 prompts are not judged: .*cannot be reached"):
        train(folder)
    with Store.open(folder / "feedback.sqlite") as store:
        assert len(store.answers(1)) == 2


def test_answers_of_which_no_two_differ_are_nothing_to_rank(policy: str) -> None:
    folder = begun(policy)
    with Store.create(folder / "feedback.sqlite") as store:
        for text in ("one", "two", "three"):
            store.add_answers(store.add_prompt(text), [Answer("same", "m")])
    with pytest.raises(DataError, match="no prompt has two different answers"):
        train(folder)


def test_who_judges_and_for_how_many_is_in_the_key_and_where_a_server_is_not(policy: str) -> None:
    def key(**settings: Any) -> str:
        given = {"model": policy, "prompts": "prompts.jsonl", **settings}
        return identify(FeedbackSettings.load(given, "feedback")).key

    here, there = ({"judge_from": {"url": f"http://{host}", "model": "big"}} for host in ("a", "b"))
    keys = [key(), key(judge="feedback_judge:length"), key(**here), key(target=2), key(rule="mean_rank"), key(round=2)]
    assert len(set(keys)) == len(keys)
    assert key(**here) == key(**there)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"judge": "a:b", "judge_from": {"url": "http://h", "model": "m"}}, "one of the two can judge"),
        ({"max_new_tokens": 64, "max_length": 64}, "leaves no room for a prompt"),
        ({"temperatures": [1.0, 0.0]}, "0.0 is no temperature"),
        ({"num_answers": 1}, "feedback.num_answers"),
        ({"rule": "loudest"}, "feedback.rule"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        FeedbackSettings.load({"prompts": "p.jsonl"} | settings, "feedback")
