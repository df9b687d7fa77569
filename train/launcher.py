"""Makes the processes of a launcher end when it does, with the right exit code.

A launcher (torchrun, accelerate launch) stops the processes that it started, but not if it is
killed itself: they would train on, or wait for one another forever, with the run's folder locked.
"""

import atexit
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

EVERY = 0.5  # seconds between two looks at the parent
NAME = "watch-launcher"
SAID = "the launcher has ended, and so does this process: run the same command again to continue\n"


def is_launched() -> bool:
    """Whether one of torch's launchers, which set TORCHELASTIC_RUN_ID, started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_launcher() -> None:
    """Make this process end within about a second of its launcher, even while it waits for the
    others. Does nothing for a process without a launcher, which may outlive its shell."""
    if not is_launched() or any(thread.name == NAME for thread in threading.enumerate()):
        return
    threading.Thread(target=_watch, args=(os.getppid(),), name=NAME, daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:  # an orphan gets another parent
        time.sleep(EVERY)
    with suppress(OSError):  # the launcher's end of the pipe is closed
        os.write(2, SAID.encode())
    os._exit(1)


@contextmanager
def exiting_at_once() -> Iterator[None]:
    """Do the last work of this process. A launched process then ends at once, with the exit code of
    that work.

    Otherwise Python would shut the interpreter down while threads of torch.distributed still run:
    on a busy machine, more than one process in ten aborts there ("terminate called without an
    active exception"), even after `destroy_process_group`, and the launcher then reports a finished
    run as failed.
    """
    code: Any = 0
    try:
        yield
    except SystemExit as end:
        code = end.code
        if not is_launched():
            raise
    if is_launched():
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):  # nobody reads it any more
                stream.flush()
        os._exit(code or 0)
