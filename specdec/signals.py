"""The signals that end a command: SIGINT (Ctrl-C) and SIGTERM (`kill`, Slurm, Kubernetes).

Standard library only: command lines import this module before anything that takes seconds.

| while | SIGINT | SIGTERM |
| --- | --- | --- |
| modules are imported | ends at once, exit code 130 | ends at once, exit code 143 |
| a command runs | KeyboardInterrupt, exit code 130 | `Terminated`, exit code 143 |
| the command trains | KeyboardInterrupt, exit code 130 | a checkpoint first, then `Terminated` |
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from specdec.busy_cores import wait_briefly_if_busy

SECONDS = 20.0  # from SIGTERM to the end, checkpoint included; Slurm and Kubernetes wait for 30
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM  # exit codes


class Terminated(BaseException):
    """SIGTERM asked this process to end. Like KeyboardInterrupt, it is not an `Exception`, so
    libraries that catch errors do not catch it."""


class _Received:
    """The signals that this process has received. `deferring` is the number of active
    `checkpoint_first` blocks."""

    interrupt = False
    termination = False
    deferring = 0


def open_standard_streams() -> None:
    """Open the null device in place of a closed stdin, stdout or stderr (`>&-`). Otherwise the next
    file that the process opens would get that descriptor, and printed text would go into it."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        if getattr(sys, name) is None:
            stream = open(number, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def print_any_character() -> None:
    """Escape characters that the encoding of stdout or stderr lacks (`PYTHONIOENCODING=ascii`),
    such as τ, so that printing them does not raise UnicodeEncodeError."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def prepare_process(interrupted: str = "interrupted") -> None:
    """Prepare the process before slow imports. It opens closed standard streams and, until
    `handled`, makes SIGINT or SIGTERM end the process at once: a library that is interrupted
    during its import raises errors of its own. On a busy machine, it shortens the time that
    threads spin."""
    open_standard_streams()
    print_any_character()
    wait_briefly_if_busy()

    def end(number: int, frame: FrameType | None) -> None:
        _say(interrupted if number == signal.SIGINT else _terminated(interrupted))
        os._exit(128 + number)

    _set(signal.SIGINT, end, {signal.default_int_handler})
    _set(signal.SIGTERM, end, {signal.SIG_DFL})


@contextmanager
def handled() -> Iterator[None]:
    """Turn SIGINT into KeyboardInterrupt and SIGTERM into `Terminated` during the block. A handler
    of somebody else, such as a cluster's launcher, is kept."""
    _Received.interrupt = False
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    ours = {signal.default_int_handler, signal.SIG_DFL} | {x for x in before if _is_ours(x)}
    _set(signal.SIGINT, _interrupt, ours)
    _set(signal.SIGTERM, _terminate, ours)
    try:
        yield
    finally:
        _Received.termination = False
        if _in_main_thread():
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
                if handler is not None:  # one that was not set from Python
                    signal.signal(number, handler)


def interrupted() -> bool:
    """Whether SIGINT has arrived since `handled` last began. Errors after it are a consequence:
    some libraries turn KeyboardInterrupt into errors of their own."""
    return _Received.interrupt


def terminated() -> bool:
    """Whether SIGTERM has arrived in the current `handled` block."""
    return _Received.termination


@contextmanager
def checkpoint_first() -> Iterator[None]:
    """In this block, the first SIGTERM only makes `terminated` true; the loop inside must check it,
    save, and raise `Terminated`. After `SECONDS` without that, `Terminated` is raised. Further
    SIGTERMs have no effect: Slurm signals every process, and a launcher passes the signal on once
    more."""
    _Received.deferring += 1
    try:
        yield
    finally:
        _Received.deferring -= 1


@contextmanager
def no_checkpoint_first() -> Iterator[None]:
    """A block within `checkpoint_first` that SIGTERM ends at once."""
    outer, _Received.deferring = _Received.deferring, 0
    try:
        yield
    finally:
        _Received.deferring = outer


def _terminated(interrupted: str) -> str:
    return interrupted.replace("interrupted", "terminated by SIGTERM", 1)


def message(error: BaseException, interrupted: str) -> str:
    """The line that reports how a command ended; `interrupted` is adapted to the signal."""
    return _terminated(interrupted) if isinstance(error, Terminated) else interrupted


def _interrupt(number: int, frame: FrameType | None) -> None:
    _Received.interrupt = True
    raise KeyboardInterrupt


def _terminate(number: int, frame: FrameType | None) -> None:
    first, _Received.termination = not _Received.termination, True
    if not _Received.deferring:
        raise Terminated
    if first:
        signal.signal(signal.SIGALRM, _too_late)
        signal.setitimer(signal.ITIMER_REAL, SECONDS)
        _say(f"SIGTERM: saving a checkpoint; this process ends within {SECONDS:.0f} seconds")


def _too_late(number: int, frame: FrameType | None) -> None:
    raise Terminated


def _say(line: str) -> None:
    """Write a line to stderr, unless its reader has gone."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())


def _is_ours(handler: Any) -> bool:
    return getattr(handler, "__module__", None) == __name__


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _set(number: int, handler: Any, known: set[Any]) -> None:
    """Set a signal handler, but only in place of one of the known ones. Only the main thread may do
    this."""
    if _in_main_thread() and signal.getsignal(number) in known:
        signal.signal(number, handler)
