"""Errors that speak to the user."""

import difflib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

T = TypeVar("T")


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


def typed(kind: type[T], given: Mapping[str, Any], where: str) -> T:
    """A dataclass from values as a user writes them, each made its field's type. Raises UserError
    for a field that is not there and for a value of another type; `where` names the owner."""
    names = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    for key in given:
        require(key in names, f"{where}.{key} is unknown{nearest(str(key), names)}")
    try:
        whole = OmegaConf.merge(OmegaConf.structured(kind), dict(given))
        return OmegaConf.to_object(whole)  # type: ignore[return-value]
    except OmegaConfBaseException as error:
        said, field = str(error).splitlines()[0], getattr(error, "full_key", None)
        raise UserError(f"{where}.{field}: {said}" if field else f"{where}: {said}") from error


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
