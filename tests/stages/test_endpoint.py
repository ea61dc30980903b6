"""Models behind OpenAI-compatible servers: what they are asked, how they judge, and what goes wrong."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from chat_world import ChatServer, chatting, saying

from rlhf.stages import endpoint
from rlhf.stages.endpoint import ChatModel, Endpoint, EndpointError
from rlhf.stages.judge import judge_answers


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with chatting() as chat:
        yield chat


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_answers_come_in_the_order_of_the_conversations(server: ChatServer, ending: str) -> None:
    model = ChatModel(server.url + ending, "a-model", at_once=3)
    conversations = [[{"role": "user", "content": str(number)}] for number in range(9)]
    assert model.answers(conversations, 32, 0.7) == [f"<{number}>" for number in range(9)]
    bodies = [body for body, _ in server.asked]
    assert {(body["model"], body["max_tokens"], body["temperature"]) for body in bodies} == {("a-model", 32, 0.7)}


def test_a_grade_is_the_first_number_of_an_answer_at_temperature_zero(server: ChatServer) -> None:
    said = {"good": "9", "bad": "Grade: 2.5 of 10", "worse": "-1"}
    server.say = lambda text: saying(said[text.split("|")[1]])(text)
    model = ChatModel(server.url, "a-model")
    assert model.grades(["p"] * 3, list(said), "{prompt}|{response}|") == [9.0, 2.5, -1.0]
    assert {body["temperature"] for body, _ in server.asked} == {0.0}


def test_braces_in_prompt_and_response_are_left_alone(server: ChatServer) -> None:
    server.say = saying("1")
    ChatModel(server.url, "a-model").grades(["{response} {x}"], ["{prompt} {}"], "{prompt}|{response}")
    assert server.asked[0][0]["messages"][0]["content"] == "{response} {x}|{prompt} {}"


def test_a_judge_of_ones_own_may_ask_a_model(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_judges.py").write_text(
        "from rlhf.stages.endpoint import ChatModel\n"
        f"model = ChatModel({server.url!r}, 'a-model')\n"
        "def helpfulness(prompts, responses):\n"
        "    return model.grades(prompts, responses)\n"
    )
    server.say = lambda text: saying("8" if "thanks" in text else "3")(text)
    assert judge_answers("my_judges:helpfulness", ["p", "p"], ["thanks", "no"]) == [8.0, 3.0]
    server.say = saying("I cannot say")
    with pytest.raises(ValueError, match=r"judge my_judges:helpfulness: .*a-model gave row 1 no number but 'I cannot"):
        judge_answers("my_judges:helpfulness", ["p"], ["no"])


def test_the_key_is_sent_where_a_variable_is_named_and_nowhere_else(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    asked = [[{"role": "user", "content": "x"}]]
    ChatModel(server.url, "a-model", "A_KEY").answers(asked, 1, 0.0)
    ChatModel(server.url, "a-model").answers(asked, 1, 0.0)
    assert [key for _, key in server.asked] == ["Bearer secret", ""]


def test_errors_say_where_and_what(server: ChatServer) -> None:
    asked = [[{"role": "user", "content": "x"}]]
    server.say = lambda _: {"choices": []}
    with pytest.raises(EndpointError, match=rf"{server.url}: an answer without text: {{'choices': \[\]}}"):
        ChatModel(server.url, "a-model").answers(asked, 1, 0.0)
    server.status, server.say = 400, lambda _: {"error": {"message": "no such model"}}
    with pytest.raises(EndpointError, match=r"/v1/chat/completions: HTTP 400: .*no such model") as found:
        ChatModel(server.url, "a-model").answers(asked, 1, 0.0)
    assert found.value.status == 400


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that were waited for, were it not a test."""
    waited: list[float] = []
    monkeypatch.setattr(endpoint, "sleep", waited.append)
    return waited


ASKED = [[{"role": "user", "content": "x"}]]


def test_a_request_is_made_again_where_the_server_is_overloaded(server: ChatServer, pauses: list[float]) -> None:
    server.busy = [{}, {"Retry-After": "30"}]
    assert ChatModel(server.url, "a-model").answers(ASKED, 1, 0.0) == ["<x>"]
    assert pauses == [30.0, 10.0]  # as long as it asks for, and else a little longer each time


def test_a_date_to_wait_for_is_understood_and_nonsense_is_not(server: ChatServer, pauses: list[float]) -> None:
    past, soon = (format_datetime(datetime.now(UTC) + timedelta(seconds=s), usegmt=True) for s in (-900, 90))
    server.busy = [{"Retry-After": soon}, {"Retry-After": past}, {"Retry-After": "a while"}]
    ChatModel(server.url, "a-model").answers(ASKED, 1, 0.0)
    assert pauses[:2] == [2.0, 10.0]
    assert pauses[2] == pytest.approx(90, abs=5)


def test_in_the_end_it_is_an_error_that_says_how_often_was_asked(server: ChatServer, pauses: list[float]) -> None:
    server.busy = [{}] * 4
    with pytest.raises(EndpointError, match=r"HTTP 503: .* \(asked 4 times\)") as found:
        ChatModel(server.url, "a-model").answers(ASKED, 1, 0.0)
    assert (found.value.status, pauses) == (503, [2.0, 10.0, 50.0])


def test_longer_than_for_an_answer_it_is_not_waited(server: ChatServer, pauses: list[float]) -> None:
    server.busy = [{"Retry-After": "61"}]
    with pytest.raises(EndpointError, match="HTTP 503"):
        ChatModel(server.url, "a-model", timeout=60).answers(ASKED, 1, 0.0)
    assert pauses == []


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "file:///etc/passwd", "http://", ""])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not the address of a server"):
        Endpoint(url)
