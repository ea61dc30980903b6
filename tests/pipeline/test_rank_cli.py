"""`rlhf rank` as a command."""

import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rank_kills import campaign
from rank_world import make_store

from rlhf.data.feedback import schema
from rlhf.data.feedback.store import Store
from rlhf.pipeline.rank import server

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_store(tmp_path / "f.sqlite").close()


def test_no_acknowledged_ranking_is_lost_or_doubled_by_a_kill(tmp_path: Path) -> None:
    (tmp_path / "kills").mkdir()
    outcome = campaign(tmp_path / "kills", num_raters=4, num_rankings=20, num_kills=1)
    assert len(outcome.acknowledged) == 80
    assert outcome.acknowledged == outcome.stored
    assert outcome.code == 128 + signal.SIGTERM
    assert outcome.said == "stopped; run again to go on\n"


def test_a_rater_gets_a_link_of_their_own(rlhf: Call) -> None:
    code, out, err = rlhf("rank", "f.sqlite", "--add-rater", "anna", "--url", "https://rank.example.org/")
    assert (code, err) == (0, "")
    match = re.fullmatch(r"https://rank\.example\.org/enter\?token=([\w-]{32})\n", out)
    assert match is not None
    with Store.open("f.sqlite") as store:
        rater = store.rater_of_token(match[1])
        assert rater is not None
        assert rater.name == "anna"
    _, out, _ = rlhf("rank", "f.sqlite", "--add-rater", "anna", "--host", "10.0.0.7", "--port", "80")
    assert out.startswith("http://10.0.0.7:80/enter?token=")
    with Store.open("f.sqlite") as store:
        assert store.rater_of_token(match[1]) is None  # the old one is void


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--host", "0.0.0.0"], "add --tokens, and make a link for each rater: rlhf rank f.sqlite --add-rater NAME"),
        (["--host", "192.168.1.5"], "whoever can reach this machine could rank as anybody"),
        (["--host", "example.org"], "whoever can reach this machine could rank as anybody"),
        (["--tokens", "--rater", "anna"], "--rater goes without --tokens"),
        (["--instructions", "gone.md"], "--instructions gone.md: cannot be read"),
        (["--url", "rank.example.org"], "scheme and host are wanted, such as https://rank.example.org"),
        (["--url", "https://example.org/rank"], "scheme and host are wanted"),
        (["--url", "https://[::1"], "scheme and host are wanted"),
        (["--url", "https://example.org:port"], "scheme and host are wanted"),
        (["--url", "https://bücher.example"], "scheme and host are wanted"),
        (["--url", "https://example.org"], "whoever can reach this machine could rank as anybody"),
        (["--rater", " "], "a rater's name has 1 to 100 characters"),
        (["--add-rater", " "], "a rater's name has 1 to 100 characters"),
    ],
)
def test_what_cannot_be_served_is_refused(rlhf: Call, words: list[str], error: str) -> None:
    code, out, err = rlhf("rank", "f.sqlite", *words)
    assert (code, out) == (2, "")
    assert error in err


def test_the_command_for_a_link_can_be_copied_where_the_store_s_name_has_a_space(rlhf: Call) -> None:
    assert "rlhf rank 'my f.sqlite' --add-rater NAME\n" in rlhf("rank", "my f.sqlite", "--host", "0.0.0.0")[2]


def test_no_store_and_a_port_that_is_taken_are_refused(rlhf: Call) -> None:
    code, _, err = rlhf("rank", "gone.sqlite")
    assert (code, "gone.sqlite: no such file" in err) == (2, True)
    with server.listening("127.0.0.1", 0) as taken:
        code, _, err = rlhf("rank", "f.sqlite", "--port", str(taken.getsockname()[1]))
    assert code == 2
    assert "in use; --port 0 takes a free one" in err


def test_instructions_are_read_as_any_editor_writes_them(rlhf: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("told.md").write_bytes(b"\xef\xbb\xbf# Title\r\nText\r\n")  # as on Windows
    served: list[object] = []
    monkeypatch.setattr(server, "serve", lambda *given: served.append(given[4].instructions))
    assert rlhf("rank", "f.sqlite", "--instructions", "told.md")[0] == 0
    assert served == ["<h2>Title</h2>\n<p>Text</p>"]


def test_a_store_that_may_be_read_alone_is_refused_before_anybody_ranks(
    rlhf: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = schema._connected
    monkeypatch.setattr(schema, "_connected", lambda path, _: real(path, "ro"))  # as a file is that may not be written
    code, out, err = rlhf("rank", "f.sqlite", "--port", "0")
    assert (code, out, err) == (2, "", "error: f.sqlite: attempt to write a readonly database\n")


def test_the_extra_is_named_where_it_is_missing(rlhf: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("rlhf.pipeline.rank.server")
    monkeypatch.delitem(sys.modules, "rlhf.pipeline.rank.server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    code, _, err = rlhf("rank", "f.sqlite")
    assert code == 2
    assert err == "error: rlhf rank needs uvicorn, which is not installed; pip install 'rlhf-toolkit[rank]'\n"


def test_the_command_line_starts_without_the_server() -> None:
    source = Path(server.__file__).parents[1] / "rank_cli.py"
    top = [line for line in source.read_text(encoding="utf-8").splitlines() if re.match("(import|from) ", line)]
    assert not [line for line in top if re.search("starlette|uvicorn|pipeline.rank", line)]
