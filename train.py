"""`python train.py [overrides]`: Hydra composes the configuration, `train.run(cfg)` runs it and
returns the objective."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # let errors through, to be told in one line

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from safetensors import SafetensorError

import train
from specdec.errors import UserError, end_quietly, of_files
from train.config import explain, quoted, register, resolve
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
        return 0.0  # finite and worst, so that a sweeper goes on
    except UserError as error:  # told here, since Hydra would print lines of its own first
        sys.exit(explain(error))
    except BrokenPipeError:
        end_quietly()
    except (OSError, SafetensorError) as error:
        sys.exit(explain(of_files(error)))


if __name__ == "__main__":
    sys.argv[1:] = quoted(sys.argv[1:])
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:
        end_quietly()
    except (UserError, HydraException, OmegaConfBaseException) as error:
        sys.exit(explain(error))
    except OSError as error:  # Hydra could not make the run's folder
        sys.exit(explain(of_files(error)))
    except KeyboardInterrupt:
        print("interrupted: the same command goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)
