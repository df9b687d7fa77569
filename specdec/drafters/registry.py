"""The drafters by name: the core's, the lab's, and those of other installed packages, which bring
entry points of the group `draftsmith.drafters`."""

from dataclasses import is_dataclass
from importlib.metadata import EntryPoint
from inspect import isabstract
from typing import Any

from omegaconf import OmegaConf

from specdec.drafters.dflash import DFlash
from specdec.drafters.dflash2 import DFlash2
from specdec.drafters.dspark import DSpark
from specdec.drafters.eagle import Eagle
from specdec.drafters.eagle3 import Eagle3
from specdec.drafters.hybrid import Hybrid, HybridConfig
from specdec.drafters.hydra import Hydra
from specdec.drafters.jetspec import JetSpec
from specdec.drafters.lm import LM
from specdec.drafters.medusa import Medusa
from specdec.drafters.mlp import Mlp
from specdec.drafters.mtp import MTP
from specdec.drafters.ngram import Ngram
from specdec.drafters.peagle import PEagle
from specdec.drafters.proposer import Drafter
from specdec.drafters.suffix import Suffix
from specdec.errors import require
from specdec.plugins import Plugins, lab_entries
from specdec.targets.parts import Parts

CORE: tuple[type[Drafter], ...] = (
    *(Eagle3, Eagle, MTP, Medusa, Hydra, Mlp, PEagle),
    *(DFlash, DFlash2, DSpark, JetSpec),
    *(LM, Ngram, Suffix, Hybrid),
)


def _require_drafter(name: str, kind: Any) -> None:
    fitting = isinstance(kind, type) and issubclass(kind, Drafter) and not isabstract(kind)
    require(fitting, f"{kind!r} is not a complete subclass of Drafter")
    config: Any = getattr(kind, "Config", None)
    require(is_dataclass(config), "its Config is not a dataclass")
    its_name = OmegaConf.structured(config).get("name")
    require(its_name == name, f"the name in its Config is {its_name!r}")


DRAFTERS: Plugins[type[Drafter]] = Plugins(
    "draftsmith.drafters", "drafter", {kind.Config.name: kind for kind in CORE}, _require_drafter
)


def family(name: str) -> type[Drafter]:
    """The drafter class of this name, which may be one of another installed package. Raises
    UserError, with the nearest name, if no class has this one, or if an installed one is broken."""
    return DRAFTERS.named(name)


Hybrid.by_name = family


def shipped() -> list[type[Drafter]]:
    """The drafters of the core, then those of the lab."""
    return [*CORE, *(DRAFTERS[name] for name in lab_entries(DRAFTERS.group))]


def installed() -> dict[str, EntryPoint]:
    """The families of other installed packages, by name, whether or not they can be loaded."""
    return DRAFTERS.installed()


def with_copying(head: Drafter, copying: str, target: Parts, gamma: int | None = None) -> Hybrid:
    """The hybrid of the draft `head`, which drafts at most γ tokens, and the family `copying`."""
    return Hybrid.build(
        HybridConfig(copying=copying, gamma=gamma or head.depth), target, earlier=head
    )
