"""`python train.py [overrides]`: Hydra's composition → `train.run(cfg)` → the objective."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors come here, to be told in one line

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError

import train
from specdec.errors import UserError, of_files
from train.config import explain, register, resolve
from train.loop import Diverged

register()


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float:
    folder = Path(HydraConfig.get().runtime.output_dir)
    try:
        return train.run(resolve(cfg), folder)
    except Diverged as error:
        if HydraConfig.get().mode is not RunMode.MULTIRUN:
            sys.exit(explain(error))
        (folder / "diverged").write_text(str(error))
        print(f"diverged: {error}", file=sys.stderr)
        return 0.0  # finite and worst: a sweeper goes on
    except UserError as error:  # here, or Hydra prints lines of its own first
        sys.exit(explain(error))
    except (OSError, SafetensorError) as error:
        sys.exit(explain(of_files(error)))


if __name__ == "__main__":
    try:
        main()
    except (UserError, HydraException, OmegaConfBaseException) as error:
        sys.exit(explain(error))
    except OSError as error:  # Hydra makes the run's folder
        sys.exit(explain(of_files(error)))
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)
