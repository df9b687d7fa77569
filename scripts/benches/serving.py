"""An engine's HTTP server, started by `scripts/serve`."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benches.launching import started

from specdec.errors import UserError, require

STARTS = 600  # seconds that it may take to start
ASKED = '"POST /v1/completions HTTP/1.1" 200'  # in its log, after each response


class ServedEngine:
    """An engine at an address of this machine, with these arguments of `scripts/serve` and its own
    arguments `theirs`. Its log and its hidden states are in a folder. It can be killed and started
    again."""

    def __init__(self, folder: Path, *ours: str, theirs: Sequence[str] = ()) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = str(one.getsockname()[1])
        self.url, self.log = f"http://127.0.0.1:{port}/v1", folder / "engine.log"
        self.command = [sys.executable, "scripts/serve", *ours, "--port", port]
        self.command += ["--states", str(folder / "states"), "--", *theirs]
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self) -> None:
        """Start the engine, unless it runs, and wait until it answers. Raises UserError if it
        ends."""
        if self.process is not None:
            return
        self.process = started(self.command, self.log)
        begun = time.monotonic()
        while time.monotonic() - begun < STARTS:
            with suppress(OSError):
                urllib.request.urlopen(f"{self.url}/models").close()
                return
            require(
                self.process.poll() is None,
                f"the engine ended: {self.log.read_text(encoding='utf-8')[-2000:]}",
            )
            time.sleep(0.5)
        raise UserError(f"the engine did not answer within {STARTS} seconds: {self.log}")

    def kill(self) -> None:
        """Kill the engine and its workers."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    @property
    def responses(self) -> int:
        """The number of answered requests, over all starts."""
        return self.log.read_text(errors="replace", encoding="utf-8").count(ASKED)
