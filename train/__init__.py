"""Training: everything that happens before a draft exists. `train.run(cfg)` runs the job of a
configuration."""

from pathlib import Path
from typing import Any


def run(cfg: Any, folder: Any = None) -> float:
    """Check a configuration, which Python code may have changed, and run its job as `run_checked`
    does. Raises UserError for contradictory settings."""
    from train.run_config import checked

    return run_checked(checked(cfg), folder)


def run_checked(cfg: Any, folder: Any = None) -> float:
    """Run the job of a checked configuration (`run_config.checked`): print a plan (`plan=true`),
    fill a shard (`responses.shard`, `hidden_states.shard`), or train, measure and export a draft.
    Returns the result of `pipeline.run`; 0 for the other jobs. The job's module is imported only
    here, because it loads torch and transformers."""
    if cfg.plan:
        from train.planning import print_plan

        print_plan(cfg, Path(folder or Path("runs") / cfg.name))
        return 0.0
    from train import pipeline

    if cfg.share is not None:
        pipeline.fill_shard(cfg, folder)
        return 0.0
    return pipeline.run(cfg, folder)
