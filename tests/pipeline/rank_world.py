"""The ranking page in a thread of this process, and people who use it without a browser."""

import http.client
import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from rlhf.data.feedback.records import Answer, Vote
from rlhf.data.feedback.store import Store
from rlhf.pipeline.rank import server
from rlhf.pipeline.rank.app import Options, make_app
from rlhf.pipeline.rank.security import Hosts, secret_of


@contextmanager
def open_page(store: Store, **options: Any) -> Iterator[int]:
    """The port of a page that is open meanwhile."""
    with server.listening("127.0.0.1", 0) as listener:
        app = make_app(store, secret_of(store.path), Hosts("127.0.0.1", None), Options(**options))
        opened = threading.Event()
        running = server.Server(app, opened.set)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]})
        thread.start()
        assert opened.wait(30)
        try:
            yield listener.getsockname()[1]
        finally:
            running.should_exit = True
            thread.join()


@dataclass
class Reply:
    status: int
    text: str
    headers: dict[str, str]


@dataclass
class Person:
    """Somebody with cookies of their own."""

    port: int
    cookies: dict[str, str] = field(default_factory=dict)

    def ask(self, method: str, path: str, body: bytes | None = None, **headers: str | None) -> Reply:
        """One request. Headers are given with _ for -; None leaves one out."""
        here = f"127.0.0.1:{self.port}"
        given: dict[str, str | None] = {"host": here}
        if self.cookies:
            given["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        if method == "POST":
            given |= {"origin": f"http://{here}", "content-type": "application/x-www-form-urlencoded"}
            given["content-length"] = str(len(body or b""))
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in given.items():
                if value is not None:
                    connection.putheader(name, value)
            connection.endheaders(body)
            answer = connection.getresponse()
            for cookie in answer.headers.get_all("set-cookie") or ():
                name, value = cookie.split(";")[0].split("=", 1)
                self.cookies[name] = value
            return Reply(answer.status, answer.read().decode(), {k.lower(): v for k, v in answer.getheaders()})
        finally:
            connection.close()

    def get(self, path: str = "/", **headers: str | None) -> Reply:
        return self.ask("GET", path, **headers)

    def post(self, path: str, fields: dict[str, Any], **headers: str | None) -> Reply:
        return self.ask("POST", path, urlencode(fields).encode(), **headers)

    def enter(self, name: str) -> "Person":
        assert self.post("/enter", {"name": name}).status == 303
        return self

    def form(self, form: str = "ranking", path: str = "/") -> dict[str, str]:
        """The hidden fields of one of the page's forms."""
        page = self.get(path).text
        inside = re.search(rf'<form id="{form}".*?(?:<main|</form>)', page, re.DOTALL)
        assert inside is not None, page
        hidden = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', inside[0])
        return {name: unescape(value) for name, value in hidden}

    def rank(self, *ranks: int, **more: Any) -> Reply:
        """Rank the answers in the order in which they are shown."""
        return self.post("/rank", ranking(self.form(), *ranks) | more)


def ranking(form: dict[str, str], *ranks: int) -> dict[str, str]:
    """A form that is filled in."""
    shown = form["shown"].split(",")
    given = {f"rank.{answer}": str(rank) for answer, rank in zip(shown, ranks, strict=True)}
    return form | {"request": str(uuid.uuid4())} | given


def make_store(path: Path, num: int = 3, answers: tuple[str, ...] = ("red", "green", "blue")) -> Store:
    """A store with prompts that all must rate."""
    store = Store.create(path)
    with store.batch():
        for number in range(num):
            prompt = store.add_prompt(f"Question {number}?", overlap=True)
            store.add_answers(prompt, [Answer(text, "secret-model") for text in answers])
    return store


def votes(store: Store) -> list[Vote]:
    return [vote for judged in store.rankings() for vote in judged.votes]
