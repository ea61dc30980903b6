"""Judges in a feedback store: functions, and models that are asked for every pair in both orders."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chat_world import ChatServer, chatting, saying

from rlhf.data.errors import DataError, SettingsError, Stopped
from rlhf.data.feedback.records import Answer, Judged
from rlhf.data.feedback.store import Store
from rlhf.stages import judging
from rlhf.stages.endpoint import ChatModel
from rlhf.stages.judge import judge_answers
from rlhf.stages.judging import FunctionJudge, ModelJudge, Told, cost, judge_store, model_judge
from rlhf.stages.signals import exit_on_signal, handled

ANSWERS = {"one": ["a!!", "b", "c!"], "two": ["d", "e!"]}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """Two prompts; an exclamation mark is what makes an answer good."""
    with Store.create(tmp_path / "s.sqlite") as made:
        for prompt, texts in ANSWERS.items():
            made.add_answers(made.add_prompt(prompt), [Answer(text, "m") for text in texts])
        yield made


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chatting() as chat:
        chat.say = by_marks
        yield chat


def shown(question: str) -> tuple[str, str]:
    found = re.findall(r"<response [AB]>\n(.*?)\n</response", question)
    return found[0], found[1]


def by_marks(question: str) -> Any:
    a, b = (text.count("!") for text in shown(question))
    return saying("A" if a > b else "B" if b > a else "TIE")(question)


def judged(store: Store) -> dict[str, dict[str, int]]:
    """Ranks by the answers' texts, prompt by prompt; every prompt has one vote."""

    def ranks(found: Judged) -> dict[str, int]:
        (vote,) = found.votes
        return {answer.text: rank for answer, rank in zip(found.answers, vote.ranks, strict=True)}

    return {found.messages[0]["content"]: ranks(found) for found in store.rankings()}


def silent(text: str) -> None:
    pass


def asks(store: Store, server: ChatServer) -> Told:
    return judge_store(store, model_judge(store.path, server.url, "big", None), silent)


def test_a_functions_qualities_become_ranks_and_scores(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "store_judge.py").write_text(
        "def marks(prompts, responses):\n"
        "    assert prompts == ['one'] * 3 + ['two'] * 2\n"
        "    return [text.count('!') // 2 for text in responses]\n"
    )
    assert judge_store(store, FunctionJudge("store_judge:marks"), silent) == Told(num_judged=2)
    assert judged(store) == {"one": {"a!!": 1, "b": 2, "c!": 2}, "two": {"d": 1, "e!": 1}}
    (vote,) = next(store.rankings()).votes
    assert (vote.rater.kind, vote.rater.name, vote.scores) == ("judge", "store_judge:marks", [1.0, 0.0, 0.0])
    assert judge_store(store, FunctionJudge("store_judge:marks"), silent) == Told()
    with pytest.raises(DataError, match="store_judge:none"):
        FunctionJudge("store_judge:none")


def test_a_model_is_asked_for_every_pair_in_both_orders(store: Store, server: ChatServer) -> None:
    assert asks(store, server) == Told(num_judged=2)
    assert judged(store) == {"one": {"a!!": 1, "b": 3, "c!": 2}, "two": {"d": 2, "e!": 1}}
    pairs = [shown(body["messages"][0]["content"]) for body, _ in server.asked]
    assert len(pairs) == len(set(pairs)) == 3 * 2 + 2
    assert {(b, a) for a, b in pairs} == set(pairs)
    (vote,) = next(store.rankings()).votes
    assert (vote.rater.kind, vote.rater.name, vote.scores) == ("endpoint", "big", [2.0, 0.0, 1.0])


def test_an_answer_that_wins_only_where_it_is_shown_first_is_tied(store: Store, server: ChatServer) -> None:
    server.say = saying("A")
    asks(store, server)
    assert judged(store) == {"one": {"a!!": 1, "b": 1, "c!": 1}, "two": {"d": 1, "e!": 1}}


def test_nothing_is_asked_twice_not_even_for_another_store(store: Store, server: ChatServer, tmp_path: Path) -> None:
    asks(store, server)
    first, number = judged(store), len(server.asked)
    (tmp_path / "s.sqlite.replies.jsonl").rename(tmp_path / "t.sqlite.replies.jsonl")
    with Store.create(tmp_path / "t.sqlite") as other:
        for prompt, texts in ANSWERS.items():
            other.add_answers(other.add_prompt(prompt), [Answer(text, "m") for text in texts])
        judge = model_judge(other.path, server.url, "big", None)
        judge_store(other, judge, silent)
        assert judged(other) == first
    assert len(server.asked) == number
    assert (judge.num_requests, judge.num_known) == (0, 8)


def test_a_reply_that_a_kill_cut_short_is_asked_for_again(store: Store, server: ChatServer, tmp_path: Path) -> None:
    said = tmp_path / "s.sqlite.replies.jsonl"
    said.write_text('{"model": "big", "question": "x", "reply": "A", "usage": {}}\n{"model": "big", "ques')
    assert asks(store, server) == Told(num_judged=2)
    assert len([json.loads(line) for line in said.read_text().splitlines()]) == 9


def test_the_cost_is_what_the_server_says(store: Store, server: ChatServer) -> None:
    usage = {"prompt_tokens": 50, "completion_tokens": 2, "total_tokens": 52}
    server.say = lambda text: by_marks(text) | {"usage": usage}
    judge = model_judge(store.path, server.url, "big", None)
    judge_store(store, judge, silent)
    assert cost(judge).startswith("8 requests, 400 tokens read and 16 written")


@pytest.mark.parametrize("said", ["A", " a.", "**B**", "Answer: B", "Better: TIE", "tie"])
def test_a_verdict_is_understood(store: Store, server: ChatServer, said: str) -> None:
    server.say = saying(said)
    assert asks(store, server).num_judged == 2


@pytest.mark.parametrize("said", ["A is better than B", "", "neither", "C"])
def test_what_is_no_verdict_is_a_failure_and_no_ranking(store: Store, server: ChatServer, said: str) -> None:
    right = server.say
    server.say = lambda text: saying(said)(text) if "b" in shown(text) else right(text)
    told = asks(store, server)
    assert (told.num_judged, told.num_failed) == (1, 1)
    assert f"big said neither A, B nor TIE but {said!r}" in told.first_failure
    assert list(judged(store)) == ["two"]
    server.say = right
    assert asks(store, server).num_judged == 1  # what was no verdict is asked again
    assert sorted(judged(store)) == ["one", "two"]


def test_a_server_that_fails_ends_it_and_the_next_run_goes_on(
    store: Store, server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        prompt = store.add_prompt(f"more {number}")
        store.add_answers(prompt, [Answer("x", "m"), Answer("y!", "m")])
    monkeypatch.setattr(judging, "MAX_FAILURES", 2)
    monkeypatch.setattr(ModelJudge, "at_once", 1)
    server.status = 500
    told = asks(store, server)
    assert (told.num_judged, told.num_failed, told.num_left) == (0, 2, 4)
    assert "HTTP 500" in told.first_failure
    server.status = 200
    assert asks(store, server) == Told(num_judged=6)


def test_of_a_prompt_about_which_a_question_has_failed_no_more_is_asked(store: Store, server: ChatServer) -> None:
    asked = list[str]()

    def fails(question: str) -> Any:
        asked.append(question)
        return saying("hm")(question)

    server.say = fails
    model = ChatModel(server.url, "big", at_once=1)
    told = judge_store(store, ModelJudge(model, store.path.with_name("said")), silent)
    assert (told.num_judged, told.num_failed, len(asked)) == (0, 2, 2)  # of eight questions one for each prompt


def test_what_has_not_been_asked_at_ctrl_c_is_not_asked_any_more(
    store: Store, server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = ModelJudge(ChatModel(server.url, "big", at_once=1), store.path.with_name("said"))
    asked = list[int]()

    def stopped(*_: Any) -> float:
        asked.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(judge, "_first_wins", stopped)
    with pytest.raises(KeyboardInterrupt):
        judge_store(store, judge, silent)
    assert len(asked) < 8


def test_a_file_of_replies_that_is_none_is_refused_with_its_line(store: Store, server: ChatServer) -> None:
    said = store.path.with_name("s.sqlite.replies.jsonl")
    for line in ("{garbage", "[1]", '{"model": "big"}', '{"model": "big", "question": "x", "reply": 1}'):
        said.write_text('{"model": "big", "question": "x", "reply": "A"}\n' + line + "\n")
        with pytest.raises(DataError, match=r"replies.jsonl line 2: no reply of a model; delete the line"):
            asks(store, server)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return {i: 1.0 for i in range(len(responses))}", "a list of numbers is wanted, not a dict"),
        ("return '1' * len(responses)", "a list of numbers is wanted, not a str"),
        ("return [10**400] * len(responses)", "for row 1, not a finite number"),
        ("return [[1, 2]] * len(responses)", "for row 1, not a finite number"),
        ("return [1.0]", "1 qualities for 5 responses"),
        ("return None", "TypeError"),
        ("raise SystemExit(0)", "judge odd_judge:judge: SystemExit: 0"),
        ("import sys; sys.exit()", "judge odd_judge:judge: SystemExit$"),
        ("raise KeyboardInterrupt", "judge odd_judge:judge: KeyboardInterrupt$"),
        ("raise type('Odd', (BaseException,), {})('odd')", "judge odd_judge:judge: Odd: odd"),
    ],
)
def test_what_a_function_returns_is_checked_before_it_is_believed(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_judge", raising=False)
    (tmp_path / "odd_judge.py").write_text(f"def judge(prompts, responses):\n    {body}\n")
    with handled(exit_on_signal), pytest.raises(ValueError, match=message):
        judge_store(store, FunctionJudge("odd_judge:judge"), silent)
    assert list(store.rankings()) == []


@pytest.mark.parametrize("body", ["raise SystemExit", "raise KeyboardInterrupt", "raise RuntimeError"])
def test_a_module_that_ends_while_it_is_imported_is_no_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "ending_judge.py").write_text(body)
    told = f"^ending_judge:judge: importing it raised {body.split()[1]}$"
    with handled(exit_on_signal), pytest.raises(DataError, match=told):
        FunctionJudge("ending_judge:judge")


def test_a_signal_while_a_function_judges_stops_and_is_no_fault_of_the_judge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handled as the command line does, and as Python itself does."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "slow_judge.py").write_text(
        "import signal\ndef judge(prompts, responses):\n    signal.raise_signal(signal.SIGINT)\n"
    )
    with handled(exit_on_signal), pytest.raises(Stopped) as stop:
        judge_answers("slow_judge:judge", ["p"], ["r"])
    assert stop.value.code == 130
    with handled(), pytest.raises(KeyboardInterrupt):
        judge_answers("slow_judge:judge", ["p"], ["r"])


def test_the_key_is_read_from_the_environment_or_missed(
    store: Store, server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SettingsError, match="no JUDGE_TOKEN"):
        model_judge(store.path, server.url, "big", "JUDGE_TOKEN")
    monkeypatch.setenv("JUDGE_TOKEN", "very-secret")
    judge_store(store, model_judge(store.path, server.url, "big", "JUDGE_TOKEN"), silent)
    assert {key for _, key in server.asked} == {"Bearer very-secret"}
    assert "very-secret" not in (store.path.parent / "s.sqlite.replies.jsonl").read_text()
    with pytest.raises(SettingsError, match="not the address of a server"):
        model_judge(store.path, "localhost", "big", None)
