"""HTTP requests to a server with OpenAI's interface."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from specdec.errors import first_line, require

CONNECTING, RESPONDING = 10.0, 1800.0  # seconds to wait for a connection, and for a response
LARGEST = 64 * 2**20  # bytes of a response: ids of the longest context take a tenth of that
KEY = "DRAFTSMITH_ENGINE_KEY"  # the environment variable with a server's key, if it asks for one


class RequestRejected(Exception):
    """A request that a server understood but rejected; repeating it does not help."""


class ServerUnavailable(Exception):
    """A server that does not answer now."""


@dataclass(frozen=True)
class Server:
    """A server, by the base address of its paths, such as http://localhost:8000/v1."""

    url: str

    @classmethod
    def at_address(cls, setting: str, url: str) -> "Server":
        """A server. Raises UserError, beginning with the `setting`, if the text is no server's
        address."""
        try:
            parts = urlsplit(url)
            sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # a port that is no number
            sound = False
        require(
            sound, f"{setting}={url}: give an engine's address, such as http://localhost:8000/v1"
        )
        return cls(url.rstrip("/") + ("" if parts.path.strip("/") else "/v1"))

    @property
    def root(self) -> str:
        """The address without its last part, /v1: the base of an engine's paths outside OpenAI's
        interface."""
        return self.url.removesuffix("/v1")

    def get(self, path: str) -> Any:
        """The JSON, or the text, at an address below the server's. Raises as `ask` does."""
        return self.ask("GET", path)

    def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        waiting: set[HTTPConnection] | None = None,
    ) -> Any:
        """The server's reply to a request. Meanwhile, the connection is in the set `waiting`.
        Raises RequestRejected for an error of the client's (4xx), and ServerUnavailable if there is
        no response, an error of the server's, no JSON, or more than `LARGEST` bytes; UserError for
        a key that no header can hold."""
        parts = urlsplit(path if "://" in path else f"{self.url}{path}")
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        headers = {"Content-Type": "application/json"}
        if key := key_of_server():
            headers["Authorization"] = f"Bearer {key}"
        try:
            with closing(kind(parts.hostname or "", parts.port, timeout=CONNECTING)) as connection:
                connection.connect()
                connection.sock.settimeout(RESPONDING)
                with waiting_in(waiting, connection):
                    content = json.dumps(body) if body else None
                    connection.request(method, parts.path, content, headers)
                    response = connection.getresponse()
                    read, status = response.read(LARGEST + 1), response.status
                    if len(read) > LARGEST:
                        raise ServerUnavailable(
                            f"{self.url}: its response has more than {LARGEST >> 20} MB"
                        )
                    content = read.decode(errors="replace")
        except (OSError, HTTPException) as error:
            raise ServerUnavailable(f"{self.url}: {first_line(error)}") from error
        if status >= 400:
            message = f"{self.url}: HTTP {status}: {_message(content)}"
            later = status >= 500 or status in (408, 425, 429)
            raise ServerUnavailable(message) if later else RequestRejected(message)
        if "json" not in (response.getheader("Content-Type") or "json"):
            return content
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ServerUnavailable(f"{self.url}: its response is not JSON") from error


def key_of_server() -> str:
    """The key in the environment, stripped; empty if there is none. Raises UserError for a key with
    characters that a header cannot hold."""
    key = os.environ.get(KEY, "").strip()
    require(
        key.isascii() and key.isprintable(),
        f"{KEY} holds a line break or another character that no HTTP header can hold: set it to "
        "the key alone",
    )
    return key


@contextmanager
def waiting_in(waiting: set[HTTPConnection] | None, connection: HTTPConnection) -> Iterator[None]:
    """Keep a connection in the set `waiting` during a block."""
    if waiting is not None:
        waiting.add(connection)
    try:
        yield
    finally:
        if waiting is not None:
            waiting.discard(connection)


def _message(content: str) -> str:
    """The message in an error's body, shortened."""
    try:
        value = json.loads(content)
        value = value.get("error", value)
        content = value["message"] if isinstance(value, dict) else str(value)
    except (ValueError, RecursionError, AttributeError, KeyError):
        pass
    return " ".join(str(content).split())[:200]
