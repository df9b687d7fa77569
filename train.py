"""`python train.py [overrides]`: Hydra composes the configuration, and `train.run_checked` does the
job that it describes and returns the objective."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from specdec.signals import prepare_process
from train.launcher import end_with_launcher, exiting_at_once

INTERRUPTED = "interrupted: run the same command again to continue from the last checkpoint"
os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # let errors through to `command`
prepare_process(INTERRUPTED)  # before the imports, which take seconds
end_with_launcher()

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

import train
from specdec.compat import quiet_libraries
from specdec.errors import command
from specdec.progress import console, tell
from train.loop import Diverged
from train.run_config import (
    Arguments,
    Config,
    checked,
    composed,
    folder_of_hydra,
    in_full,
    of_hydra,
    quoted,
    register,
    require_texts_in_files,
    resolve,
)
from train.sweep import SweepTrial, best_of, tracked

TRIALS: list[SweepTrial] = []  # of the sweep that this process runs
CHECKED: list[Config] = []  # the configuration of a single run, composed before Hydra writes
GIVEN: list[str] = []  # settings on this process's command line, which all trials share


def run(cfg: DictConfig) -> float:
    """Do one run and return its objective. In a sweep, a trial that diverges gets the worst one."""
    hydra_of = HydraConfig.get()
    folder, objective = Path(hydra_of.runtime.output_dir), None
    try:
        if CHECKED:
            (config,) = CHECKED
        else:
            require_texts_in_files(hydra_of)
            config = checked(resolve(cfg))
        if hydra_of.mode is RunMode.MULTIRUN:
            own = [x for x in hydra_of.overrides.task if x not in GIVEN]
            config.track = tracked(config.track, config.name, hydra_of.job.num, own)
        shared = config.share is not None and hydra_of.mode is RunMode.MULTIRUN
        # shares that a sweep does belong to one run, whose folder is not the sweep's
        objective = train.run_checked(config, None if shared else folder)
    except Diverged as error:
        if hydra_of.mode is not RunMode.MULTIRUN:
            raise
        (folder / "diverged").write_text(str(error), encoding="utf-8")
        tell(f"diverged: {error}")
    TRIALS.append(SweepTrial(folder, [*hydra_of.overrides.task], objective))
    return objective or 0.0  # finite and the worst, so that the sweep continues


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    return command(lambda: run(cfg), INTERRUPTED)  # else Hydra would print an error first


@contextmanager
def tidied(folder: Path) -> Iterator[None]:
    """Remove the folder that Hydra makes for a run or a sweep, and the parents made for it, if it
    contains only Hydra's own files at the end of the block, for example after a mistake. The
    folders of a sweep's trials are removed likewise."""
    absent = [path for path in (folder, *folder.parents) if not path.exists()]
    before = {*folder.iterdir()} if folder.is_dir() else set[Path]()
    try:
        yield
    finally:
        trials = {path for path in folder.glob("*") if path.is_dir()} - before
        for path in trials:
            if _only_of_hydra(path):
                shutil.rmtree(path, ignore_errors=True)
        if folder in absent and _only_of_hydra(folder):
            shutil.rmtree(folder, ignore_errors=True)
            for path in absent[1:]:
                with suppress(OSError):
                    path.rmdir()


def _only_of_hydra(folder: Path) -> bool:
    """Whether a folder contains only Hydra's own files."""
    files = {path.name for path in folder.rglob("*") if not path.is_dir()}
    return files <= {"multirun.yaml", "train.log"}


def run_command(arguments: list[str]) -> None:
    """Run `main`, and turn Hydra's errors about overrides into UserErrors. The configuration of a
    single run is composed and checked here, so that an error is reported before anything is
    written; those of a sweep's trials are checked as they begin."""
    arguments = in_full(arguments)
    asked = Arguments.parsed(arguments)
    folder = None
    if asked.runs:
        folder, sweeps = folder_of_hydra(asked)
        if not sweeps:
            CHECKED[:] = [composed(asked.overrides, asked)]
        GIVEN[:] = quoted(asked.overrides)
    with tidied(folder) if folder is not None else nullcontext():
        sys.argv[1:] = quoted(arguments)
        try:
            main()
        except (HydraException, OmegaConfBaseException) as error:
            raise of_hydra(error) from error
    if len(TRIALS) > 1:
        console.print(best_of(TRIALS))


if __name__ == "__main__":
    register()
    console.outlives_reader = True
    with exiting_at_once(), quiet_libraries():
        command(lambda: run_command(sys.argv[1:]), INTERRUPTED)
