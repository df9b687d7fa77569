"""The registry: the drafter families, and the dict that finds them by name.

Another installed package adds a family by an entry point of the group `draftsmith.drafters`, whose
name is the family's. It is imported when it is asked for, or when all families are registered.
"""

from contextlib import suppress
from dataclasses import is_dataclass
from importlib.metadata import EntryPoint, entry_points
from inspect import isabstract
from typing import Any

from omegaconf import OmegaConf

from specdec.drafters.copying.copy import Copy
from specdec.drafters.copying.counts import Bigram, Unigram
from specdec.drafters.copying.lookahead import Lookahead
from specdec.drafters.copying.ngram import Ngram
from specdec.drafters.copying.suffix import Suffix
from specdec.drafters.hybrid import Hybrid, HybridConfig
from specdec.drafters.models.early_exit import EarlyExit
from specdec.drafters.models.lm import LM
from specdec.drafters.models.seq2seq_lm import Seq2SeqLM
from specdec.drafters.models.sparse import Sparse
from specdec.drafters.models.translated import Translated
from specdec.drafters.parallel.dflash import DFlash
from specdec.drafters.parallel.dflash2 import DFlash2
from specdec.drafters.parallel.dspark import DSpark
from specdec.drafters.parallel.jetspec import JetSpec
from specdec.drafters.parallel.medusa import Medusa
from specdec.drafters.parallel.mtp_heads import MTPHeads
from specdec.drafters.parallel.peagle import PEagle
from specdec.drafters.proposer import Drafter
from specdec.drafters.recurrent.eagle import Eagle
from specdec.drafters.recurrent.eagle3 import Eagle3
from specdec.drafters.recurrent.falcon import Falcon
from specdec.drafters.recurrent.hydra import Hydra
from specdec.drafters.recurrent.mlp import Mlp
from specdec.drafters.recurrent.mtp import MTP
from specdec.drafters.recurrent.spire import Spire
from specdec.errors import UserError, first_line, nearest, require
from specdec.targets.parts import Parts

FAMILIES: tuple[type[Drafter], ...] = (
    *(Eagle3, Eagle, Falcon, MTP, MTPHeads, Medusa, Hydra, Mlp, PEagle, Spire),
    *(DFlash, DFlash2, DSpark, JetSpec),
    *(LM, Ngram, Seq2SeqLM, Translated, Unigram, Bigram, Suffix, Lookahead, Copy),
    *(EarlyExit, Sparse, Hybrid),
)
DRAFTERS = {kind.Config.name: kind for kind in FAMILIES}
GROUP = "draftsmith.drafters"


def family(name: str) -> type[Drafter]:
    """The drafter class of this name, which may be one of another installed package. Raises
    UserError, with the nearest name, if no class has this one, or if an installed one is broken."""
    if name not in DRAFTERS:
        elsewhere = installed()
        if name not in elsewhere:
            known = {*DRAFTERS, *elsewhere}
            raise UserError(f"drafter {name!r} is unknown{nearest(name, known)}")
        DRAFTERS[name] = _loaded(elsewhere[name])
    return DRAFTERS[name]


Hybrid.by_name = family


def installed() -> dict[str, EntryPoint]:
    """The families of other installed packages, by name, whether or not they can be loaded."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def add_installed() -> None:
    """Add the families of other installed packages to `DRAFTERS`. A broken one is left out.
    Only those who ask for it need to know: `family` then says what is wrong with it."""
    for name in installed():
        with suppress(UserError):
            family(name)


def _loaded(entry: EntryPoint) -> type[Drafter]:
    package = entry.dist.name if entry.dist is not None else entry.module
    where = f"drafter {entry.name!r} of the installed package {package}"
    try:
        kind: Any = entry.load()
        fitting = isinstance(kind, type) and issubclass(kind, Drafter) and not isabstract(kind)
        require(fitting, f"{where}: {entry.value} is not a complete subclass of Drafter")
        config: Any = getattr(kind, "Config", None)
        require(is_dataclass(config), f"{where}: its Config is not a dataclass")
        name = OmegaConf.structured(config).get("name")
        require(name == entry.name, f"{where}: the name in its Config is {name!r}")
    except UserError:
        raise
    except Exception as error:  # of any kind, since importing a package may do anything
        raise UserError(
            f"{where} cannot be loaded ({type(error).__name__}: {first_line(error)}): mend that "
            "package, or choose another drafter"
        ) from error
    loaded: type[Drafter] = kind
    return loaded


def with_copying(head: Drafter, copying: str, target: Parts, gamma: int | None = None) -> Hybrid:
    """The hybrid of the draft `head`, which drafts at most γ tokens, and the family `copying`."""
    return Hybrid.build(
        HybridConfig(copying=copying, gamma=gamma or head.depth), target, earlier=head
    )
