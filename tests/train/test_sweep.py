"""The line that ends a sweep.

Run alone: python -m pytest tests/train/test_sweep.py
"""

from pathlib import Path

from train.sweep import Trial, best_of

LOW = Trial(Path("sweep/0"), ["optim.lr=0.001", "name=x"], 1.25)
HIGH = Trial(Path("sweep/1"), ["optim.lr=0.01", "name=x"], 1.5)
DIVERGED = Trial(Path("sweep/2"), ["optim.lr=1e30", "name=x"], None)


def test_a_sweep_says_which_trial_was_best() -> None:
    """With the settings that tell it from the others, and where it is."""
    assert best_of([LOW, HIGH, DIVERGED]) == (
        "best of 3 trials (1 diverged): objective 1.5000 with optim.lr=0.01; it is in sweep/1"
    )
    assert best_of([HIGH, LOW]).startswith("best of 2 trials: objective 1.5000 with optim.lr=0.01")


def test_the_first_of_equal_trials_is_best() -> None:
    again = Trial(Path("sweep/9"), LOW.overrides, LOW.objective)
    said = "best of 2 trials: objective 1.2500; it is in sweep/0"
    assert best_of([LOW, again]) == said


def test_a_sweep_of_which_all_trials_diverged_says_so() -> None:
    assert best_of([DIVERGED, DIVERGED]) == "all 2 trials diverged"
    assert best_of([]) == ""
