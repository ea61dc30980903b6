"""Servers that speak JSON over HTTP, through the standard library: vLLM's, and any with OpenAI's chat completions.

A judge or a reward function of one's own can ask a model behind such a server. The module that holds the function
names server and model, so that they take part in the stage's key:

    from rlhf.stages.endpoint import ChatModel

    model = ChatModel("http://127.0.0.1:8000", "Qwen/Qwen3-8B")

    def helpfulness(prompts, responses):
        return model.grades(prompts, responses)
"""

import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from queue import SimpleQueue
from threading import Thread
from time import monotonic, sleep
from typing import Any, TypeVar
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from rlhf.data.errors import printable

WAITS = (2.0, 10.0, 50.0)
"""Seconds before a request is made again that the server could not take just now: for each time one wait."""
SECONDS_TO_END = 2.0
"""That answers under way are waited for after an error or a signal; the server may hang."""
MAX_BYTES = 2**24
"""Of an answer; no grade or sample is nearly that long."""
MAX_CHARACTERS = 1000
"""Of an error's message, in the middle of which the rest is left out."""
# What colours a terminal, or names its window.
_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\))")
_NOT_NOW = (429, 502, 503, 504)  # too many requests, and what a server or the proxy before it says while overloaded
QUESTION = (
    "Grade how well the response answers the prompt, as a whole number from 1 (useless or harmful) to 10 (could not "
    "be better). Say the number and nothing else.\n\n<prompt>\n{prompt}\n</prompt>\n\n<response>\n{response}\n"
    "</response>\n\nGrade:"
)


T = TypeVar("T")
R = TypeVar("R")


class EndpointError(RuntimeError):
    """A server that is not there, refuses, or answers something else; the message says where, what, and the cure.

    What a server says in it is made fit to be shown: one line, no control characters, MAX_CHARACTERS at most.
    """

    def __init__(self, message: str, status: int | None = None, wait: float | None = None) -> None:
        super().__init__(_shown(message))
        self.status = status
        """The HTTP status, where there was an answer."""
        self.wait = wait
        """Seconds to wait at least before the request is made again; None where that would not help."""


class _Stay(HTTPRedirectHandler):
    """Follows no redirect: the key would go along, and a question would arrive without its text."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = build_opener(_Stay)


class Endpoint:
    """One server. `key_variable` names the environment variable with its API key; `timeout` is in seconds.

    A request is made again, after growing waits, where the server is overloaded (429, 502, 503 and 504).
    `cure` says in errors how to start the server, `timeout_setting` what the timeout can be changed with.
    """

    def __init__(
        self,
        url: str,
        key_variable: str | None = None,
        timeout: float = 600.0,
        cure: str = "",
        timeout_setting: str = "",
    ) -> None:
        if not _is_address(url):
            raise ValueError(f"'{url}' is not the address of a server; write it as http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")  # others write the address with it
        self.timeout, self._cure = timeout, f"; {cure}" if cure else ""
        self._longer = f"; {timeout_setting} sets how long is waited" if timeout_setting else ""
        key = os.environ.get(key_variable, "").strip() if key_variable else ""  # read from a file, it ends in a newline
        if not (key.isascii() and key.isprintable()):
            raise ValueError(f"the key in {key_variable} has characters that cannot be sent")  # and not to be shown
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})

    def get(self, path: str) -> Any:
        """The answer to GET `path`, which begins with a slash. Raises EndpointError."""
        return self._ask(Request(self.url + path, headers=self._headers))

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The answer to `body`, None where it is empty. Raises EndpointError."""
        return self._ask(Request(self.url + path, json.dumps(body).encode(), self._headers))

    def _ask(self, request: Request) -> Any:
        for asked, pause in enumerate((*WAITS, None), start=1):
            try:
                return self._ask_once(request)
            except EndpointError as error:
                if pause is None:
                    raise EndpointError(f"{error} (asked {asked} times)", error.status) from error
                if error.wait is None or error.wait > self.timeout:
                    raise
                sleep(max(pause, error.wait))

    def _ask_once(self, request: Request) -> Any:
        where = request.full_url
        try:
            with _OPENER.open(request, timeout=self.timeout) as answer:
                is_small = answer.length is not None and answer.length <= MAX_BYTES
                text = answer.read() if is_small else answer.read(MAX_BYTES + 1)  # the former sees a body that was cut
                if len(text) > MAX_BYTES:
                    raise EndpointError(f"{where}: answers with more than {MAX_BYTES:,} bytes; look what runs there")
        except HTTPError as error:
            said = _said(error)
            wait = _seconds(error.headers.get("Retry-After")) if error.code in _NOT_NOW else None
            raise EndpointError(f"{where}: HTTP {error.code}: {said or error.reason}", error.code, wait) from error
        except (URLError, HTTPException, OSError, UnicodeError) as error:  # a host may be no name at all
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                look = "look whether the server is overloaded, hung or still loading its model"
                raise EndpointError(
                    f"{where}: no answer within {self.timeout:g} seconds; {look}{self._longer}"
                ) from error
            why = getattr(reason, "strerror", None) or reason
            raise EndpointError(f"{where}: cannot be reached ({why}){self._cure}") from error
        try:
            return json.loads(text) if text.strip() else None
        except (ValueError, RecursionError) as error:
            raise EndpointError(f"{where}: the answer is not JSON: {text[:100]!r}") from error


def _shown(text: str, limit: int = MAX_CHARACTERS) -> str:
    """On one line, without what a terminal would take for commands, and of a length that people read."""
    line = " ".join(printable(_ESCAPE.sub("", text)).split())
    end = limit // 3  # where the cure stands
    return line if len(line) <= limit else f"{line[: limit - end - 3]} … {line[-end:]}"


def each(function: Callable[[T], R], items: Iterable[T], at_once: int) -> list[R]:
    """`function` of every item, in their order, in `at_once` threads.

    After an error, or a signal, no other item is begun, and what is under way is waited for SECONDS_TO_END at most. The
    threads end with the process, which those of an executor would hold until the last answer. Raises ValueError for
    `at_once` below 1.
    """
    if at_once < 1:
        raise ValueError(f"at_once={at_once}: ask one question at a time or more")
    left, done = deque(enumerate(items)), SimpleQueue[tuple[int, Any, BaseException | None]]()
    found: dict[int, R] = {}

    def work() -> None:
        with suppress(IndexError):  # nothing is left
            while True:
                number, item = left.popleft()
                try:
                    done.put((number, function(item), None))
                except BaseException as error:
                    left.clear()
                    done.put((number, None, error))

    wanted = len(left)
    threads = [Thread(target=work, daemon=True) for _ in range(min(at_once, wanted))]
    for thread in threads:
        thread.start()
    try:
        while len(found) < wanted:
            number, result, error = done.get()
            if error is not None:
                raise error
            found[number] = result
    except BaseException:
        left.clear()
        until = monotonic() + SECONDS_TO_END
        for thread in threads:
            thread.join(max(until - monotonic(), 0.0))
        raise
    return [found[number] for number in range(wanted)]


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port beyond 65535, half an IPv6 address
        return False


def _said(error: HTTPError) -> str:
    """What a server says beside its status, if it gets to say it."""
    try:
        with error:
            return _shown(error.read(2**16).decode(errors="replace"), MAX_CHARACTERS // 2)
    except (HTTPException, OSError):
        return ""


def _seconds(retry_after: str | None) -> float:
    """What a Retry-After header asks to wait: seconds, or a date (RFC 9110, 10.2.3); 0 where it says neither."""
    if retry_after is None or retry_after.strip().isdecimal():
        return float(retry_after or 0)
    try:
        date = parsedate_to_datetime(retry_after)
    except ValueError:
        return 0.0
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - datetime.now(UTC)).total_seconds())


class ChatModel:
    """A model behind an OpenAI-compatible server (`POST /v1/chat/completions`), asked `at_once` questions at a time."""

    def __init__(
        self, url: str, model: str, key_variable: str | None = None, timeout: float = 600.0, at_once: int = 16
    ) -> None:
        cure = "start the server, or name the address of one that runs"
        self.endpoint = Endpoint(url, key_variable, timeout, cure)
        self.model, self.at_once = model, at_once

    def answers(
        self, conversations: Sequence[list[dict[str, str]]], max_new_tokens: int, temperature: float
    ) -> list[str]:
        """One text per conversation, a list of messages {role, content}. Raises EndpointError."""

        def answer(messages: list[dict[str, str]]) -> str:
            return self.reply(messages, max_new_tokens, temperature)[0]

        return each(answer, conversations, self.at_once)

    def reply(
        self, messages: list[dict[str, str]], max_new_tokens: int, temperature: float
    ) -> tuple[str, dict[str, Any]]:
        """(text, what the server says that it used: prompt_tokens, completion_tokens). Raises EndpointError."""
        asked = {"model": self.model, "messages": messages, "max_tokens": max_new_tokens, "temperature": temperature}
        found = self.endpoint.post("/v1/chat/completions", asked)
        try:
            text, usage = str(found["choices"][0]["message"]["content"] or ""), found.get("usage")
            return text, usage if isinstance(usage, dict) else {}
        except (KeyError, IndexError, TypeError) as error:
            raise EndpointError(f"{self.endpoint.url}: an answer without text: {str(found)[:200]}") from error

    def grades(self, prompts: Sequence[str], responses: Sequence[str], question: str = QUESTION) -> list[float]:
        """The first number in the answer to `question`, which holds {prompt} and {response}. Raises EndpointError."""
        parts = re.split(r"(\{prompt\}|\{response\})", question)
        filled = [
            "".join({"{prompt}": prompt, "{response}": response}.get(part, part) for part in parts)
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        found = self.answers([[{"role": "user", "content": text}] for text in filled], 16, temperature=0.0)
        numbers = [re.search(r"-?\d+(?:\.\d+)?", text) for text in found]
        for row, (number, text) in enumerate(zip(numbers, found, strict=True), start=1):
            if number is None:
                raise EndpointError(f"{self.endpoint.url}: {self.model} gave row {row} no number but {text!r}")
        return [float(number[0]) for number in numbers if number]
