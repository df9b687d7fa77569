"""Errors with messages for the user."""

import difflib
import errno
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from safetensors import SafetensorError

from specdec import signals
from specdec.signals import Terminated
from specdec.terminal import one_line, print_to_stderr

T = TypeVar("T")
GRACE, PATIENCE = 30.0, 5.0  # seconds in which another process may report; see `command`
MAKE_ROOM = "make room, or give another place"
PERMISSION = "give this user permission to read and write it, or give another place"
ANOTHER_NAME = "move what is in the way, or give another place"
FAILING = "check the disk or the network file system"
REMEDIES = {  # errors of files that a user can do something about
    errno.ENOSPC: MAKE_ROOM,
    errno.EDQUOT: MAKE_ROOM,
    errno.EFBIG: MAKE_ROOM,
    errno.EROFS: "give another place",
    errno.EACCES: PERMISSION,
    errno.EPERM: PERMISSION,
    errno.ENOTDIR: ANOTHER_NAME,
    errno.EISDIR: ANOTHER_NAME,
    errno.EEXIST: ANOTHER_NAME,
    errno.ENOTEMPTY: ANOTHER_NAME,
    errno.ENAMETOOLONG: "give a shorter name",
    errno.ELOOP: "remove the symbolic link that leads back to itself, or give another place",
    errno.EIO: FAILING,
    errno.ESTALE: FAILING,
    errno.ENXIO: FAILING,
    errno.ENODEV: FAILING,
    errno.EREMOTEIO: FAILING,
    errno.ETIMEDOUT: FAILING,
    errno.EBUSY: "wait until no other program uses it",
    errno.ETXTBSY: "wait until no other program uses it",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "close other programs, or raise the system's limit of open files",
}


class UserError(Exception):
    """A mistake of the user: one line that says what is wrong, where, and what to do; exit code
    2."""


class Unreadable(UserError):
    """A file that the system does not let this process read, for example without permission or
    without a free file descriptor. Its content is unknown, so it is neither treated as damaged nor
    deleted."""


class ReportedByAnotherProcess(UserError):
    """An error that another process of this run reports. This process waits for that report, then
    ends silently with exit code 2."""


def nearest(name: str, options: Iterable[str]) -> str:
    """The text "; did you mean 'NAME'?" for the most similar option, or a list of all options if
    none is similar. Ignores case."""
    known = sorted(options)
    folded = {option.casefold(): option for option in known}
    close = difflib.get_close_matches(name.casefold(), folded, n=1)
    return f"; did you mean {folded[close[0]]!r}?" if close else f"; known: {', '.join(known)}"


def require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


@contextmanager
def located(where: object) -> Iterator[None]:
    """Prefix the message of any UserError from this block with `where`."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def require_between(
    name: str, value: float | None, least: float, most: float | None = None
) -> None:
    """Raise UserError unless a setting is None or lies between `least` and `most` (None: no upper
    bound)."""
    fits = value is None or (least <= value < math.inf if most is None else least <= value <= most)
    require(fits, f"{name}={value}: give {least} {'or more' if most is None else f'to {most}'}")


def require_within(owner: str, config: object, **bounds: float | tuple[float, float]) -> None:
    """Call `require_between` for several settings of `owner`, each with its lower bound or with
    both bounds."""
    for name, bound in bounds.items():
        least, most = bound if isinstance(bound, tuple) else (bound, None)
        require_between(f"{owner}.{name}", getattr(config, name), least, most)


def require_known(owner: str, config: object, **known: Iterable[str]) -> None:
    """Raise UserError unless each setting of `owner` is None or one of the known values."""
    for name, values in known.items():
        value, values = getattr(config, name), list(values)
        if value is not None and value not in values:
            raise UserError(f"{owner}.{name}={value!r} is unknown{nearest(str(value), values)}")


def first_line(error: BaseException) -> str:
    """The first line of an error's message (two lines if the first ends with a colon), or the
    error's type if it has no message."""
    lines = (str(error).strip() or type(error).__name__).splitlines()
    said = lines[0].strip()
    return f"{said} {lines[1].strip()}" if said.endswith(":") and len(lines) > 1 else said


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is an out-of-memory error: Python's, torch's on a GPU, or torch's on a CPU,
    which is a plain RuntimeError."""
    text = str(error).lower()
    said = any(words in text for words in ("out of memory", "can't allocate memory"))
    named = type(error).__name__ == "OutOfMemoryError"  # torch's; this module does not import torch
    return isinstance(error, MemoryError) or named or (isinstance(error, RuntimeError) and said)


@contextmanager
def memory_for(what: str, remedy: str) -> Iterator[None]:
    """Turn an out-of-memory error in this block into a UserError with a `remedy`."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(
            f"memory ran out while {what} ({first_line(error)[:120]}): {remedy}"
        ) from error


@contextmanager
def naming(path: object) -> Iterator[None]:
    """Add a path to any file error in this block that has none. A full disk, for example, is
    reported by a write, which does not know the file's name."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if getattr(error, "filename", None) is None:
            error.filename = str(path)  # type: ignore[union-attr]
        raise


def errno_of(error: BaseException) -> int | None:
    """The system's error number of a file error: that of OSError, or the one in the message of
    safetensors or torch. None if there is none."""
    if match := re.search(r"\(os error (\d+)\)", str(error)):  # safetensors' wording
        return int(match[1])
    if match := re.search(r"unable to (?:open|mmap) .*\((\d+)\)", str(error)):  # torch's
        return int(match[1])
    code = getattr(error, "errno", None)
    return code if isinstance(code, int) else None


def unreadable(path: object, error: BaseException) -> Unreadable | None:
    """An Unreadable for an error in which the system refuses to open or read a file; None for any
    other error, and for a missing file."""
    code = errno_of(error)
    if code in (None, errno.ENOENT):
        return None
    remedy = REMEDIES.get(code or 0, FAILING)
    return Unreadable(f"{path} cannot be read ({os.strerror(code or 0)}): {remedy}")


def of_files(error: OSError | SafetensorError) -> UserError:
    """The UserError for a file error that a user can resolve, such as a full disk, a missing
    permission or a missing file. Raises any other error."""
    code = errno_of(error)
    where = getattr(error, "filename", None) or "a file"
    if isinstance(where, bytes):
        where = os.fsdecode(where)
    if code == errno.ENOENT:
        return UserError(
            f"{where} is gone: it was moved or deleted while this command ran; start the command "
            "again, which makes what is missing"
        )
    if code not in REMEDIES:
        raise error
    return UserError(
        f"{where}: {os.strerror(code)}: {REMEDIES[code]}; what was saved before is complete, and "
        "the same command continues from it"
    )


def exit_code_of(error: BaseException | None) -> int:
    """The exit code of `command` after this error; 0 without an error, 1 after a bug."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, Terminated):
        return signals.TERMINATED
    if isinstance(error, KeyboardInterrupt) or signals.interrupted():
        return signals.INTERRUPTED
    users = isinstance(error, UserError | OSError | SafetensorError)
    return 2 if users or (isinstance(error, Exception) and is_out_of_memory(error)) else 1


def command(main: Callable[[], T], interrupted: str = "interrupted") -> T:
    """Run a command line. A user's mistake becomes one line on stderr and exit code 2. If all
    processes of a launch meet the same mistake, only the first one prints the line."""
    signals.open_standard_streams()
    signals.print_any_character()
    try:
        try:
            with signals.handled():
                result = main()
                sys.stdout.flush()
            return result
        except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush fails
            sys.exit(128 + signal.SIGPIPE)
        except Exception as error:
            if signals.interrupted():  # a library has made this of KeyboardInterrupt
                raise KeyboardInterrupt from error
            if isinstance(error, OSError | SafetensorError):
                raise of_files(error) from error
            if is_out_of_memory(error):
                raise UserError(
                    f"memory ran out ({first_line(error)[:120]}): give a smaller batch, shorter "
                    "texts or a smaller dtype; what was saved before is complete"
                ) from error
            raise
    except ReportedByAnotherProcess:
        time.sleep(GRACE)  # a launcher ends all at the first exit, so the other prints first
        sys.exit(2)
    except UserError as error:
        if os.environ.get("RANK", "0") != "0":  # set by launchers, in each process of several
            time.sleep(PATIENCE)  # usually the first process prints the same line and all end
        print_to_stderr(f"error: {one_line(str(error))}")
        sys.exit(2)
    except (KeyboardInterrupt, Terminated) as end:
        print_to_stderr(signals.message(end, interrupted))
        sys.exit(signals.TERMINATED if isinstance(end, Terminated) else signals.INTERRUPTED)
