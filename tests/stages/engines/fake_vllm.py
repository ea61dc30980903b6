"""A server that speaks vLLM's protocol on 127.0.0.1 and samples from a tiny model of its own, for tests.

It is as strict as the real one where that matters: what a request leaves out comes from a checkpoint's
generation_config (here a sharp top-k), the model's own eos ends a response unless that is switched off, and what was
cached with the old weights is used until it is told to forget.
"""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

EOS = 0
LEFT_OUT = {"temperature": 0.6, "top_p": 0.9, "top_k": 1, "min_p": 0.0, "repetition_penalty": 1.1, "max_tokens": 16}


class FakeServer(ThreadingHTTPServer):
    """Settings of the server, what it was asked, and ways to let it go wrong."""

    daemon_threads = False  # its end waits for theirs

    def __init__(self, model: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model = model.eval()
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.dev_mode = True
        self.logprobs_mode, self.dtype, self.max_model_len = "processed_logprobs", "torch.float32", 64
        self.sees_folders = True
        self.is_busy = False
        """Others hold blocks of the cache, which then cannot be emptied."""
        self.spoil: Callable[[dict[str, Any]], Any] = lambda answer: answer
        """What is done to an answer to /v1/completions before it is sent."""
        self.waits: threading.Event | None = None
        self.asked: list[tuple[str, dict[str, Any], str]] = []
        """(path, body, Authorization header) of each request."""
        self.received: list[dict[str, torch.Tensor]] = []
        """The weights of each update, as they lay in the folder."""
        self.folders: list[Path] = []
        self.loaded: dict[str, torch.Tensor] = {}

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": "policy", "max_model_len": self.max_model_len}]}
        if path == "/v1/completions":
            return 200, self.spoil(self.complete(body))
        if not self.dev_mode:
            return 404, {"detail": "Not Found"}
        if path == "/server_info?config_format=json":
            config = {"dtype": self.dtype, "logprobs_mode": self.logprobs_mode}
            return 200, {"vllm_config": {"model_config": config}}
        if path == "/collective_rpc" and body["method"] == "reload_weights":
            return self.reload(Path(body["kwargs"]["weights_path"]))
        if path == "/reset_prefix_cache":
            if not self.is_busy:
                self.model.load_state_dict(self.loaded, strict=False)
            return 200, {"success": not self.is_busy}
        return 404, {"detail": "Not Found"}

    def reload(self, folder: Path) -> tuple[int, Any]:
        self.folders.append(folder)
        if not (folder.is_dir() and self.sees_folders):
            return 500, {"error": {"message": f"Cannot find any model weights with `{folder}`"}}
        weights = load_file(folder / "model.safetensors")
        own = self.model.state_dict()
        if strange := [name for name in weights if name not in own or weights[name].shape != own[name].shape]:
            return 500, {"error": {"message": f"There is no parameter {strange[0]} of that shape"}}
        self.received.append(weights)
        self.loaded = weights
        return 200, {"results": [None]}

    @torch.no_grad()
    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        law = {name: body.get(name, value) for name, value in LEFT_OUT.items()}
        assert (law["top_p"], law["min_p"], law["repetition_penalty"]) == (1.0, 0.0, 1.0)
        choices = []
        for index, prompt in enumerate(body["prompt"]):
            tokens: list[int] = []
            logprobs: list[float] = []
            finish = "length"
            while len(tokens) < law["max_tokens"]:
                logits = self.model(torch.tensor([prompt + tokens])).logits[0, -1].float() / law["temperature"]
                if law["top_k"]:
                    logits[logits < logits.topk(law["top_k"]).values[-1]] = -torch.inf
                drawn = int(torch.multinomial(logits.softmax(-1), 1))
                tokens.append(drawn)
                logprobs.append(logits.log_softmax(-1)[drawn].item())
                if drawn in body.get("stop_token_ids", []) or (drawn == EOS and not body.get("ignore_eos")):
                    finish = "stop"
                    break
            choices.append(
                {
                    "index": index, "text": "", "finish_reason": finish,
                    "logprobs": {"token_logprobs": logprobs} if body.get("logprobs") is not None else None,
                    "token_ids": tokens if body.get("return_token_ids") else None,
                    "prompt_token_ids": prompt if body.get("return_token_ids") else None,
                }
            )  # fmt: skip
        return {"object": "text_completion", "model": body["model"], "choices": choices}


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self.reply({})

    def do_POST(self) -> None:
        self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def reply(self, body: dict[str, Any]) -> None:
        self.server.asked.append((self.path, body, self.headers.get("Authorization", "")))
        if self.server.waits is not None:
            self.server.waits.wait(10)
        status, answer = self.server.answer(self.path, body)
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(model: Any) -> Iterator[FakeServer]:
    """The server, in a thread."""
    server = FakeServer(model)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        if server.waits is not None:
            server.waits.set()
        server.shutdown()
        server.server_close()
        thread.join()
