"""Progress output: bars in a terminal, occasional lines elsewhere."""

import os
import sys
import time
from functools import cache
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from specdec.terminal import one_line, plain, print_to_stderr


class Terminal(Console):
    """A console that prints text verbatim: brackets are not markup, and control characters are
    shown in place of obeyed."""

    outlives_reader = False  # whether this command goes on when the reader of stdout has gone

    def __init__(self, **options: Any) -> None:
        super().__init__(highlight=False, soft_wrap=True, markup=False, emoji=False, **options)

    def on_broken_pipe(self) -> None:
        """Called by rich when the reader of stdout, such as `head`, has closed it. rich's own
        version ends the process silently, with exit code 1."""
        if not self.outlives_reader:
            raise  # the BrokenPipeError that rich is handling
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        tell("the reader of stdout has closed it: this command goes on without further output")

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(plain(text), **options)


class Description(TextColumn):
    """The description of a progress bar, shown verbatim."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        return Text(one_line(task.description), style="progress.description")


class TokensPerSecond(ProgressColumn):
    """The speed of a task whose steps are tokens (`add_task(…, unit=TOKENS)`)."""

    def render(self, task: Task) -> Text:
        return Text(speed_of(task), style="progress.data.speed")


def speed_of(task: Task) -> str:
    """A task's speed in its last half minute, if its steps are tokens and two have been taken."""
    speed = task.speed if task.fields.get("unit") == TOKENS else None
    return "" if speed is None else f"{speed:,.0f} {TOKENS}/s"


TOKENS = "tokens"  # unit of a task
console = Terminal()  # quiet in all processes but the first
SECONDS = 20.0  # between two lines if the output is not a terminal


class Lines(Progress):
    """Progress for output that is not a terminal: prints occasional lines instead of bars."""

    _last = 0.0

    def update(self, task_id: TaskID, **kwargs: Any) -> None:
        super().update(task_id, **kwargs)
        self._print(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._print(task_id)

    def _print(self, task_id: TaskID) -> None:
        if time.monotonic() - self._last >= SECONDS:
            self._last = time.monotonic()
            task = next(task for task in self.tasks if task.id == task_id)
            said = "  ".join(filter(None, (one_line(task.description), speed_of(task))))
            self.console.print(f"  {task.percentage:3.0f}%  {said}")


def bars(console: Console, shown: bool = True) -> Progress:
    """A progress display: bars in a terminal, `Lines` elsewhere, nothing if `shown` is false."""
    if shown and not console.is_terminal:
        return Lines(console=console, disable=True)
    times = TimeRemainingColumn(), TimeElapsedColumn()
    columns = BarColumn(), TaskProgressColumn(), TokensPerSecond(), *times
    return Progress(Description(), *columns, console=console, disable=not shown)


@cache
def tell(line: str) -> None:
    """Print a line about this process to stderr, at most once, above any progress bars."""
    print_to_stderr(one_line(line))
