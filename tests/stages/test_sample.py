"""Answers for a feedback store: of which kinds they are, that none comes twice, and that a kill changes nothing."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from stages_world import byte_tokenizer, tiny_policy

from rlhf.data.errors import DataError, SettingsError
from rlhf.data.feedback.store import Store
from rlhf.data.messages import Messages
from rlhf.data.rows import Prompt
from rlhf.stages import sample
from rlhf.stages.models import save_folder
from rlhf.stages.sample import TRIES, Filled, Law, fill, lines, main

PROMPTS = [Prompt([{"role": "user", "content": text}], {}) for text in ("one", "two", "three", "four", "five")]


class Scripted:
    """A writer that says what it is told to, call by call."""

    def __init__(self, name: str, say: Callable[[int], Sequence[str]]) -> None:
        self.name, self.calls, self.temperatures = name, 0, list[float]()
        self._say = say

    def answers(self, prompts: Sequence[Messages], temperature: float) -> list[str]:
        self.calls += 1
        self.temperatures.append(temperature)
        return list(self._say(self.calls))[: len(prompts)]

    def cuts(self, prompt: Messages) -> bool:
        return False


def filled(store: Store, law: Law, *writers: Any, prompts: Sequence[Prompt] = PROMPTS) -> Filled:
    told = Filled()
    for start, piece in law.pieces(prompts):
        told.add(fill(store, lambda: writers, law, start, piece))
    return told


def contents(store: Store) -> list[list[tuple[str, str, float | None]]]:
    """All answers by prompt."""
    ids = [store.add_prompt(prompt.messages) for prompt in PROMPTS]
    return [[(a.text, a.model, a.temperature) for a in store.answers(id_)] for id_ in ids]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two checkpoints."""
    folders = [tmp_path_factory.mktemp("models") / str(seed) for seed in range(2)]
    for seed, folder in enumerate(folders):
        save_folder(folder, tiny_policy(seed=seed), byte_tokenizer())
    return [str(folder) for folder in folders]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{p.messages[0]["content"]}"}}\n' for p in PROMPTS))
    return str(path)


def run(models: Sequence[str], prompts: str, store: Path, *more: str) -> list[list[tuple[str, str, float | None]]]:
    main([*models, "--prompts", prompts, "--store", str(store), "--max-new-tokens", "8", *more])
    with Store.open(store) as opened:
        return contents(opened)


def test_models_and_temperatures_take_turns_and_are_recorded(models: list[str], prompts: str, tmp_path: Path) -> None:
    found = run(models, prompts, tmp_path / "s", "--num-answers", "3", "--temperature", "0.7,1.0")
    kinds = [(model, temperature) for temperature in (0.7, 1.0) for model in models]
    assert [(model, temperature) for answers in found for _, model, temperature in answers] == [*kinds * 3, *kinds[:3]]
    assert all(len({text for text, _, _ in answers}) == 3 for answers in found)


def test_so_many_prompts_are_for_all_raters(models: list[str], prompts: str, tmp_path: Path) -> None:
    for _ in range(2):  # the same ones, when it is run again
        run(models[:1], prompts, tmp_path / "s", "--overlap", "2")
        with Store.open(tmp_path / "s") as store:
            rater = store.add_rater("somebody")
            assert store.progress(rater, target=0).raters[0].num_left == 2


def test_the_same_seed_says_the_same_and_another_something_else(
    models: list[str], prompts: str, tmp_path: Path
) -> None:
    one, two = (run(models[:1], prompts, tmp_path / name) for name in ("a", "b"))
    assert one == two
    assert run(models[:1], prompts, tmp_path / "c", "--seed", "1") != one


def test_after_a_kill_the_same_command_ends_where_it_would_have(
    models: list[str], prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sample, "AT_ONCE", 8)  # two prompts a piece
    whole = run(models[:1], prompts, tmp_path / "whole")
    add, calls = Store.add_answers, list[int]()

    def killed(*arguments: Any) -> list[int]:
        calls.append(1)
        if len(calls) == 4:  # in the middle of a piece
            raise KeyboardInterrupt
        return add(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "add_answers", killed)
        with pytest.raises(KeyboardInterrupt):
            run(models[:1], prompts, tmp_path / "killed")
    with Store.open(tmp_path / "killed") as store:
        assert list(map(len, contents(store))) == [4, 4, 0, 0, 0]
    capsys.readouterr()
    assert run(models[:1], prompts, tmp_path / "killed") == whole
    assert "12 answers to 3 prompts added" in (told := capsys.readouterr().out)
    assert "2 prompts had answers of this round already" in told


def test_a_finished_store_asks_no_model_for_anything(models: list[str], prompts: str, tmp_path: Path) -> None:
    found = run(models[:1], prompts, tmp_path / "s")
    assert run(["./no-such-model"], prompts, tmp_path / "s") == found


def test_a_new_round_is_sampled_anew_and_an_old_one_refused(models: list[str], prompts: str, tmp_path: Path) -> None:
    first = run(models[:1], prompts, tmp_path / "s")
    both = run(models[:1], prompts, tmp_path / "s", "--round", "2")
    assert [answers[:4] for answers in both] == first
    assert {len(answers) for answers in both} == {8}
    with pytest.raises(DataError, match="has answers of round 2; give --round 3"):
        run(models[:1], prompts, tmp_path / "s")


def test_what_says_nothing_or_the_same_is_drawn_again(tmp_path: Path) -> None:
    said = {1: ["a", "a", ""], 2: ["b", "a"], 3: ["c"]}
    writer = Scripted("m", lambda call: said[call])
    with Store.create(tmp_path / "s") as store:
        told = filled(store, Law(3, (1.0,), 0, 1), writer, prompts=PROMPTS[:1])
        assert [text for text, _, _ in contents(store)[0]] == ["a", "b", "c"]
    assert told == Filled(num_prompts=1, num_answers=3)
    assert writer.calls == 3


def test_what_never_comes_is_left_out_and_told(tmp_path: Path) -> None:
    writer = Scripted("m", lambda _: ["same", "same"])
    law = Law(2, (1.0,), 0, 1)
    with Store.create(tmp_path / "s") as store:
        told = filled(store, law, writer, prompts=PROMPTS[:1])
        assert [text for text, _, _ in contents(store)[0]] == ["same"]
    assert writer.calls == 1 + TRIES
    assert told == Filled(num_prompts=1, num_answers=1, num_missing=1, num_single=1)
    assert lines(told, law)[1:] == [
        "1 answers fewer than wanted: 5 tries said nothing, or what others say",
        "1 prompts have fewer than two different answers: nothing to rank there",
    ]


def test_a_draw_again_is_of_the_same_kind(tmp_path: Path) -> None:
    cold = Scripted("m", lambda call: ["x", "x"] if call == 1 else [f"y{call}"] * 2)
    with Store.create(tmp_path / "s") as store:
        filled(store, Law(2, (0.5, 1.0), 0, 1), cold, prompts=PROMPTS[:1])
        assert contents(store)[0] == [("x", "m", 0.5), ("y2", "m", 1.0)]


def test_answers_that_leave_no_room_for_the_prompt_are_refused(models: list[str], prompts: str, tmp_path: Path) -> None:
    message = r"64 new tokens leave no room for a prompt in its 64 positions; give fewer \(--max-new-tokens, in a"
    with pytest.raises(SettingsError, match=message):
        run(models[:1], prompts, tmp_path / "s", "--max-new-tokens", "64")


def test_of_two_at_once_the_first_to_have_answers_keeps_the_prompt(tmp_path: Path) -> None:
    law = Law(2, (1.0,), 0, 1)
    with Store.create(tmp_path / "s") as store, Store.open(tmp_path / "s") as other:

        def meanwhile(_: int) -> list[str]:
            filled(other, law, Scripted("quick", lambda _: ["a", "b"]), prompts=PROMPTS[:1])
            return ["c", "d", "e", "f"]

        told = filled(store, law, Scripted("slow", meanwhile), prompts=PROMPTS[:2])
        assert [[text for text, _, _ in answers] for answers in contents(store)[:2]] == [["a", "b"], ["e", "f"]]
    assert told == Filled(num_prompts=1, num_answers=2, num_before=1)


def test_prompts_that_are_cut_are_counted(
    models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(f'{{"prompt": "{"x" * 99}"}}\n{{"prompt": "one"}}\n')
    run(models[:1], str(path), tmp_path / "s")
    assert "1 prompts were cut on the left" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--num-answers", "1"], ["--temperature", "0"], ["--temperature", "a"]])
def test_words_that_make_no_sense_are_refused(prompts: str, tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(SettingsError, match=words[0]):
        run(["m"], prompts, tmp_path / "s", *words)


def test_a_model_that_cannot_be_loaded_leaves_no_store_behind(prompts: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no folder '\./gone'"):
        run(["./gone"], prompts, tmp_path / "s")
    assert not (tmp_path / "s").exists()
