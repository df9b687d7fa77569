"""The trials of a sweep and the best of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from specdec.terminal import one_line
from train.tracked_run import LONGEST_TAG, TrackConfig


def tracked(track: TrackConfig, name: str, number: int, own: Sequence[str]) -> TrackConfig:
    """The tracker settings of a sweep's trial of this `number`, unless the user has set them: a
    title and tags with its `own` settings, in a group with the others."""
    tags = [x if len(x) <= LONGEST_TAG else f"{x[: LONGEST_TAG - 3]}..." for x in own]
    return replace(
        track,
        title=track.title or f"{name}-{number}",
        group=track.group or f"{name}-sweep",
        tags=track.tags or tags,
    )


@dataclass(frozen=True)
class SweepTrial:
    """One trial of a sweep. Its objective is None if it diverged."""

    folder: Path
    overrides: Sequence[str]
    objective: float | None


def best_of(trials: Sequence[SweepTrial]) -> str:
    """A line that names the trial with the highest objective, with the settings that distinguish
    it; the first of equals. Empty if there was no trial."""
    known = [(t.objective, t) for t in trials if t.objective is not None]
    if not known:
        return f"all {len(trials)} trials diverged" if trials else ""
    objective, best = max(known, key=lambda pair: pair[0])
    common = set.intersection(*(set(t.overrides) for t in trials))
    own = [x for x in best.overrides if x not in common]
    with_settings = f" with {' '.join(own)}" if own else ""
    diverged = len(trials) - len(known)
    beside = f" ({diverged} diverged)" if diverged else ""
    return one_line(
        f"best of {len(trials)} trials{beside}: objective {objective:.4f}{with_settings}; "
        f"it is in {best.folder}"
    )
