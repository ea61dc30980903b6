"""Models behind OpenAI-compatible servers: what they are asked, how they judge, and what goes wrong."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path

import pytest
from chat_world import ChatServer, chatting, saying

from rlhf.stages import endpoint
from rlhf.stages.endpoint import ChatModel, Endpoint, EndpointError, each
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
    told = rf"^judge my_judges:helpfulness: {server.url}: a-model gave row 1 no number but 'I cannot"
    with pytest.raises(ValueError, match=told):
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


def test_a_server_that_is_down_is_named_with_what_happened_and_the_cure() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(EndpointError) as found:
        ChatModel(url, "a-model").reply([], 1, 0.0)
    cure = "start the server, or name the address of one that runs"
    assert str(found.value) == f"{url}/v1/chat/completions: cannot be reached (Connection refused); {cure}"


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


@pytest.mark.parametrize("url", ["http://h:99999", "http://h:x", "http://[::1", "http://h:0"])
def test_a_port_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not the address of a server"):
        Endpoint(url)


def test_a_key_that_was_read_from_a_file_is_sent_without_its_newline_and_none_is_shown(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "secret\n")
    ChatModel(server.url, "a-model", "A_KEY").answers(ASKED, 1, 0.0)
    assert server.asked[0][1] == "Bearer secret"
    monkeypatch.setenv("A_KEY", "sec\nret")
    with pytest.raises(ValueError, match=r"^the key in A_KEY has characters that cannot be sent$"):
        ChatModel(server.url, "a-model", "A_KEY")


@contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """A server that gives each request one of these answers, whatever it is asked, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            for answer in answers:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(timeout=10)


def http(body: str, status: str = "200 OK", length: int | None = None, more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {length or len(body.encode())}\r\n{more}\r\n{body}".encode()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (http("cut sho", "500 Internal Server Error", length=99), "HTTP 500: (cut sho|Internal Server Error)$"),
        (http('{"choices": [', length=99), "cannot be reached"),
        (http('{"choices": ['), "is not JSON"),
        (http("[" * 100_000), "is not JSON"),
        (b"no such protocol\r\n\r\n", "cannot be reached"),
        (b"", "cannot be reached"),
    ],
)
def test_whatever_a_server_answers_the_error_is_of_one_kind(answer: bytes, message: str) -> None:
    with answering(answer) as url, pytest.raises(EndpointError, match=message):
        Endpoint(url).post("/x", {})


def test_a_host_that_is_no_name_cannot_be_reached() -> None:
    with pytest.raises(EndpointError, match="cannot be reached"):
        Endpoint("http://a..b").get("/x")


def test_a_key_does_not_follow_a_redirect(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    moved = http("", "302 Found", more=f"Location: {server.url}/v1/chat/completions\r\n")
    with answering(moved) as url, pytest.raises(EndpointError, match="HTTP 302"):
        ChatModel(url, "a-model", "A_KEY").answers(ASKED, 1, 0.0)
    assert server.asked == []


EVIL = "\x1b[31mred\x1b]0;my window\x07\x00\u202e\r\nend"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (http(EVIL, "500 Internal Server Error"), "HTTP 500: red end"),
        (http("", f"500 {EVIL[:8]}"), "HTTP 500: red"),
        (http(json.dumps(EVIL)), "an answer without text: red end"),
        (http(json.dumps({"choices": EVIL})), "an answer without text: {'choices': '\\x1b[31mred"),
        (f"HTTP/{EVIL[:8]}\r\n\r\n".encode(), "cannot be reached (HTTP/red )"),
    ],
)
def test_what_a_server_says_in_an_error_is_nothing_that_a_terminal_would_obey(answer: bytes, message: str) -> None:
    with answering(answer) as url, pytest.raises(EndpointError) as found:
        ChatModel(url, "a-model").reply([], 1, 0.0)
    told = str(found.value)
    assert message in told
    assert told.isprintable()


def test_of_a_page_in_an_error_its_beginning_and_end_are_shown_and_where_it_is_from() -> None:
    with answering(http("<p>" + "x" * 5000 + "</p>", "500 Internal Server Error")) as url:
        with pytest.raises(EndpointError) as found:
            Endpoint(url).get("/x")
        told = str(found.value)
        assert told.startswith(f"{url}/x: HTTP 500: <p>xxx")
        assert told.endswith("xxx</p>")
        assert (len(told) < 600, " … " in told) == (True, True)
    assert len(str(EndpointError("begin" + "x" * 5000 + "cure"))) == endpoint.MAX_CHARACTERS


def test_a_server_that_hangs_is_named_with_the_seconds_and_the_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hung:  # it takes connections, and says nothing
        url = f"http://127.0.0.1:{hung.getsockname()[1]}"
        for setting, then in (("", ""), ("ppo.rollout.timeout", "; ppo.rollout.timeout sets how long is waited")):
            with pytest.raises(EndpointError) as found:
                Endpoint(url, timeout=0.05, timeout_setting=setting).get("/x")
            assert str(found.value) == (
                f"{url}/x: no answer within 0.05 seconds; look whether the server is overloaded, hung or still loading "
                f"its model{then}"
            )


def test_after_an_error_no_other_question_is_begun_and_nobody_waits_for_a_server_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "SECONDS_TO_END", 0.0)
    hangs, goes_on = threading.Event(), threading.Event()
    begun, ended = list[int](), list[int]()

    def ask(number: int) -> None:
        begun.append(number)
        if number == 0:
            hangs.set()
            goes_on.wait(timeout=10)
            ended.append(number)
        hangs.wait(timeout=10)
        raise EndpointError("gone")

    with pytest.raises(EndpointError, match="gone"):
        each(ask, range(9), 2)
    assert (sorted(begun), ended) == ([0, 1], [])
    goes_on.set()


def test_without_a_thread_nothing_is_asked() -> None:
    with pytest.raises(ValueError, match="at_once=0: ask one question at a time or more"):
        each(str, [1], 0)


def test_an_answer_without_end_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_BYTES", 10)
    with answering(http('{"a": 12345}')) as url, pytest.raises(EndpointError, match="with more than 10 bytes"):
        Endpoint(url).post("/x", {})
    with answering(http('{"a": 123}')) as url:
        assert Endpoint(url).post("/x", {}) == {"a": 123}


def test_of_no_questions_there_are_no_answers() -> None:
    assert each(str, [], 4) == []


@pytest.mark.parametrize("usage", ["many", [1], {"prompt_tokens": "five"}, None])
def test_what_a_server_says_that_it_used_may_be_nonsense(server: ChatServer, usage: object) -> None:
    server.say = lambda text: saying("fine")(text) | {"usage": usage}
    assert ChatModel(server.url, "a-model").answers(ASKED, 1, 0.0) == ["fine"]
