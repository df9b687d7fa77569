"""A step's portion of the data: how many packed rows it reads, and how processes share them.

A run keeps the portion that it began with, on however many processes it is continued, so that a
step remains the same step: its rows, its anchors, its learning rate.
"""

from dataclasses import dataclass, replace

from specdec.errors import UserError
from train.loop import LoopConfig


@dataclass(frozen=True)
class RowsPerStep:
    """The settings of a run and the number of processes with which it began. The latter is None if
    it is not known: runs before November 2026 did not note it."""

    rows: int
    accumulate: int
    processes: int | None

    def shared(self, cfg: LoopConfig, processes: int) -> tuple[LoopConfig, str]:
        """The settings with which `processes` read this portion in each step, and what to tell the
        user about them, if they are not the ones given. Raises UserError if the processes cannot
        share the portion equally, and if the user gave settings other than the run's own that read
        another portion."""
        if self.processes is None:
            return cfg, ""
        size = self.rows * self.accumulate * self.processes
        if cfg.rows * cfg.accumulate * processes == size:
            return cfg, ""
        said = f"each step of this run reads {size} packed rows"
        if (cfg.rows, cfg.accumulate) != (self.rows, self.accumulate):
            raise UserError(
                f"{said}, but {_settings(cfg)} on {_count(processes)} would read "
                f"{cfg.rows * cfg.accumulate * processes}: leave out loop.rows and "
                "loop.accumulate to continue it, or give another name="
            )
        if size % processes:
            fitting = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            raise UserError(
                f"{said}, which {_count(processes)} cannot share equally: continue it on one of "
                f"these numbers of processes: {fitting}; or give another name="
            )
        share = size // processes
        rows = max(n for n in range(1, min(cfg.rows, share) + 1) if share % n == 0)
        shared = replace(cfg, rows=rows, accumulate=share // rows)
        return shared, (
            f"{said}: it began on {_count(self.processes)} with {_settings(cfg)}, and goes on with "
            f"{_settings(shared)} on {_count(processes)}"
        )


def _settings(cfg: LoopConfig) -> str:
    return f"loop.rows={cfg.rows} loop.accumulate={cfg.accumulate}"


def _count(processes: int) -> str:
    return "1 process" if processes == 1 else f"{processes} processes"
