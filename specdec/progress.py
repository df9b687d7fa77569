"""Progress for people: bars in a terminal, occasional lines in a file."""

import sys
import time
from functools import cache
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID, TimeElapsedColumn

console = Console(highlight=False, soft_wrap=True)  # quiet in all processes but the first
SECONDS = 20.0  # between two lines if the output is not a terminal


class Lines(Progress):
    """Progress for output that is not a terminal: prints occasional lines instead of bars."""

    _last = 0.0

    def update(self, task_id: TaskID, **kwargs: Any) -> None:  # type: ignore[override]
        super().update(task_id, **kwargs)
        self._print(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._print(task_id)

    def _print(self, task_id: TaskID) -> None:
        if time.monotonic() - self._last >= SECONDS:
            self._last = time.monotonic()
            task = self._tasks[task_id]
            self.console.print(f"  {task.percentage:3.0f}%  {task.description}")


def bars(console: Console, shown: bool = True) -> Progress:
    """Bars in a terminal; `Lines` elsewhere; nothing unless `shown`."""
    if shown and not console.is_terminal:
        return Lines(console=console, disable=True)
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not shown)


@cache
def tell(line: str) -> None:
    """Print a line about this process on stderr, once; it appears above any bars."""
    print(line, file=sys.stderr, flush=True)
