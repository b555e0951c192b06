"""A real chat-completions server on loopback for tests: what it answers is a function that the test gives."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, str], str]  # status, headers, body


def completion(
    text: str | None, prompt_tokens: int = 7, completion_tokens: int = 3, finish_reason: str = "stop"
) -> Answer:
    """A well-formed answer."""
    body = {
        "model": "served-model",
        "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}],
        "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens},
    }
    return 200, {}, json.dumps(body)


def refusal(status: int, message: str = "no", **headers: str) -> Answer:
    """An error answer."""
    return (
        status,
        {name.replace("_", "-"): value for name, value in headers.items()},
        json.dumps({"error": {"message": message}}),
    )


@dataclass
class ChatServer:
    """The running server: its URL and what it was asked."""

    url: str
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    most_at_once: int = 0


@contextmanager
def chat_server(answer: Callable[[dict[str, Any], int], Answer]) -> Iterator[ChatServer]:
    """Serves until the block ends; `answer(request body, number of the request from 0)`."""
    lock, open_now = threading.Lock(), [0]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                number = len(server.requests)
                server.requests.append(body)
                server.headers.append({name.lower(): value for name, value in self.headers.items()})
                open_now[0] += 1
                server.most_at_once = max(server.most_at_once, open_now[0])
            status, headers, text = (
                answer(body, number) if self.path == "/v1/chat/completions" else refusal(404)
            )
            with lock:
                open_now[0] -= 1
            data = text.encode()
            self.send_response(status)
            for name, value in (
                {"content-type": "application/json", "content-length": str(len(data))} | headers
            ).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server = ChatServer(f"http://127.0.0.1:{http.server_address[1]}/v1")
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
