"""Who may speak to the ranking page, and what every answer of it carries.

A session is a signed cookie that holds a rater's id or, where raters need tokens, the token, so that a token that was
replaced ends it. The secret lies beside the store: sessions outlive the server, if that lets raters in as before.
"""

import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import socket
import sys
from asyncio import CancelledError
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rlhf.data.errors import SettingsError, first_line
from rlhf.data.feedback.records import Rater
from rlhf.data.feedback.store import Store

MAX_BODY = 256 * 1024  # bytes of a request: a note of the greatest length, each character in its longest form
MAX_DRAINED = 32 * 1024 * 1024  # bytes of a body that is too long which are read and thrown away
BYTES_OF_SECRET = 32
_HOST = re.compile(r"([\w.-]+|\[[\da-f:.]+\])(?::\d{1,5})?")
SECONDS_OF_SESSION = 30 * 24 * 3600

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
    " connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    # Not no-referrer: with that, browsers send `Origin: null`.
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Sessions:
    """Makes session cookies and reads them. With `tokens`, raters come in by their token and not by their name; `only`
    is who everybody is."""

    def __init__(self, store: Store, secret: bytes, tokens: bool, only: str | None = None) -> None:
        self._store = store
        self._secret = secret
        self._tokens = tokens
        self._way_in = f"tokens {tokens}, rater {only}"  # sessions of another way in are none
        self._raters: dict[str, Rater] = {}
        # Cookies go to every port of a host: each store has its own.
        self.cookie = f"rank-{self._sign('cookie')[:8]}"

    def begin(self, rater: Rater, token: str = "") -> str:
        """A new session's cookie."""
        who = quote(token, safe="") if self._tokens else str(rater.id)
        value = f"{who}.{secrets.token_urlsafe(12)}"
        return f"{value}.{self._sign('session', self._way_in, value)}"

    def rater(self, cookie: str) -> Rater | None:
        """Whose session it is; None if it is none of ours, or over."""
        value, _, signature = cookie.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._sign("session", self._way_in, value).encode()):
            return None
        who = value.rpartition(".")[0]
        if self._tokens:
            return self._store.rater_of_token(unquote(who))
        if who not in self._raters:
            self._raters = {str(rater.id): rater for rater in self._store.raters()}
        return self._raters.get(who)

    def csrf(self, cookie: str) -> str:
        """What forms that a rater is given carry, and other people's pages cannot know."""
        return self._sign("csrf", cookie)

    def _sign(self, *words: str) -> str:
        return hmac.new(self._secret, "\n".join(words).encode(), hashlib.sha256).hexdigest()


def secret_of(store: Path) -> bytes:
    """The secret of a store, which lies beside it, readable by its owner; made if it is not there.

    Raises SettingsError where it cannot be made or read, or is cut short: with no secret anybody could sign.
    """
    path = store.with_name(f"{store.name}-secret")
    try:
        if not path.exists():
            _make_secret(path)
        secret = path.read_bytes()
    except OSError as error:
        raise SettingsError(f"{path}: the secret of the sessions cannot be kept here: {first_line(error)}") from None
    if len(secret) != BYTES_OF_SECRET:
        found = f"{len(secret)} bytes, where {BYTES_OF_SECRET} are wanted"
        raise SettingsError(f"{path}: no secret of sessions ({found}); delete it, and raters come in once more")
    return secret


def _make_secret(path: Path) -> None:
    aside = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(BYTES_OF_SECRET))
        with suppress(FileExistsError):
            os.link(aside, path)  # whole or not at all, and never over that of another server
    finally:
        aside.unlink(missing_ok=True)


class Hosts:
    """By which names the page may be called. A page of somebody else whose name leads here is none of them."""

    def __init__(self, host: str, url: str | None) -> None:
        self._all_addresses = is_address(host) and ipaddress.ip_address(host).is_unspecified
        self._names = {_plain(host)}
        if is_loopback(host):
            self._names |= {"localhost", "127.0.0.1", "::1"}
        else:
            self._names.add(socket.gethostname().lower())
        if url is not None:
            self._names.add(_plain(urlsplit(url).hostname or ""))

    def allow(self, header: str) -> bool:
        """Whether a Host header names this page."""
        match = _HOST.fullmatch(header.lower())
        name = _plain(match[1].strip("[]")) if match else ""
        # A name of somebody else's that leads here is never an address.
        return name in self._names or (self._all_addresses and is_address(name))


def _plain(host: str) -> str:
    """A host in the one way in which browsers write it."""
    return str(ipaddress.ip_address(host)) if is_address(host) else host.lower()


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine can reach a server bound to this host."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


class Guard:
    """Around the whole page: refuses hosts and adds headers."""

    def __init__(self, app: ASGIApp, hosts: Hosts) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def send_guarded(message: Message) -> None:
            nonlocal begun
            begun = True
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        request = Request(scope)
        hosts = request.headers.getlist("host")
        if len(hosts) != 1 or not self._hosts.allow(hosts[0]):
            log(request, 400, f"Host {hosts!r:.120} is not this page's; --url says by which name raters call it")
            await PlainTextResponse("This page goes by another name.", 400)(scope, receive, send_guarded)
            return
        try:
            with suppress(Exception):  # which has been answered; Starlette raises it once more
                await self._app(scope, receive, send_guarded)
        except CancelledError:  # the server ends, and has waited for this long enough
            if not begun:
                log(request, 503, "broken off, since the page closes")
                await PlainTextResponse("The page is being closed.", 503)(scope, receive, send_guarded)


def log(request: Request, status: int, why: str) -> None:
    """A line on stderr about a request that was refused. No query, body or cookie is in it."""
    who = request.client.host if request.client else "?"
    where = ascii(request.scope["path"])[1:-1][:100]
    text = why.encode("unicode_escape").decode()[:300]
    line = f"{datetime.now():%H:%M:%S} {status} {request.method} {where} from {who}: {text}"
    with suppress(OSError):  # the disk that holds the log is full, or nobody reads it any more
        print(line, file=sys.stderr, flush=True)


def check_origin(request: Request) -> None:
    """Refuse what another page sent; browsers say with each POST which page it came from."""
    host = request.headers["host"]
    if request.headers.get("origin", "").lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
        raise HTTPException(403, "This came from another page.")


async def read_body(request: Request) -> bytes:
    """The whole body. What is too long is never held, but is read so that the client comes to read the answer."""
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and len(announced) < 19 and int(announced) > MAX_DRAINED:
        raise HTTPException(413, "This is too long.")
    parts: list[bytes] = []
    size = 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY:
                parts.clear()
            else:
                parts.append(part)
            if size > MAX_DRAINED:
                break
    except ClientDisconnect:
        raise HTTPException(400, "The request broke off.") from None
    if size > MAX_BODY:
        raise HTTPException(413, "This is too long.")
    return b"".join(parts)
