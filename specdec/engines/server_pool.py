"""Requests to the servers of one model: many at once, repeated if a server fails for a moment."""

import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection
from socket import SHUT_RDWR
from typing import Any, Generic, TypeVar

from specdec.engines.client import CONNECTING, RequestRejected, Server, ServerUnavailable
from specdec.engines.engine_interface import CompletionRequest, Engine
from specdec.engines.known_engines import model_of
from specdec.errors import UserError

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)  # seconds before each further try of a request that failed
REST = 30.0  # seconds in which a server that failed is asked only if the others failed too
IN_A_ROW = 20  # requests that fail one after another before the engines count as broken


@dataclass(frozen=True)
class Failed:
    """The reason why a request has no result. `refused`: an engine rejected the request."""

    reason: str
    refused: bool = False


@dataclass(frozen=True)
class NamedRequest(Generic[K]):
    """A request with a name given by the caller."""

    name: K
    asked: CompletionRequest


class ServerPool:
    """Servers of one model. Raises UserError as `model_of` does."""

    def __init__(self, servers: Sequence[Server], wanted: Sequence[str]) -> None:
        self.models = {server: model_of(server, wanted) for server in servers}
        self._busy = dict.fromkeys(servers, 0)  # requests that each is working on
        self._failed = dict.fromkeys(servers, -REST)  # when each last failed
        self._lock = threading.Lock()

    def require_one(self) -> None:
        """Raise UserError if no server answers."""
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
        """The maximum number of tokens of a text on all servers, as far as they report it."""
        return min((m.room for m in self.models.values() if m.room is not None), default=None)

    @property
    def length_option(self) -> str:
        """The option that gives the server with the least room more of it."""
        rooms = [m for m in self.models.values() if m.room is not None]
        return min(rooms, key=lambda m: m.room or 0).engine.length_option

    def engine_at(self, server: Server) -> Engine:
        """The engine of one of the servers."""
        return self.models[server].engine

    @property
    def title(self) -> str:
        return ", ".join(server.url for server in self.models)

    def results(
        self,
        requests: Sequence[NamedRequest[K]],
        at_once: int,
        parse: Callable[[K, Any, Server], T],
        goes_on: Callable[[], bool] = lambda: True,
    ) -> Iterator[tuple[K, T | Failed]]:
        """The results of requests, in the order of arrival. `parse` makes a result from a reply and
        its server, in a separate thread; it may raise RequestRejected or ServerUnavailable as a
        server does. A request fails when it is rejected or all its tries are used up. Once
        `goes_on` returns False, the remaining requests are not sent and have no result. Raises
        UserError after `IN_A_ROW` failures without a result between them, and any other error of
        `parse`."""
        todo: queue.SimpleQueue[NamedRequest[K]] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[K, T | Failed | Exception | None]] = queue.SimpleQueue()
        stop, in_a_row, waiting = threading.Event(), 0, set[HTTPConnection]()
        for request in requests:
            todo.put(request)

        def work() -> None:
            while not stop.is_set():
                try:
                    request = todo.get_nowait()
                except queue.Empty:
                    return
                if not goes_on():
                    done.put((request.name, None))
                    continue
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
                if result is None:
                    continue
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
        request: NamedRequest[K],
        parse: Callable[[K, Any, Server], T],
        stop: threading.Event,
        waiting: set[HTTPConnection],
    ) -> T | Failed:
        reason = "nothing"
        for wait in (*WAITS, None):
            server = self._taken()
            try:
                model = self.models[server]
                body = {"model": model.name, **model.engine.completion_body(request.asked)}
                reply = server.ask("POST", model.engine.completion_url(server), body, waiting)
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
    """The next result. Waits in short intervals, so that an interruption ends the wait."""
    while True:
        try:
            return done.get(timeout=0.5)
        except queue.Empty:
            continue
