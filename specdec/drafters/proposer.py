"""What every drafter does: draft after a context, over a cache.

`predictor` adds what drafters with a distribution of their own do, `trainable` what those with
weights to train do, and `capabilities` what only some can do.

The alignment rule: a drafter reads tokens up to and including the anchor a, and the target's
features strictly before it. Depth k predicts token a + 1 + k, whose target distribution is
`target_logits[a + k]`.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from specdec.compat import set_buffer
from specdec.context import Context, FeatureSpec, Proposal
from specdec.errors import require, require_known, require_within
from specdec.sampling.choose import Choose
from specdec.sampling.trees import DEEPEST, Shape
from specdec.targets.parts import Parts


@dataclass(kw_only=True)
class Sizes:
    """The sizes of a drafter that the target determines; families that need more extend the class.

    `target_vocab` and `draft_vocab` count tokens; a `draft_vocab` of None is the whole vocabulary.
    The sizes are written to a draft's card with the config, so all fields are plain JSON.
    """

    target_vocab: int
    draft_vocab: int | None = None

    @classmethod
    def of(cls, config: Any, target: Parts, **more: Any) -> Self:
        """The sizes for this config and target, with the values `more` of a family's own fields.
        `draft_vocab` is None unless it is smaller than the target's vocabulary."""
        V, asked = target.vocab_size, getattr(config, "draft_vocab", None)
        more.setdefault("draft_vocab", asked if (asked or V) < V else None)
        return cls(target_vocab=V, **more)


@dataclass
class Limits:
    """What decoding must know of a drafter before it drafts."""

    depth: int | None = None  # the most tokens in a row that it can draft; None: any number
    positions: int | None = None  # the longest text to draft for, in tokens; None: any
    slots: int = 0  # slots of a cache that drafting needs besides those of its nodes
    parallel: bool = False  # depths do not read each other's tokens: `Growth.marginals`


class Drafter(nn.Module, ABC):
    """Proposes tokens. A drafter is made from its config (the user's choices) and its sizes (what
    the target determines), so a draft on disk can be read without planning it again.

    `Config` is the dataclass that configures the family. It may have `bounds`, the limits of its
    settings (see `require_within`), and `starts`, the values that its setting `start` may take.
    """

    Config: ClassVar[type[Any]]
    Sizes: ClassVar[type[Sizes]] = Sizes
    config: Any
    sizes: Any
    needs: FeatureSpec = FeatureSpec()
    depth: int  # how many depths are trained and measured; also the default γ
    limits: Limits

    def __init__(self, config: Any, sizes: Any) -> None:
        super().__init__()
        bounds: dict[str, Any] = {"depth": (1, DEEPEST), "draft_vocab": 1, "intermediate_size": 1}
        bounds |= getattr(config, "bounds", {})
        own = {name: bound for name, bound in bounds.items() if hasattr(config, name)}
        require_within("drafter", config, **own)
        if hasattr(config, "start"):
            require_known("drafter", config, start=starts_of(config))
        self.config = config
        self.sizes = sizes
        self.depth = config.depth
        self.limits = Limits()

    @classmethod
    def plan(cls, config: Any, target: Parts) -> Any:
        """The `Sizes` of a drafter with this config for this target."""
        return cls.Sizes.of(config, target)

    @classmethod
    def build(
        cls,
        config: Any,
        target: Parts,
        vocab_S: Tensor | None = None,
        earlier: "Drafter | None" = None,
    ) -> Self:
        """A drafter for a target. Families that are trained start from the weights of an `earlier`
        draft, if there is one, and may have the pruned draft vocabulary `vocab_S`."""
        drafter = cls(config, cls.plan(config, target))
        drafter.to(target.device)
        drafter.attach(target)
        return drafter

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Move or cast as modules do, but never cast rotary frequencies: rounded to bfloat16, they
        would be off by up to 0.4 %, which adds up to one radian after 256 positions."""
        exact = {name: x for name, x in self.named_buffers() if name.endswith("inv_freq")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, x in exact.items():
            path, _, leaf = name.rpartition(".")
            module = self.get_submodule(path)
            set_buffer(module, leaf, x.to(self.get_buffer(name).device))
        return self

    def attach(self, target: Parts) -> None:
        """Keep references to the frozen parts of the target that the drafter reads. They are never
        saved."""

    def new_cache(self, capacity: int | None = None) -> Any:
        """A cache that drafting keeps between the rounds of one generation, with a `select(rows)`
        method, or None. `capacity` fixes the slots of families whose passes can be compiled."""
        return None

    @abstractmethod
    def draft(self, ctx: Context, shape: Shape, choose: Choose, cache: Any = None) -> Proposal:
        """Draft in the given shape after each row's anchor, the last token of the row in `ctx`.

        `ctx` is always the whole context: a cache only saves work and never changes the draft.
        """


def starts_of(config: Any) -> Sequence[str]:
    """The values that the setting `start` may have in a config, or in a class of configs."""
    starts: Sequence[str] = getattr(config, "starts", ("target", "random"))
    return starts


def chosen_layers(
    configured: Sequence[int] | None, default: Sequence[int], target: Parts
) -> list[int]:
    """The target's layers that a drafter reads: those that its config gives, or the default.
    Raises UserError for a layer that the target lacks."""
    layers, L = configured or sorted(set(default)), target.depth
    few = "" if configured else "; the default needs more, so give drafter.layers"
    require(
        all(0 < k <= L for k in layers),
        f"drafter.layers={list(layers)}: layers of this target run from 1 to {L}{few}",
    )
    return list(layers)


def require_rising(layers: Sequence[int] | None) -> None:
    """Raise UserError unless layers to read are unset, or distinct and in rising order."""
    require(
        layers is None or (len(layers) > 0 and all(a < b for a, b in pairwise(layers))),
        f"drafter.layers={layers}: give distinct layers in rising order, as engines "
        "read them, or null for the default",
    )
