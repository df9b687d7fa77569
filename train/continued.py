"""Which settings may change when the same command continues a run: one table for all of them.

A setting of the groups in `NEVER` must stay, unless the table names it. All other groups are listed
key by key, so that a new setting is decided on when it is added: `change_of` raises KeyError for
one that is not.
"""

from enum import Enum


class Change(Enum):
    """What a continued run makes of another value of a setting."""

    NEVER = "must stay: it changes what is trained"
    PRESENCE = "may change, but not be added or left out"
    ALLOWED = "may change: it changes rounding at most, or what follows training"
    NO_EFFECT = "is not read: the run keeps what it began with"


NEVER = {"target", "drafter", "stage", "rounds", "data", "answers", "sampler", "objective"}
NEVER |= {"optim", "loop"}
_DECODE = (
    *("gamma", "prompts", "timed", "counting", "max_new_tokens", "temperatures", "top_p", "top_k"),
    *("rule", "greedy_draft", "tree", "nodes", "branches", "paths", "fastest", "length"),
    *("settings", "compile", "repeats", "batch", "seed"),
)
CHANGES: dict[str, Change] = {
    # where a run keeps what it can make again, on which device it computes, and how much at once
    "target.cache": Change.ALLOWED,
    "target.device": Change.ALLOWED,
    "answers.root": Change.ALLOWED,
    "answers.batch": Change.ALLOWED,
    "answers.shard": Change.ALLOWED,
    "answers.engines": Change.ALLOWED,  # their responses are another run's: the texts are compared
    "objective.chunk": Change.ALLOWED,
    "loop.rows": Change.ALLOWED,  # `RowsPerStep` compares what a step reads
    "loop.accumulate": Change.ALLOWED,
    "loop.save_every": Change.ALLOWED,
    "loop.log_every": Change.ALLOWED,
    "features.path": Change.ALLOWED,
    "features.root": Change.ALLOWED,
    "features.ahead": Change.ALLOWED,
    "features.shard": Change.ALLOWED,
    "features.engines": Change.PRESENCE,
    "features.cache": Change.ALLOWED,
    "features.bits": Change.NEVER,
    # what follows training
    **{f"decode.{name}": Change.ALLOWED for name in _DECODE},
    "also": Change.ALLOWED,
    "export": Change.ALLOWED,
    "track.tracker": Change.ALLOWED,
    "track.mode": Change.ALLOWED,
    "track.project": Change.ALLOWED,
    "track.entity": Change.ALLOWED,
    "track.title": Change.ALLOWED,
    "track.group": Change.ALLOWED,
    "track.tags": Change.ALLOWED,
    "name": Change.ALLOWED,  # it chooses the folder
    # the plan was made when the run began
    "budget.minutes": Change.NO_EFFECT,
    "budget.floor": Change.NO_EFFECT,
    "budget.spent": Change.NO_EFFECT,
    # `plan=true` trains nothing
    "plan": Change.NO_EFFECT,
    "planning.device": Change.NO_EFFECT,
    "planning.devices": Change.NO_EFFECT,
    "planning.tokens": Change.NO_EFFECT,
    "planning.alpha": Change.NO_EFFECT,
    "planning.fsdp": Change.NO_EFFECT,
}


def change_of(key: str) -> Change:
    """What a continued run makes of another value of a setting, such as "loop.rows". Raises
    KeyError for a setting that the table does not know."""
    if key in CHANGES:
        return CHANGES[key]
    if key.partition(".")[0] not in NEVER:
        raise KeyError(key)
    return Change.NEVER
