"""An OpenAI-compatible chat server on 127.0.0.1, for tests."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class ChatServer(ThreadingHTTPServer):
    """Answers a conversation with `say` of its last message."""

    daemon_threads = False  # its end waits for theirs
    request_queue_size = 64  # of five, those that come at once are turned away

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.say: Callable[[str], Any] = lambda text: {"choices": [{"message": {"content": f"<{text}>"}}]}
        self.status = 200
        self.busy: list[dict[str, str]] = []
        """Headers of the answers (503) to the next requests: for each of them one."""
        self.asked: list[tuple[dict[str, Any], str]] = []


class Handler(BaseHTTPRequestHandler):
    server: ChatServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.busy:
            self.send_response(503)
            for name, value in (self.server.busy.pop() | {"Content-Length": "0"}).items():
                self.send_header(name, value)
            self.end_headers()
            return
        self.server.asked.append((body, self.headers.get("Authorization", "")))
        answer = json.dumps(self.server.say(body["messages"][-1]["content"])).encode()
        self.send_response(self.server.status if self.path == "/v1/chat/completions" else 404)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def chatting() -> Iterator[ChatServer]:
    """The server, in a thread."""
    chat = ChatServer()
    thread = threading.Thread(target=chat.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield chat
    chat.shutdown()
    chat.server_close()
    thread.join()


def saying(text: str) -> Callable[[str], Any]:
    """The same answer to everything, in the shape of the protocol."""
    return lambda _: {"choices": [{"message": {"content": text}}]}
