"""The drafting methods by name: the core's, the lab's, and those of other installed packages, which
have entry points of the group `draftsmith.drafters`."""

from dataclasses import is_dataclass
from importlib.metadata import EntryPoint
from inspect import isabstract
from typing import Any

from omegaconf import OmegaConf

from specdec.drafters.base import Drafter
from specdec.errors import require
from specdec.plugins import Plugins, lab_entries
from specdec.targets.parts import TargetParts

GROUP = "draftsmith.drafters"
CORE = {  # imported when first used: a hybrid's module imports this one
    "eagle3": "specdec.drafters.eagle3:Eagle3",
    "eagle": "specdec.drafters.eagle:Eagle",
    "mtp": "specdec.drafters.mtp:MTP",
    "medusa": "specdec.drafters.medusa:Medusa",
    "hydra": "specdec.drafters.hydra:Hydra",
    "mlp": "specdec.drafters.mlp:Mlp",
    "peagle": "specdec.drafters.peagle:PEagle",
    "dflash": "specdec.drafters.dflash:DFlash",
    "dflash2": "specdec.drafters.dflash2:DFlash2",
    "dspark": "specdec.drafters.dspark:DSpark",
    "jetspec": "specdec.drafters.jetspec:JetSpec",
    "lm": "specdec.drafters.lm:LM",
    "ngram": "specdec.drafters.ngram:Ngram",
    "suffix": "specdec.drafters.suffix:Suffix",
    "hybrid": "specdec.drafters.hybrid:Hybrid",
}


def _require_drafter(name: str, kind: Any) -> None:
    fitting = isinstance(kind, type) and issubclass(kind, Drafter) and not isabstract(kind)
    require(fitting, f"{kind!r} is not a complete subclass of Drafter")
    config: Any = getattr(kind, "Config", None)
    require(is_dataclass(config), "its Config is not a dataclass")
    its_name = OmegaConf.structured(config).get("name")
    require(its_name == name, f"the name in its Config is {its_name!r}")


DRAFTERS: Plugins[type[Drafter]] = Plugins(
    GROUP,
    "drafter",
    {name: EntryPoint(name, value, GROUP) for name, value in CORE.items()},
    _require_drafter,
)


def family(name: str) -> type[Drafter]:
    """The drafter class of this name, possibly from another installed package. Raises UserError,
    with the nearest name, if there is none, or if that package is broken."""
    return DRAFTERS.named(name)


def with_copying(
    head: Drafter, copying: str, target: TargetParts, gamma: int | None = None
) -> Drafter:
    """A hybrid of the draft `head`, which drafts at most γ tokens, and the method `copying`."""
    kind = DRAFTERS["hybrid"]
    return kind.build(kind.Config(copying=copying, gamma=gamma or head.depth), target, earlier=head)


def shipped() -> list[type[Drafter]]:
    """The drafters of the core, then those of the lab."""
    return [DRAFTERS[name] for name in (*CORE, *lab_entries(GROUP))]


def installed() -> dict[str, EntryPoint]:
    """The entry points of other installed packages by name, including those that cannot be
    loaded."""
    return DRAFTERS.installed()
