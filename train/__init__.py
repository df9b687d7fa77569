"""Training: everything before a draft exists. `train.run(cfg)` runs the whole job."""

from typing import Any


def run(*args: Any, **kwargs: Any) -> float:
    """See `train.pipeline.run`, which is imported only here: it loads torch and transformers."""
    from train.pipeline import run as run_pipeline

    return run_pipeline(*args, **kwargs)
