"""Serves the ranking page until a signal comes."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

from rlhf.data.errors import SettingsError, first_line
from rlhf.data.feedback.store import Store
from rlhf.pipeline.rank.app import Options, make_app
from rlhf.pipeline.rank.security import Hosts, secret_of

SECONDS_TO_END = 3  # for requests that are being answered when a signal comes


def serve(store: Path, host: str, port: int, url: str | None, options: Options, tell: Callable[[str], None]) -> None:
    """Have people rank what is in a store until SIGTERM or SIGINT comes, after which the signal's own handler goes on.

    `tell` gets the address once the page can be opened. Raises RefusedError for what is no store or cannot be written,
    and for a host and port that cannot be had.
    """
    with Store.open(store) as opened, listening(host, port) as listener:
        opened.check_writable()
        if options.rater is not None:
            opened.add_rater(options.rater)  # refuses a name that cannot be one
        app = make_app(opened, secret_of(store), Hosts(host, url), options)
        where = url or address(host, listener.getsockname()[1])
        Server(app, lambda: tell(where)).run(sockets=[listener])


class Server(uvicorn.Server):
    """A server that says nothing by itself, and calls `opened` once signals and requests are taken care of."""

    def __init__(self, app: Callable[..., Any], opened: Callable[[], object]) -> None:
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=SECONDS_TO_END,
        )
        super().__init__(config)
        self._opened = opened

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._opened()


def listening(host: str, port: int) -> socket.socket:
    """A socket that is bound. Raises SettingsError with the cure."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(where)
            listener.listen()
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise SettingsError(f"--host {host} --port {port}: {first_line(error)}; --port 0 takes a free one") from None
    return listener


def address(host: str, port: int) -> str:
    """What a browser is given; a host that stands for all is called by this machine's name."""
    name = socket.gethostname() if host in ("0.0.0.0", "::") else host
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
