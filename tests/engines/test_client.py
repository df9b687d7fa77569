"""Requests to servers that misbehave, and keys that no header can hold.

Run alone: python -m pytest tests/engines/test_client.py (under 10 s)
"""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from specdec.engines import client
from specdec.engines.client import KEY, Server, ServerUnavailable
from specdec.errors import UserError

SEEN: list[str | None] = []


class Handler(BaseHTTPRequestHandler):
    """Responses with as many bytes of JSON as the path says."""

    def do_GET(self) -> None:
        SEEN.append(self.headers["Authorization"])
        count = int(self.path.rsplit("/", 1)[-1])
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b'"' + b"x" * (count - 2) + b'"')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
    yield Server(f"http://127.0.0.1:{http.server_port}/v1")
    http.shutdown()
    http.server_close()


def test_a_response_without_end_is_not_read(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LARGEST", 2**20)
    assert len(server.get(f"/{2**20}")) == 2**20 - 2
    with pytest.raises(ServerUnavailable, match="its response has more than 1 MB"):
        server.get(f"/{2**20 + 1}")


@pytest.mark.parametrize("key", ["a\nb", "a\r\nX-Other: 1", "clé", "a\0"])
def test_a_key_that_no_header_can_hold_is_told(
    server: Server, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """A traceback before: http.client raises ValueError or UnicodeEncodeError."""
    monkeypatch.setattr(client.os, "environ", {KEY: key})
    with pytest.raises(UserError, match=f"{KEY} holds a line break or another character"):
        server.get("/2")


def test_white_space_around_a_key_is_left_out(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a file that ends with a line break gives it."""
    monkeypatch.setenv(KEY, "secret\n")
    SEEN.clear()
    server.get("/2")
    assert SEEN == ["Bearer secret"]
