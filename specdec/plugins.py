"""Tables through which code outside the core is found by name.

A `Plugins` table maps names to classes or values. It holds the entries of the core, those of the
lab (`specdec/lab/entry_points.txt`), and those of other installed packages, which declare entry
points of the same group. Modules outside the core are imported only when they are used, so the core
runs without the lab.
"""

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from configparser import ConfigParser
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any, TypeVar

from specdec.errors import UserError, first_line, nearest

T = TypeVar("T")
LAB = Path(__file__).parent / "lab/entry_points.txt"  # in the format of an installed package's


class Plugins(MutableMapping[str, T]):
    """The named entries of one group: the core's `own`, the lab's, and those of other packages that
    have been loaded, in this order. Iteration yields their names."""

    def __init__(
        self,
        group: str,
        noun: str,
        own: Mapping[str, T | EntryPoint],
        require_fitting: Callable[[str, Any], None] = lambda name, value: None,
    ) -> None:
        """`noun` is the word for an entry in messages, or the setting that chooses one. An
        `EntryPoint` in `own` is imported when it is first used, so its module may import this
        table. `require_fitting(name, value)` raises UserError if a value of another package is not
        valid for this name."""
        self.group, self.noun = group, noun
        self._own: dict[str, EntryPoint] = {}
        self._loaded: dict[str, T] = {}
        for name, value in own.items():
            if isinstance(value, EntryPoint):
                self._own[name] = value
            else:
                self._loaded[name] = value
        self._require_fitting = require_fitting

    def __getitem__(self, name: str) -> T:
        """Raises KeyError unless the core, the lab or a loaded package has the name."""
        if name not in self._loaded:
            entry = self._own[name] if name in self._own else lab_entries(self.group)[name]
            self._loaded[name] = entry.load()
        return self._loaded[name]

    def __setitem__(self, name: str, value: T) -> None:
        self._loaded[name] = value

    def __delitem__(self, name: str) -> None:
        del self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._own, **self._loaded, **lab_entries(self.group)})

    def __len__(self) -> int:
        return len({*self._own, *self._loaded, *lab_entries(self.group)})

    def named(self, name: str) -> T:
        """The entry of this name, also of an installed package that is not yet loaded. Raises
        UserError, with the nearest name, if there is none or if that package is broken."""
        if name in self:
            return self[name]
        elsewhere = self.installed()
        if name not in elsewhere:
            said = f"{self.noun}{'=' if '.' in self.noun else ' '}{name!r}"
            raise UserError(f"{said} is unknown{nearest(name, {*self, *elsewhere})}")
        self[name] = self._load(elsewhere[name])
        return self[name]

    def installed(self) -> dict[str, EntryPoint]:
        """The entry points of other installed packages by name, including those that cannot be
        loaded."""
        return {entry.name: entry for entry in entry_points(group=self.group)}

    def add_installed(self) -> None:
        """Load the entries of other installed packages. Broken ones are skipped; `named` reports
        their error."""
        for name in self.installed():
            with suppress(UserError):
                self.named(name)

    def _load(self, entry: EntryPoint) -> T:
        package = entry.dist.name if entry.dist is not None else entry.module
        where = f"{self.noun} {entry.name!r} of the installed package {package}"
        try:
            value: T = entry.load()
            self._require_fitting(entry.name, value)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        except Exception as error:  # importing a package may raise anything
            raise UserError(
                f"{where} cannot be loaded ({type(error).__name__}: {first_line(error)}): fix that "
                f"package, or choose another {self.noun}"
            ) from error
        return value


@cache
def lab_entries(group: str) -> dict[str, EntryPoint]:
    """The lab's entries for a group, by name; empty if the lab is not installed."""
    if not LAB.is_file():
        return {}
    table = ConfigParser(delimiters="=")
    table.optionxform = str  # type: ignore[assignment, method-assign]  # names keep their case
    table.read_string(LAB.read_text(encoding="utf-8"))
    entries = table.items(group) if table.has_section(group) else []
    return {name: EntryPoint(name, value, group) for name, value in entries}
