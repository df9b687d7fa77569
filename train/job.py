"""What all parts of a run share."""

from dataclasses import dataclass
from pathlib import Path

from accelerate import Accelerator
from rich.progress import Progress

from specdec.ranks import Ranks
from specdec.targets.loading import TargetOnDemand
from train.config import Config
from train.processes import ranks_of
from train.tracking import Tracker


@dataclass
class Job:
    """One process of a run: its settings, its folder, and what it works with."""

    cfg: Config
    folder: Path
    accelerator: Accelerator
    target: TargetOnDemand
    tracker: Tracker
    progress: Progress
    started: float  # by time.monotonic
    identity: str  # of the run, by which its files know each other

    @property
    def ranks(self) -> Ranks:
        """The processes of the run as `specdec` knows them."""
        return ranks_of(self.accelerator)

    @property
    def main(self) -> bool:
        """Whether this process writes the run's files."""
        return self.accelerator.is_main_process
