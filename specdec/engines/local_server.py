"""An engine's server on this machine, for as long as a block of code."""

import os
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from specdec.engines.client import RequestRejected, Server, ServerUnavailable
from specdec.engines.engine_interface import Engine, TargetToServe
from specdec.errors import UserError, require

REPOSITORY = Path(__file__).resolve().parents[2]
WATCHES = "DRAFTSMITH_ENDS_WITH_STDIN"  # variable by which scripts/llama_server.py watches it
STARTS, ENDS = 120.0, 10.0  # seconds that a server may take to start, and to end


def require_installed(engine: Engine) -> Path:
    """The engine's Python. Raises UserError if the engine is not installed in its environment."""
    python = engine.python(REPOSITORY)
    require(python.exists(), f"{engine.title} is not installed here: {engine.install}")
    return python


@contextmanager
def local_server(
    engine: Engine,
    target: TargetToServe,
    options: Sequence[str],
    log: Path,
    starts: float = STARTS,
) -> Iterator[Server]:
    """A server of the engine in its own environment, which writes its log to a file. A server that
    reads its standard input (`WATCHES`) also ends if this process is killed. Raises UserError if
    the engine is not installed or cannot be started, or does not answer in `starts` seconds."""
    python = require_installed(engine)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = engine.serve_command(python, target, "127.0.0.1", port, options)
    variables = {**os.environ, **engine.environment(REPOSITORY / "scripts"), WATCHES: "1"}
    try:
        with log.open("wb") as out:
            process = subprocess.Popen(
                line, stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT, env=variables
            )
    except OSError as error:
        raise UserError(f"{engine.title} cannot be started ({error}): {engine.install}") from error
    try:
        server = Server(f"http://127.0.0.1:{port}/v1")
        _wait_for(server, process, engine, log, starts)
        yield server
    finally:
        process.terminate()
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDS)
        finally:
            process.kill()
            process.wait()
            assert process.stdin is not None
            process.stdin.close()


def _wait_for(
    server: Server, process: subprocess.Popen[bytes], engine: Engine, log: Path, starts: float
) -> None:
    began = time.monotonic()
    while time.monotonic() - began < starts:
        with suppress(RequestRejected, ServerUnavailable):
            server.get("/models")
            return
        require(process.poll() is None, f"{engine.title} ended as it started: see {log}")
        time.sleep(0.1)
    require(False, f"{engine.title} did not answer within {starts:.0f} seconds: see {log}")
