"""One table of renamed configuration keys, for the command line, files of settings and a run's
config.json."""

from collections.abc import Iterator, Mapping
from typing import Any

from specdec.errors import UserError

RENAMED = {  # a key, or a group with all of its keys: the name that it has now
    "answers": "responses",
    "features": "hidden_states",
    "features.cache": "hidden_states.mode",
    "features.ahead": "hidden_states.prefetch",
    "objective": "loss",
    "stage": "initialisation",
    "drafter.start": "drafter.initialisation",
    "also": "combine_with",
    "data.answers": "data.responses",
    "data.min_answer": "data.min_response",
    "data.beginning": "data.prompt_characters",
    "data.rounds": "data.decoding_log",
    "decode.length": "decode.draft_length",
    "decode.rule": "decode.verification",
    "decode.settings": "decode.draft_length_settings",
    "loop.objective": "loop.select_by",
    "rounds.rule": "rounds.verification",
}
RENAMED_VALUES = {  # by the key's new name
    "hidden_states.mode": {"disk": "offline"},
    "drafter.initialisation": {"regression": "closed_form"},
}


def renamed_key(key: str) -> str | None:
    """The new name of a key, such as responses.seed for answers.seed; None if the key was not
    renamed."""
    owner, rest = key, ""
    while owner not in RENAMED:
        owner, dot, name = owner.rpartition(".")
        if not dot:
            return None
        rest = f".{name}{rest}"
    return RENAMED[owner] + rest


def renamed_key_error(key: str, value: str | None = None, where: str = "") -> UserError | None:
    """The error for an old key, with the new name; None for any other key. `value` is the value
    given to the key, if it is known; `where` names a file, such as "in FILE: "."""
    if (new := renamed_key(key)) is None:
        return None
    values = RENAMED_VALUES.get(new, {})
    parts = [] if value is None else [x.strip().strip("'\"") for x in value.split(",")]
    current = ",".join(values.get(x, x) for x in parts) if set(parts) & {*values} else value
    setting = new if value is None else f"{new}={current}"
    return UserError(f"configuration: {where}{key} is now {new}: give {setting}")


def require_current_override(override: str) -> None:
    """Raise UserError for an override of an old key, such as answers.seed=1, +answers.seed=1 or
    ~objective."""
    key, equals, value = override.lstrip("+~").partition("=")
    if error := renamed_key_error(key.partition("@")[0], value if equals else None):
        raise error


def require_current_keys(recorded: Mapping[str, Any], where: str) -> None:
    """Raise UserError for an old key in the recorded configuration of a run."""
    for key in _keys(recorded, ""):
        if (new := renamed_key(key)) is not None:
            raise UserError(
                f"{where} has the key {key}, which is now {new}: it is a run of an earlier version;"
                " give another name=, or delete its folder"
            )


def _keys(recorded: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """The dotted keys of nested settings; groups come after their own keys."""
    for name, value in recorded.items():
        if isinstance(value, Mapping):
            yield from _keys(value, f"{prefix}{name}.")
        yield f"{prefix}{name}"
