"""The typed configuration: the whole of it in one dataclass, checked before anything runs."""

import dataclasses
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    OmegaConfBaseException,
)

from specdec.decoding.config import DecodeConfig
from specdec.drafters import DRAFTERS, family
from specdec.errors import UserError, nearest, require, require_between, typed
from specdec.files import read_json
from specdec.formats.export import LAYOUTS, layout_names
from specdec.objectives.losses import COUPLED, TERMS
from specdec.objectives.objective import ObjectiveConfig
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import DEEPEST
from specdec.target.loading import TargetConfig
from train.data.answers import AnswersConfig
from train.data.conversations import DataConfig
from train.features.store import FeaturesConfig
from train.loop import LoopConfig
from train.optim import OptimConfig
from train.plan import BudgetConfig
from train.rounds import RoundsConfig
from train.stages import StageConfig
from train.tracking import TrackConfig


@dataclass
class Config:
    """What `python train.py` runs. `name` is the run: its folder is runs/NAME, and the same
    command again continues it."""

    name: str = "${drafter.name}"
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: Any = None
    stage: StageConfig = field(default_factory=StageConfig)
    data: DataConfig = field(default_factory=DataConfig)
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    sampler: Sampler = field(default_factory=Sampler)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    rounds: RoundsConfig = field(default_factory=RoundsConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    track: TrackConfig = field(default_factory=TrackConfig)
    export: str | None = "hf"  # layout written at the end of a run; null: none


def register() -> None:
    """Make the schema, every drafter and every objective known to Hydra by name."""
    store = ConfigStore.instance()
    schema = OmegaConf.structured(Config)
    OmegaConf.set_struct(schema.decode.settings, False)  # whose keys are those of decode.length
    schema.objective.terms = {}  # which objective=NAME fills
    for free in (schema.objective.terms, schema.objective.constants):  # checked by their dataclass
        OmegaConf.set_struct(free, False)
    store.store(name="schema", node=schema)
    for name, drafter in DRAFTERS.items():
        store.store(group="drafter", name=name, node=drafter.Config)
    for name in TERMS:
        decay = 1.0 if name in COUPLED else ObjectiveConfig.depth_decay
        one = ObjectiveConfig(terms={name: 1.0}, depth_decay=decay)
        store.store(group="objective", name=name, node=one)


def quoted(arguments: Sequence[str]) -> list[str]:
    """Overrides as Hydra takes them. A value that holds an equals sign, as in
    decode.rule=lenience:factor=0.8, is put into the quotes without which Hydra's grammar refuses
    it; drafter.from=, whose key no dataclass can have, is stage.draft=."""
    plain = re.compile(r"([+~]{0,2}[\w./@-]+=)([^'\"\\\[\](){}$]*=[^'\"\\\[\](){}$]*)")
    named = [re.sub(r"^\+*drafter\.from=", "stage.draft=", a) for a in arguments]
    found = [(argument, plain.fullmatch(argument)) for argument in named]
    return [f"{m[1]}'{m[2]}'" if m and a[0] != "-" else a for a, m in found]


def resolve(cfg: DictConfig) -> Config:
    """Hydra's composition as a `Config`. Raises UserError for a key that no dataclass has, also
    one added with `+`, for a value of the wrong type, and for a value that is missing."""
    try:
        config = OmegaConf.to_object(cfg)
    except OmegaConfBaseException as error:
        raise UserError(f"configuration: {one_line(error)}") from error
    assert isinstance(config, Config)
    if config.drafter is None:
        raise UserError(f"no drafter is chosen: add drafter=NAME, one of {', '.join(DRAFTERS)}")
    for name, path in (("target", config.target.path), ("data", config.data.path)):
        if not path:
            raise UserError(f"{name}.path is missing: add {name}.path=…, see the README")
    _no_unknown_keys(OmegaConf.to_container(cfg), config, "")
    drafter: str = config.drafter.name
    if not isinstance(config.drafter, family(drafter).Config):
        raise UserError(
            f"drafter.name={drafter} was set apart from the other keys of a drafter: give "
            f"drafter={drafter}"
        )
    layouts = layout_names(drafter) or {layout for _, layout in LAYOUTS}
    if config.export is not None and config.export not in layouts:
        raise UserError(
            f"export={config.export!r} is unknown for {drafter}{nearest(config.export, layouts)}"
        )
    _require_drafter(config.drafter)
    where = Path(config.name)
    outside = not where.parts or where.is_absolute() or ".." in where.parts
    if outside or not config.name.strip() or "\0" in config.name:
        raise UserError(f"name={config.name!r} does not name a folder inside runs/: give a name")
    return config


def _require_drafter(drafter: Any) -> None:
    """What can be told of a drafter's settings without a target."""
    require_between("drafter.depth", drafter.depth, 1, DEEPEST)
    layers = getattr(drafter, "layers", None)
    if isinstance(layers, list):
        require(
            0 < len(layers) == len(set(layers)) and min(layers) >= 0,
            f"drafter.layers={layers}: give at least one layer of the target, each only once, or "
            "null for the default",
        )


def with_objective(written: dict[str, Any]) -> dict[str, Any]:
    """A run's config.json, of which older ones have a `loss` where there is an `objective` now."""
    if "objective" in written or not isinstance(loss := written.get("loss"), dict):
        return written
    name = loss.get("name", "nla")
    of_term = {"jsd": "beta", "lk_hybrid": "eta"}.get(name)
    objective = {"terms": {name: 1.0}, "depth_decay": loss.get("depth_decay", 0.8)}
    if of_term in loss:
        objective["constants"] = {name: {of_term: loss[of_term]}}
    return written | {"objective": objective}


def data_of_run(folder: Path) -> DataConfig:
    """The data that a run was given, so that its held-out side is the same afterwards: as many
    records as it read, where it noted that.

    Raises UserError where the folder holds no run.
    """
    try:
        described = read_json(folder / "config.json")
        data = typed(DataConfig, described["data"], "data")
        if (read := described.get("records")) is not None:
            data = dataclasses.replace(data, limit=None, records=read)
        return data
    except (UserError, AttributeError, KeyError, TypeError) as error:
        raise UserError(
            f"{folder} has no config.json of a run, so that its held-out side is unknown "
            f"({error}): give --prompts"
        ) from error


def one_line(error: Exception) -> str:
    """An error's own words in one line, without the types that OmegaConf adds."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    lines = [line for line in lines if not line.startswith(("reference_type=", "object_type="))]
    return "; ".join(lines) or repr(error)


def explain(error: Exception) -> int:
    """Print a user's mistake in one line; returns the exit code, 2."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ConfigKeyError | ConfigAttributeError):
        cause = cause.__cause__
    if cause is not None and getattr(cause, "full_key", None):
        owner = getattr(cause, "object_type", None)
        error = key_error(str(cause.full_key), owner)  # type: ignore[attr-defined]
    elif error.__cause__ is not None and not isinstance(error, UserError):
        error = Exception(f"{error}\n{error.__cause__}")
    print(f"error: {one_line(error)}", file=sys.stderr)
    return 2


def key_error(key: str, owner: Any = None) -> UserError:
    """The error for a key that is not there, with the nearest that its `owner` dataclass has."""
    if key.split(".")[0] == "loss":
        return UserError(
            "configuration: loss is called objective now: give objective=NAME, such as "
            "objective=kl, or objective.depth_decay=NUMBER"
        )
    if not dataclasses.is_dataclass(owner):
        return UserError(f"configuration: there is no key {key!r}")
    names = [f.name for f in dataclasses.fields(owner)]
    return UserError(
        f"configuration: there is no key {key!r}{nearest(key.rsplit('.', 1)[-1], names)}"
    )


def _no_unknown_keys(given: Any, typed: Any, path: str) -> None:
    if not dataclasses.is_dataclass(typed) or not isinstance(given, dict):
        return
    names = [f.name for f in dataclasses.fields(typed)]
    for key, value in given.items():
        if key not in names:
            raise key_error(f"{path}{key}", typed)
        _no_unknown_keys(value, getattr(typed, key), f"{path}{key}.")
