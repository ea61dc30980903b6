"""Which prompts are put up for rating: some by chance, or those on whose answers reward models disagree most."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from stages_world import byte_tokenizer, tiny_policy
from transformers import LlamaForSequenceClassification

from rlhf.data.errors import SettingsError
from rlhf.data.feedback.store import Store
from rlhf.stages.artifact import identify
from rlhf.stages.feedback import choose
from rlhf.stages.feedback.choose import by_chance, disagreement, most_disputed
from rlhf.stages.feedback.config import FeedbackSettings
from rlhf.stages.feedback.train import train
from rlhf.stages.models import ScalarModel, save_folder
from rlhf.stages.settings_file import write_settings

CPU = torch.device("cpu")


def test_models_of_one_mind_do_not_disagree() -> None:
    assert disagreement(torch.tensor([[1.0, 2.0, 3.0], [0.0, 1.0, 2.0]])) == pytest.approx(0, abs=1e-6)
    assert disagreement(torch.zeros(2, 1)) == 0.0


def test_disagreement_is_the_spread_of_the_chance_to_win() -> None:
    # one pair, of which one model thinks that a wins with probability 3/4, the other with 1/4
    scores = torch.tensor([[math.log(3), 0.0], [0.0, math.log(3)]])
    assert disagreement(scores) == pytest.approx(0.25)
    # a third answer about which both are quite sure adds two pairs without a spread
    assert disagreement(torch.cat([scores, torch.full((2, 1), -50.0)], dim=1)) == pytest.approx(0.25 / 3)


def test_the_most_disputed_are_put_up_in_the_order_of_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {
        "a": [[0.0, 0.0], [2.0, 0.0], [0.0, 0.0], [1.0, 0.0]],
        "b": [[0.0, 0.0], [0.0, 2.0], [0.0, 3.0], [1.0, 0.0]],
    }
    monkeypatch.setattr(choose, "score", lambda model, *_: map(torch.tensor, said[model]))
    assert most_disputed(2, [[]] * 4, [["x", "y"]] * 4, ["a", "b"], CPU) == [1, 2]


def test_chance_takes_others_in_each_round_and_never_more_than_there_are() -> None:
    first, second = by_chance(5, 100, seed=0, round_=1), by_chance(5, 100, seed=0, round_=2)
    assert (first, len(set(first))) == (sorted(first), 5)
    assert first == by_chance(5, 100, seed=0, round_=1) != second
    assert by_chance(9, 3, seed=0, round_=1) == [0, 1, 2]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A policy and two reward models."""
    root = tmp_path_factory.mktemp("models")
    save_folder(root / "policy", tiny_policy(), byte_tokenizer())
    for seed in range(2):
        config = tiny_policy().config
        config.num_labels = 1
        torch.manual_seed(seed)
        save_folder(root / f"reward{seed}", ScalarModel(LlamaForSequenceClassification(config)), byte_tokenizer())
    return {name: str(root / name) for name in ("policy", "reward0", "reward1")}


def begun(models: dict[str, str], **settings: Any) -> Path:
    given = {"model": models["policy"], "prompts": "prompts.jsonl", "max_new_tokens": 8, "max_length": 64}
    found = FeedbackSettings.load(given | {"num_answers": 2, "report_to": []} | settings, "feedback")
    folder = Path(identify(found).folder_name)
    write_settings(folder, found)
    return folder


def put_up(folder: Path) -> list[str]:
    with Store.open(folder / "feedback.sqlite") as store:
        return [task.messages[0]["content"] for task in store.tasks(store.add_rater("somebody"))]


def test_a_step_puts_up_so_many_and_asks_the_models_once(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("prompts.jsonl").write_text("".join(f'{{"prompt": "{text}"}}\n' for text in "abcdef"))
    rewards = [models["reward0"], models["reward1"]]
    folder = begun(models, num_prompts=2, choose_by=rewards, overlap=1)
    train(folder)
    assert len(chosen := put_up(folder)) == 2
    with Store.open(folder / "feedback.sqlite") as store:  # one prompt waits for everybody, whatever the target
        assert store.progress(store.add_rater("anybody"), target=0).raters[0].num_left == 1
    assert not list(folder.glob("candidates*"))
    with monkeypatch.context() as patch:
        patch.setattr("rlhf.stages.feedback.train.most_disputed", lambda *_: pytest.fail("asked again"))
        train(folder)
    assert put_up(folder) == chosen
    by_hand = begun(models, num_prompts=6)
    train(by_hand)
    assert put_up(by_hand) == list("abcdef")
    with Store.open(by_hand / "feedback.sqlite") as every, Store.open(folder / "feedback.sqlite") as some:
        texts = {text: [a.text for a in every.answers(every.add_prompt(text))] for text in "abcdef"}
        assert {text: [a.text for a in some.answers(some.add_prompt(text))] for text in chosen} == {
            text: texts[text] for text in chosen
        }
    messages = [[{"role": "user", "content": text}] for text in texts]
    places = most_disputed(2, messages, list(texts.values()), rewards, CPU)
    assert [list(texts)[place] for place in places] == chosen


def test_the_models_are_in_the_key_by_what_they_are(models: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    moved = tmp_path / "moved"
    moved.symlink_to(models["reward1"])

    def key(*rewards: str) -> str:
        given = {"model": models["policy"], "prompts": str(tmp_path / "p.jsonl"), "num_prompts": 1}
        return identify(FeedbackSettings.load(given | {"choose_by": list(rewards)}, "feedback")).key

    assert key(models["reward0"], models["reward1"]) == key(models["reward0"], str(moved))
    assert key(models["reward0"], models["reward1"]) != key(models["reward0"], models["reward0"])


@pytest.mark.parametrize("settings", [{"choose_by": ["a"], "num_prompts": 1}, {"choose_by": ["a", "b"]}])
def test_one_model_cannot_disagree_and_a_choice_needs_a_number(settings: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="choose_by takes two reward models or more"):
        FeedbackSettings.load({"prompts": "p.jsonl"} | settings, "feedback")
