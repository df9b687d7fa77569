"""Train a draft from Python: the same job as that of `train.py`, with the same settings.

python examples/training.py [SETTING=VALUE ...]

Without settings, the job is the quickstart with a budget of 5 minutes, in runs/example.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from specdec.errors import command
from specdec.measure.results import Results
from train import run
from train.run_config import composed, register

QUICK = ["experiment=quickstart", "budget.minutes=5", "name=example"]


def main(settings: Sequence[str]) -> None:
    register()  # makes every drafter and loss known by name
    config = composed([*QUICK, *settings])  # a typed `train.run_config.Config`, checked
    folder = Path("runs") / config.name
    run(config, folder)  # an interrupted run is continued

    for at in Results.load(folder / "report").asked:
        print(
            f"T={at.way.temperature:g}: {at.tau.value:.2f} tokens per pass of the target, "
            f"{at.speedup.value:.2f} times the speed of vanilla decoding"
        )
    print(f"the draft is in {folder / 'best'}, its report in {folder / 'report'}")


if __name__ == "__main__":
    command(lambda: main(sys.argv[1:]))
