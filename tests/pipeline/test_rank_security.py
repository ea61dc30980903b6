"""What the ranking page refuses, says in its log, and survives."""

import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlencode

import pytest
from rank_world import Person, make_store, open_page, ranking, votes

from rlhf.data.errors import SettingsError
from rlhf.data.feedback.store import Store
from rlhf.pipeline.rank import server
from rlhf.pipeline.rank.security import Hosts, secret_of

SCRIPT = "<script>alert('in')</script><img src=x onerror=alert(1)>"
Said = Callable[[], str]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Store, int]]:
    path = tmp_path_factory.mktemp("page") / "f.sqlite"
    with make_store(path, answers=(SCRIPT, f"```\n{SCRIPT}\n```", "plain")) as store, open_page(store) as port:
        yield store, port


@pytest.fixture
def anna(page: tuple[Store, int], request: pytest.FixtureRequest) -> Person:
    return Person(page[1]).enter(f"{request.node.name}{SCRIPT}"[:90])


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Said:
    return lambda: capsys.readouterr().err


def test_texts_of_others_are_never_markup(anna: Person) -> None:
    text = anna.get().text
    assert text.count("&lt;script&gt;alert(") == 4  # two answers, and twice the rater's name
    assert "<script>" not in text
    assert "<img" not in text


def test_every_answer_carries_the_headers_that_keep_others_out(anna: Person) -> None:
    for reply in (anna.get(), anna.get("/nothing"), anna.post("/rank", {}), Person(anna.port).get()):
        assert reply.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in reply.headers["content-security-policy"]
        assert "frame-ancestors 'none'" in reply.headers["content-security-policy"]
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["x-frame-options"] == "DENY"
        assert reply.headers["cache-control"] == "no-store"


def test_the_cookie_is_for_this_page_alone(page: tuple[Store, int]) -> None:
    cookie = Person(page[1]).post("/enter", {"name": "carl"}).headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost@evil", "[", "", None]
)
def test_a_name_that_somebody_else_had_lead_here_is_refused(
    page: tuple[Store, int], anna: Person, host: str | None, log: Said
) -> None:
    reply = anna.get(host=host)
    assert reply.status == 400
    assert "Question" not in reply.text
    if host:
        assert "is not this page's" in log()


def test_names_of_the_page() -> None:
    here, everywhere = Hosts("127.0.0.1", None), Hosts("0.0.0.0", "https://rank.example.org")
    assert all(map(here.allow, ["127.0.0.1:8700", "localhost", "LOCALHOST:1", "[::1]:8700"]))
    assert not any(map(here.allow, ["10.0.0.7", "rank.example.org", socket.gethostname() + ".evil"]))
    assert all(map(everywhere.allow, ["10.0.0.7:8700", "[fe80::1]", "rank.example.org", socket.gethostname()]))
    assert Hosts("2001:DB8:0:0::5", None).allow("[2001:db8::5]:8700")
    assert not any(map(everywhere.allow, ["evil.example", "rank.example.org.evil"]))


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "", None, "http://127.0.0.1", "http://127.0.0.1:1"])
@pytest.mark.parametrize("path", ["/rank", "/skip", "/flag", "/undo", "/enter", "/leave"])
def test_what_another_page_sends_is_refused(
    page: tuple[Store, int], anna: Person, path: str, origin: str | None, log: Said
) -> None:
    before = len(votes(page[0]))
    reply = anna.post(path, ranking(anna.form(), 1, 2, 3) | {"name": "eve", "reason": "x"}, origin=origin)
    assert (reply.status, reply.text) == (403, "This came from another page.")
    assert f"403 POST {path} from 127.0.0.1: This came from another page." in log()
    assert len(votes(page[0])) == before


def test_a_form_needs_the_session_that_it_was_made_for(page: tuple[Store, int], anna: Person, log: Said) -> None:
    eve = Person(page[1]).enter("eve")
    stolen = eve.form()["csrf"]
    for csrf in ("", stolen, "ä"):
        assert anna.rank(1, 2, 3, csrf=csrf).status == 403
    said = ranking(anna.form(), 1, 2, 3)
    assert Person(page[1]).post("/rank", said).text == "Your session is over. Load the page again."
    told = log()
    assert told.count("403 POST /rank") == 4
    assert stolen not in told


def test_a_cookie_cannot_be_made_up(page: tuple[Store, int], anna: Person) -> None:
    [(name, value)] = anna.cookies.items()
    rater, nonce, signature = value.split(".")
    for forged in (f"{int(rater) + 1}.{nonce}.{signature}", f"{rater}.{nonce}.{signature[:-1]}", "1..", "ä", ""):
        assert "Who are you?" in Person(anna.port, {name: forged.encode().decode("latin-1")}).get().text


def test_ten_megabytes_are_refused_and_the_server_stays_up(page: tuple[Store, int], anna: Person, log: Said) -> None:
    note = "sensitive" * 1_200_000
    assert anna.rank(1, 2, 3, note=note).status == 413
    assert anna.rank(1, 2, 3).status == 200
    told = log()
    assert "413 POST /rank from 127.0.0.1: This is too long." in told
    assert "sensitive" not in told


def test_a_length_that_is_only_announced_is_refused_at_once(anna: Person) -> None:
    assert anna.ask("POST", "/rank", b"", content_length=str(10**12)).status == 413
    assert anna.get().status == 200


def test_a_body_in_pieces_of_no_announced_length_is_cut(page: tuple[Store, int], anna: Person) -> None:
    with socket.create_connection(("127.0.0.1", page[1])) as talk:
        head = f"POST /rank HTTP/1.1\r\nHost: 127.0.0.1:{page[1]}\r\nOrigin: http://127.0.0.1:{page[1]}\r\n"
        talk.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        piece = b"10000\r\n" + b"x" * 0x10000 + b"\r\n"
        for _ in range(5):
            talk.sendall(piece)
        talk.sendall(b"0\r\n\r\n")
        assert talk.recv(100).startswith(b"HTTP/1.1 413")


def test_a_request_that_breaks_off_or_is_none_leaves_the_server_up(page: tuple[Store, int], anna: Person) -> None:
    head = f"POST /rank HTTP/1.1\r\nHost: 127.0.0.1:{page[1]}\r\nOrigin: http://127.0.0.1:{page[1]}\r\n"
    for data in (f"{head}Content-Length: 100\r\n\r\nab".encode(), b"\x16\x03\x01\x02\x00\xff", b"GET / HTTP/9\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", page[1])) as talk:
            talk.sendall(data)
    for body in (b"\xff\xfe", b"a=%ff", b"&".join([b"a=1"] * 2000)):
        assert anna.ask("POST", "/rank", body).status in (400, 403)
    assert anna.get().status == 200


@pytest.mark.parametrize(
    "path",
    ["/../../etc/passwd", "/%2e%2e/f.sqlite", "/page.css", "/f.sqlite-secret", "/static/..%2f..", "//etc/passwd"],
)
def test_no_path_leads_to_a_file(anna: Person, path: str, log: Said) -> None:
    reply = anna.get(path)
    assert (reply.status, reply.text) == (404, "Not Found")
    assert "404 GET" in log()


def test_a_log_line_stays_one_line(anna: Person, log: Said) -> None:
    anna.get("/a%0d%0a12:00:00%20fake%1b[2J?token=hidden")
    told = log()
    assert len(told.splitlines()) == 1
    assert "hidden" not in told
    assert "\x1b" not in told


def test_what_breaks_inside_is_one_line_and_the_server_stays_up(
    page: tuple[Store, int], anna: Person, log: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Store, "next_prompt", lambda *_, **__: 1 / 0)
        reply = anna.get()
    assert reply.status == 500
    assert "division" not in reply.text
    assert re.fullmatch(r"[\d:]+ 500 GET / from 127.0.0.1: ZeroDivisionError: division by zero\n", log())
    assert anna.get().status == 200


def test_a_store_that_cannot_be_written_is_said_so_that_the_page_tries_again(
    anna: Person, log: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sqlite3

    from rlhf.data.errors import DataError

    def locked(*_: object, **__: object) -> int:
        try:
            raise sqlite3.OperationalError("database is locked")
        except sqlite3.Error as error:
            raise DataError("f.sqlite: database is locked") from error

    with monkeypatch.context() as patch:
        patch.setattr(Store, "rank", locked)
        assert anna.rank(1, 2, 3).status == 503
    assert "503 POST /rank" in log()
    assert anna.rank(1, 2, 3).status == 200


@pytest.mark.parametrize("instead", [False, True], ids=["deleted", "replaced"])
def test_nothing_is_acknowledged_that_would_go_into_a_file_which_is_gone(
    tmp_path: Path, log: Said, instead: bool
) -> None:
    path, away = tmp_path / "f.sqlite", tmp_path / "away.sqlite"
    with make_store(path) as store, open_page(store) as port:
        anna = Person(port).enter("anna")
        said = ranking(anna.form(), 1, 2, 3)
        path.rename(away)
        if instead:
            path.write_bytes(away.read_bytes())
        reply = anna.post("/rank", said)
        assert (reply.status, reply.text) == (503, "The store cannot be written at the moment.")
        assert Person(port).post("/enter", {"name": "bob"}).status == 503
        assert log().count("f.sqlite: the file was moved, replaced or deleted while it was open") == 2
        away.rename(path)
        assert anna.post("/rank", said).status == 200
        assert len(votes(store)) == 1


def test_a_server_that_ends_answers_what_it_still_waits_for(
    tmp_path: Path, log: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SECONDS_TO_END", 0.2)
    with make_store(tmp_path / "f.sqlite") as store, socket.socket() as talk:
        with open_page(store) as port:
            talk.connect(("127.0.0.1", port))
            head = f"POST /rank HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nOrigin: http://127.0.0.1:{port}\r\n"
            talk.sendall(f"{head}Content-Length: 100\r\n\r\nab".encode())
            Person(port).get()
        assert talk.recv(100).startswith(b"HTTP/1.1 503")
    assert "broken off, since the page closes" in log()


def test_a_log_that_cannot_be_written_keeps_nobody_waiting(anna: Person, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("builtins.print", full)
        assert anna.get("/nothing").status == 404


def test_with_tokens_nobody_comes_in_without_theirs(tmp_path: Path, log: Said) -> None:
    with make_store(tmp_path / "f.sqlite") as store:
        store.add_rater("anna", token="anna-token")
        store.add_rater("robot", kind="judge", token="robot-token")
        with open_page(store) as port:
            by_name = Person(port).enter("anna")
        with open_page(store, tokens=True) as port:
            for path in ("/enter?token=wrong-token", "/enter?token=", "/enter", "/enter?token=robot-token", "/"):
                assert Person(port).get(path).status == 403
            assert Person(port).post("/enter", {"name": "anna"}).status == 403
            by_name.port = port
            assert by_name.get().status == 403  # a session by name is none here
            anna = Person(port)
            welcome = anna.get("/enter?token=anna-token")
            assert (welcome.status, "anna" in welcome.text) == (200, True)
            assert anna.rank(1, 2, 3).status == 200
            store.add_rater("anna", token="another")  # the old link is void, and so is what came of it
            assert anna.get().status == 403
    told = log()
    assert "403 GET /enter from 127.0.0.1: No rater has this token" in told
    assert "wrong-token" not in told


@pytest.mark.parametrize("token", ["a.b.c", 'ünïcödé; ł=",', "with space", "x" * 1000])
def test_a_token_may_be_any_text(tmp_path: Path, token: str) -> None:
    with make_store(tmp_path / "f.sqlite") as store, open_page(store, tokens=True) as port:
        store.add_rater("anna", token=token)
        anna = Person(port)
        assert anna.get(f"/enter?{urlencode({'token': token})}").status == 200
        assert anna.rank(1, 2, 3).status == 200


def test_a_secret_that_is_none_is_refused(tmp_path: Path) -> None:
    """With an empty one, anybody could sign."""
    path = tmp_path / "f.sqlite-secret"
    assert len(secret_of(tmp_path / "f.sqlite")) == 32
    path.write_bytes(b"")
    with pytest.raises(
        SettingsError, match=r"f\.sqlite-secret: no secret of sessions \(0 bytes, where 32 are wanted\)"
    ):
        secret_of(tmp_path / "f.sqlite")
    path.unlink()
    path.mkdir()
    with pytest.raises(SettingsError, match=r"the secret of the sessions cannot be kept here: .*[Ii]s a directory"):
        secret_of(tmp_path / "f.sqlite")
    with pytest.raises(SettingsError, match=r"cannot be kept here: .*No such file"):
        secret_of(tmp_path / "gone" / "f.sqlite")
