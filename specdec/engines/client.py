"""Requests to engines that serve a model with OpenAI's interface (vLLM, SGLang and others): many at
once, over one server or several, tried again where a server fails for a moment."""

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from socket import SHUT_RDWR
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

from specdec.errors import UserError, first_line, require
from specdec.sampling.sampler import Sampler

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each further try of a request that failed
CONNECTING, ANSWERING = 10.0, 1800.0  # seconds to wait for a connection, and for an answer
REST = 30.0  # seconds in which a server that failed is asked only if the others failed too
IN_A_ROW = 20  # requests that fail one after another before the engines count as broken
LARGEST = 64 * 2**20  # bytes of a response: ids of the longest context take a tenth of that
KEY = "DRAFTSMITH_ENGINE_KEY"  # the environment variable with a server's key, if it asks for one


COMPLETIONS = "/completions"
# what an engine would else take from the generation_config.json of the model that it serves
PLAIN = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}


class RequestRejected(Exception):
    """A request that a server understands and will not answer: another try would not help."""


class ServerUnavailable(Exception):
    """A server that does not answer, or not now."""


@dataclass(frozen=True)
class Server:
    """A server, by the address that its paths follow, such as http://localhost:8000/v1."""

    url: str

    @classmethod
    def at_address(cls, setting: str, url: str) -> "Server":
        """Raises UserError, beginning with the `setting`, if this cannot be a server's address."""
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
        """The address without its last part, /v1, where an engine keeps what OpenAI does not
        have."""
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
        """What the server answers to a request. The connection is among those that are `waiting`
        meanwhile. Raises RequestRejected for an error of the client's (4xx), and ServerUnavailable
        if there is no answer, an error of the server's, no JSON, or more than `LARGEST` bytes;
        UserError for a key that no header can hold."""
        parts = urlsplit(path if "://" in path else f"{self.url}{path}")
        kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        headers = {"Content-Type": "application/json"}
        if key := key_of_server():
            headers["Authorization"] = f"Bearer {key}"
        try:
            with closing(kind(parts.hostname or "", parts.port, timeout=CONNECTING)) as connection:
                connection.connect()
                connection.sock.settimeout(ANSWERING)
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
            raise ServerUnavailable(f"{self.url}: its answer is not JSON") from error


def key_of_server() -> str:
    """The key in the environment, without white space around it; empty if there is none. Raises
    UserError for one with characters that a header cannot hold."""
    key = os.environ.get(KEY, "").strip()
    require(
        key.isascii() and key.isprintable(),
        f"{KEY} holds a line break or another character that no HTTP header can hold: set it to "
        "the key alone",
    )
    return key


@contextmanager
def waiting_in(waiting: set[HTTPConnection] | None, connection: HTTPConnection) -> Iterator[None]:
    """Keep a connection among those that are `waiting` during a block."""
    if waiting is not None:
        waiting.add(connection)
    try:
        yield
    finally:
        if waiting is not None:
            waiting.discard(connection)


def _message(content: str) -> str:
    """What an error's body says, shortened."""
    try:
        value = json.loads(content)
        value = value.get("error", value)
        content = value["message"] if isinstance(value, dict) else str(value)
    except (ValueError, RecursionError, AttributeError, KeyError):
        pass
    return " ".join(str(content).split())[:200]


def choice_of(reply: Any) -> dict[str, Any]:
    """The answer in a reply to a completion. Raises ServerUnavailable for a reply that has none, as
    that of a proxy in the engine's place."""
    try:
        choice = reply["choices"][0]
    except (TypeError, KeyError, IndexError) as error:
        raise ServerUnavailable("an answer that is not of OpenAI's form") from error
    if not isinstance(choice, dict):
        raise ServerUnavailable("an answer that is not of OpenAI's form")
    return choice


@dataclass(frozen=True)
class Model:
    """What a server calls the model that it serves, and how many tokens a text may have there."""

    name: str
    room: int | None


def model_of(server: Server, wanted: Sequence[str]) -> Model:
    """The model of a server: its only one, or the one whose name or path is among `wanted`. Raises
    UserError if the server does not answer, or serves several models under other names."""
    try:
        models = server.get("/models")["data"]
        names = [str(model["id"]) for model in models]
    except (RequestRejected, ServerUnavailable) as error:
        raise UserError(
            f"no engine answers at {server.url} ({error}): start one there (docs/engines.md), or "
            "give its address"
        ) from error
    except (TypeError, KeyError) as error:
        raise UserError(f"{server.url} lists no models, as OpenAI's interface has it") from error
    own = [m for m in models if {m["id"], m.get("root")} & {*wanted}]
    if len(models) == 1:
        own = list(models)
    require(
        len(own) == 1,
        f"{server.url} serves {', '.join(names) or 'no model'}: serve the target alone, or under "
        f"the name {wanted[0]}",
    )
    room = own[0].get("max_model_len")
    return Model(str(own[0]["id"]), room if isinstance(room, int) else None)


@dataclass(frozen=True)
class Failed:
    """Why a request has no result. `refused`: an engine said that it cannot have one."""

    reason: str
    refused: bool = False


@dataclass(frozen=True)
class Request(Generic[K]):
    """A request, by a name of the caller's. `body` lacks the model, which is the server's."""

    name: K
    path: str
    body: Mapping[str, Any]


def sampling(sampler: Sampler, seed: int) -> dict[str, Any]:
    """The settings of a request, in the words of vLLM and SGLang."""
    cutoffs = {"top_p": sampler.top_p, "top_k": sampler.top_k or -1}
    return {"temperature": sampler.temperature, "seed": seed, **cutoffs, **PLAIN}


class Engines:
    """Servers of one model. Raises UserError as `model_of` does."""

    def __init__(self, servers: Sequence[Server], wanted: Sequence[str]) -> None:
        self.models = {server: model_of(server, wanted) for server in servers}
        self._busy = dict.fromkeys(servers, 0)  # requests that each is working on
        self._failed = dict.fromkeys(servers, -REST)  # when each last failed
        self._lock = threading.Lock()

    def require_one(self) -> None:
        """Raise UserError if no server answers any more."""
        reasons = list[str]()
        for server in self.models:
            try:
                server.get("/models")
                return
            except (RequestRejected, ServerUnavailable) as error:
                reasons.append(str(error))
        raise UserError(
            f"no engine answers any more ({reasons[0]}): start it and run the same command again; "
            "what was received before is kept"
        )

    @property
    def room(self) -> int | None:
        """How many tokens a text may have on all servers, as far as they say so."""
        return min((m.room for m in self.models.values() if m.room is not None), default=None)

    @property
    def title(self) -> str:
        return ", ".join(server.url for server in self.models)

    def results(
        self,
        requests: Sequence[Request[K]],
        at_once: int,
        parse: Callable[[K, Any, Server], T],
    ) -> Iterator[tuple[K, T | Failed]]:
        """The results of requests, in the order in which they come. `parse` makes a result of an
        answer and the server that gave it, in a thread of its own; it may raise RequestRejected or
        ServerUnavailable as a server does. A request fails once it is refused or all its tries are
        used up. Raises UserError after `IN_A_ROW` failures without a result between them, and
        whatever else `parse` raises."""
        todo: queue.SimpleQueue[Request[K]] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[K, T | Failed | Exception]] = queue.SimpleQueue()
        stop, in_a_row, waiting = threading.Event(), 0, set[HTTPConnection]()
        for request in requests:
            todo.put(request)

        def work() -> None:
            while not stop.is_set():
                try:
                    request = todo.get_nowait()
                except queue.Empty:
                    return
                try:
                    done.put((request.name, self._result(request, parse, stop, waiting)))
                except Exception as error:  # raised again below, in the caller's thread
                    done.put((request.name, error))

        workers = [threading.Thread(target=work, daemon=True) for _ in requests[:at_once]]
        for worker in workers:
            worker.start()
        try:
            for _ in requests:
                name, result = _next(done)
                if isinstance(result, Exception):
                    raise result
                in_a_row = in_a_row + 1 if isinstance(result, Failed) else 0
                yield name, result
                if isinstance(result, Failed) and in_a_row >= IN_A_ROW:
                    raise UserError(
                        f"{in_a_row} requests in a row failed, the last of them because of "
                        f"{result.reason}: mend that and run the same command again; what was "
                        "received before is kept"
                    )
        finally:
            stop.set()
            for connection in [*waiting]:
                with suppress(OSError, AttributeError):  # it has just been closed
                    connection.sock.shutdown(SHUT_RDWR)
            for worker in workers:  # Python may abort if it ends while they run
                worker.join(CONNECTING)

    def _result(
        self,
        request: Request[K],
        parse: Callable[[K, Any, Server], T],
        stop: threading.Event,
        waiting: set[HTTPConnection],
    ) -> T | Failed:
        reason = "nothing"
        for wait in (*WAITS, None):
            server = self._taken()
            try:
                body = {"model": self.models[server].name, **request.body}
                reply = server.ask("POST", request.path, body, waiting)
                return parse(request.name, reply, server)
            except RequestRejected as error:
                return Failed(str(error), refused=True)
            except ServerUnavailable as error:
                reason = str(error)
                self._failed[server] = time.monotonic()
            finally:
                with self._lock:
                    self._busy[server] -= 1
            if wait is None or stop.wait(wait):
                break
        return Failed(reason)

    def _taken(self) -> Server:
        """The least busy of the servers that did not fail lately, or of all if all did."""
        with self._lock:
            rested = time.monotonic() - REST
            server = min(self._busy, key=lambda s: (self._failed[s] > rested, self._busy[s]))
            self._busy[server] += 1
        return server


def _next(done: queue.SimpleQueue[T]) -> T:
    """The next result. Waits in short turns, so that an interruption ends the wait."""
    while True:
        try:
            return done.get(timeout=0.5)
        except queue.Empty:
            continue
