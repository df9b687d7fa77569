"""Errors that speak to the user."""

import difflib
import sys
from collections.abc import Callable, Iterable


class UserError(Exception):
    """A mistake of the user's: one line that says what, where and what to do; exit code 2."""


def nearest(name: str, options: Iterable[str]) -> str:
    """ "; did you mean 'eagle3'?", or the known names where none is near."""
    known = sorted(options)
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(known)}"


def require(condition: bool, message: str) -> None:
    """Raise UserError with this message unless the condition holds."""
    if not condition:
        raise UserError(message)


def command(main: Callable[[], None]) -> None:
    """Run a command line: a user's mistake becomes one line on stderr and exit code 2."""
    try:
        main()
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
