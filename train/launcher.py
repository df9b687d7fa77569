"""The launcher whose child this process is: where it ends, its processes end.

A launcher (torchrun, accelerate launch) stops the processes that it started, but not if it is
killed itself: they would train on, or wait for one another forever, with the run's folder locked.
"""

import os
import threading
import time
from contextlib import suppress

EVERY = 0.5  # seconds between two looks at the parent
NAME = "watch-launcher"
SAID = "the launcher has ended, and so does this process: run the same command again to continue\n"


def end_with_launcher() -> None:
    """From now on, end this process within about a second of the launcher that started it, even
    while it waits for the others. Does nothing for a process without a launcher, which may outlive
    the shell that started it. torch's launchers set TORCHELASTIC_RUN_ID."""
    watching = any(thread.name == NAME for thread in threading.enumerate())
    if watching or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    threading.Thread(target=_watch, args=(os.getppid(),), name=NAME, daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:  # an orphan gets another parent
        time.sleep(EVERY)
    with suppress(OSError):  # what the launcher read is closed
        os.write(2, SAID.encode())
    os._exit(1)
