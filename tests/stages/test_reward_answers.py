"""Answers to be ranked that come from a model behind a server."""

from pathlib import Path
from typing import Any

import pytest
from chat_world import chatting, saying
from reward_world import marked, new_run, rankings_file, run_reward, settings
from stages_world import byte_tokenizer, tiny_policy

from rlhf.data.errors import SettingsError
from rlhf.data.rows import read_rankings
from rlhf.stages.artifact import Artifact
from rlhf.stages.endpoint import EndpointError
from rlhf.stages.models import save_folder
from rlhf.stages.reward import answers
from rlhf.stages.reward import train as stage
from rlhf.stages.reward.answers import sample_answers

JUDGED: dict[str, Any] = {"judge": "reward_judge:marks", "num_sampled_answers": 2, "max_new_tokens": 8}


@pytest.fixture(autouse=True)
def judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which counts exclamation marks."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "reward_judge.py").write_text(
        "def marks(prompts, responses):\n    return [text.count('!') for text in responses]\n"
    )


def test_the_server_is_sent_the_messages_and_its_answers_are_the_prompts_own(tmp_path: Path) -> None:
    with chatting() as server:
        run = new_run(tmp_path / "run", **JUDGED, answers_from={"url": server.url, "model": "big"}, temperature=0.7)
        prompts = [[{"role": "user", "content": text}] for text in ("a", "b", "c")]
        found = sample_answers(run, byte_tokenizer(), prompts)
        run.close()
    assert found == [["<a>"] * 2, ["<b>"] * 2, ["<c>"] * 2]
    assert [body["messages"] for body, _ in server.asked if body["messages"] in prompts[1:2]] == prompts[1:2] * 2
    asked = {(body["model"], body["max_tokens"], body["temperature"]) for body, _ in server.asked}
    assert asked == {("big", 8, 0.7)}


def test_a_stage_trains_on_them_as_on_others(tmp_path: Path) -> None:
    save_folder(tmp_path / "policy", tiny_policy(), byte_tokenizer())
    (tmp_path / "reward").mkdir()
    rows = rankings_file(tmp_path / "rows.jsonl", marked(12))
    with chatting() as server:
        server.say = saying("!!!!!!!")
        source = {"url": server.url, "model": "big"}
        run_reward(tmp_path / "reward", str(tmp_path / "policy"), rows, **JUDGED, answers_from=source)
    ranked = (tmp_path / "reward" / "answers.jsonl").read_text()
    assert ranked.count('"!!!!!!!"') == 12  # two equal ones count once
    assert not (tmp_path / "reward" / "sampled.jsonl").exists()
    (tmp_path / "reward" / "manifest.json").unlink()
    (tmp_path / "reward" / "sampled.jsonl").write_text("[]\n")  # as a kill leaves it
    run_reward(tmp_path / "reward", str(tmp_path / "policy"), rows, **JUDGED, answers_from=source)
    assert not (tmp_path / "reward" / "sampled.jsonl").exists()


def test_the_data_are_read_once_and_counted_the_same_when_the_answers_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_folder(tmp_path / "policy", tiny_policy(), byte_tokenizer())
    (tmp_path / "reward").mkdir()
    rows = marked(12)
    paths = [rankings_file(tmp_path / name, some) for name, some in (("rows.jsonl", rows), ("eval.jsonl", rows[:3]))]
    read = []

    def reading(source: Any, *more: Any) -> Any:
        read.append(Path(source.path).name)
        return read_rankings(source, *more)

    monkeypatch.setattr(stage, "read_rankings", reading)
    with chatting() as server:
        fields: dict[str, Any] = {**JUDGED, "answers_from": {"url": server.url, "model": "big"}, "eval_data": paths[1]}
        for _ in range(2):
            run_reward(tmp_path / "reward", str(tmp_path / "policy"), paths[0], **fields)
            assert "left out 3 of 12 rows of data whose prompts are in eval_data" in capsys.readouterr().out
            counted = Artifact(tmp_path / "reward").manifest["rows"]
            assert counted["data"] == {"kept": 9, "of": 12, "left_out": {"prompt is in eval_data": 3}}
            assert list(counted) == ["data", "eval_data", "answers, tokenised", "rankings, tokenised"]
            (tmp_path / "reward" / "manifest.json").unlink()
    assert read == ["rows.jsonl", "eval.jsonl"]


def test_a_judge_that_may_not_read_something_is_told_as_the_judge(tmp_path: Path) -> None:
    text = "def marks(prompts, responses):\n    raise PermissionError(13, 'no key')\n"
    (tmp_path / "keyless_judge.py").write_text(text)
    save_folder(tmp_path / "policy", tiny_policy(), byte_tokenizer())
    (tmp_path / "reward").mkdir()
    rows = rankings_file(tmp_path / "rows.jsonl", marked(12))
    with chatting() as server:
        source = {"url": server.url, "model": "big"}
        for fields in ({}, {"num_sampled_answers": 2, "max_new_tokens": 8, "answers_from": source}):
            with pytest.raises(ValueError, match=r"^judge keyless_judge:marks: PermissionError: \[Errno 13\] no key$"):
                run_reward(tmp_path / "reward", str(tmp_path / "policy"), rows, judge="keyless_judge:marks", **fields)


def test_answers_that_were_sampled_before_a_server_failed_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "AT_ONCE", 2)
    prompts = [[{"role": "user", "content": text}] for text in ("a", "b", "c")]

    def sampled() -> list[list[str]]:
        run = new_run(tmp_path / "run", **JUDGED, answers_from={"url": server.url, "model": "big"})
        try:
            return sample_answers(run, byte_tokenizer(), prompts)
        finally:
            run.close()

    with chatting() as server:
        plain = server.say
        server.say = lambda text: {"choices": []} if text == "b" else plain(text)
        with pytest.raises(EndpointError, match="an answer without text"):
            sampled()
        server.say, server.asked = plain, []
        with (tmp_path / "run" / "sampled.jsonl").open("a") as file:
            file.write('[1, "half a li')  # what a kill leaves
        assert sampled() == [["<a>"] * 2, ["<b>"] * 2, ["<c>"] * 2]
        assert len(server.asked) == 4


def test_a_process_that_hangs_while_answers_are_sampled_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_folder(tmp_path / "policy", tiny_policy(), byte_tokenizer())
    run = new_run(tmp_path / "run", **JUDGED, model=str(tmp_path / "policy"))
    watched = []

    def answer(numbers: list[int]) -> list[str]:
        watched.append(run.stopping.watched)
        return ["a"] * len(numbers)

    monkeypatch.setattr(answers, "_from_backbone", lambda *_: answer)
    sample_answers(run, byte_tokenizer(), [[{"role": "user", "content": "a"}]])
    run.close()
    assert watched == [True]
    assert not run.stopping.watched  # a judge of all answers may take as long as it likes


def test_a_resumed_stage_samples_as_one_that_was_never_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "AT_ONCE", 2)
    save_folder(tmp_path / "policy", tiny_policy(), byte_tokenizer())
    prompts = [[{"role": "user", "content": text}] for text in ("a", "b", "c")]

    def sampled(name: str) -> list[list[str]]:
        run = new_run(tmp_path / name, **JUDGED, model=str(tmp_path / "policy"))
        try:
            return sample_answers(run, byte_tokenizer(), prompts)
        finally:
            run.close()

    whole = sampled("whole")
    assert len({text for texts in whole for text in texts}) > 1
    (tmp_path / "resumed").mkdir()
    lines = (tmp_path / "whole" / "sampled.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "resumed" / "sampled.jsonl").write_text("".join(lines[:2]))
    assert sampled("resumed") == whole


def test_the_model_takes_part_in_the_key_and_the_address_does_not() -> None:
    def key(**source: str) -> dict[str, Any]:
        return settings(
            data="x.jsonl", **JUDGED, answers_from={"url": "http://a", "model": "big", **source}
        ).result_settings()

    assert key() == key(url="http://b", key_variable="A_KEY")
    assert key() != key(model="small")


def test_an_address_that_is_none_and_a_server_without_use_are_refused(tmp_path: Path) -> None:
    source = {"url": "127.0.0.1:8000", "model": "big"}
    run = new_run(tmp_path / "run", **JUDGED, answers_from=source)
    with pytest.raises(SettingsError, match=r"reward\.answers_from\.url: '127\.0\.0\.1:8000' is not the address"):
        sample_answers(run, byte_tokenizer(), [])
    run.close()
    with pytest.raises(SettingsError, match="answers_from has no effect without num_sampled_answers"):
        settings(data="x.jsonl", answers_from=source)
