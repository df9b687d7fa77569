"""What every drafter does: draft after a context, over a cache.

`predictor` adds what drafters with a distribution of their own do, and `trainable` what those with
weights to train do. What only some drafters can do is a class attribute, False by default, and the
methods that a drafter gives if it sets that attribute.

The alignment rule: a drafter reads tokens up to and including the anchor a, and the target's
features strictly before it. Depth k predicts token a + 1 + k, whose target distribution is
`target_logits[a + k]`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from specdec.compat import set_buffer
from specdec.context import Context, FeatureSpec, Proposal
from specdec.errors import require, require_known, require_within
from specdec.sampling.choose import Choose
from specdec.sampling.confidence import Calibrations
from specdec.sampling.trees import DEEPEST, Growth, Shape
from specdec.targets.parts import TargetParts
from specdec.targets.target import Target

NOTHING, OWN = -1, -2  # in place of a copied id (see `Drafter.copied`)


@dataclass(kw_only=True)
class Sizes:
    """The sizes of a drafter that the target determines; families that need more extend the class.

    `target_vocab` and `draft_vocab` count tokens; a `draft_vocab` of None is the whole vocabulary.
    The sizes are written to a draft's card with the config, so all fields are plain JSON.
    """

    target_vocab: int
    draft_vocab: int | None = None

    @classmethod
    def of(cls, config: Any, target: TargetParts, **more: Any) -> Self:
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

    Each attribute that is False by default declares an ability. A drafter that sets it gives the
    methods named beside it.
    """

    Config: ClassVar[type[Any]]
    Sizes: ClassVar[type[Sizes]] = Sizes
    config: Any
    sizes: Any
    needs: FeatureSpec = FeatureSpec()
    depth: int  # how many depths are trained and measured; also the default γ
    limits: Limits

    copies: bool = False  # its proposals are point masses, without q: `copied`
    fits_texts: ClassVar[bool] = False  # learns counts or an index from texts: `fit`
    weighs_choices: ClassVar[bool] = False  # chooses between ways to draft by their cost: `weigh`
    sends_scouts: ClassVar[bool] = False  # its proposals have scouts (see `Scouts`): `hear`
    runs_target: ClassVar[bool] = False  # may run the target's own layers, even in training
    calibrations = Calibrations()  # of its confidence in each drafted token
    noted_alpha: Sequence[float] = ()  # its greedy α by depth on held-out text, as noted on disk
    # the same way to draft in `generate` of transformers: "assistant" or "prompt lookup"
    in_transformers: ClassVar[str | None] = None
    # configs, by name, of a family that pays only where prompts are long; benches measure these
    long_prompts: ClassVar[Mapping[str, Any]] = {}

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
    def trains(cls, config: Any) -> bool:
        """Whether a drafter with this config has weights to train."""
        return False

    @classmethod
    def adapts_target(cls, config: Any) -> bool:
        """Whether a drafter with this config trains adapters on the target along with itself. The
        target with these adapters is then the one that it drafts for."""
        return False

    @classmethod
    def plan(cls, config: Any, target: TargetParts) -> Any:
        """The `Sizes` of a drafter with this config for this target."""
        return cls.Sizes.of(config, target)

    @classmethod
    def build(
        cls,
        config: Any,
        target: TargetParts,
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

    def attach(self, target: TargetParts) -> None:
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

    @abstractmethod
    def begin(self, ctx: Context, cache: Any = None) -> Growth:
        """The state of one speculation step at its anchors. Beam search, which chooses tokens by
        itself, grows the draft node by node from it."""

    def copied(self, ctx: Context, anchors_BA: Tensor, depth: int) -> Tensor:
        """The ids [B, A, K] of the K = `depth` tokens that a drafter that `copies` drafts at each
        anchor; `NOTHING` where it drafts none, `OWN` where its `copying_head` drafts. Along a known
        text it answers with these tokens themselves."""
        raise NotImplementedError

    @property
    def copying_head(self) -> "tuple[Drafter, int] | None":
        """The drafter with a q that drafts where a drafter that `copies` finds nothing better, and
        the most tokens that it drafts in a row; None if there is no such drafter."""
        return None

    def fit(self, texts: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]) -> None:
        """Learn from training texts without gradients, and keep what was learned in buffers.
        `masks` mark the assistant's tokens. A family without weights to train is fitted in place of
        training."""
        raise NotImplementedError

    def weigh(
        self,
        cost: "Callable[[Drafter, int], tuple[float, float]]",
        texts: Sequence[Sequence[int]],
        masks: Sequence[Sequence[bool]],
        variant: str,
    ) -> None:
        """Learn, before decoding at a temperature, what the choice between several ways to draft
        depends on. `cost(member, γ)` measures the time of one draft step of a member that drafts γ
        tokens, and of a forward pass over γ + 1 tokens, both in steps of the baseline. Where
        `masks` is true, the tokens of `texts` are the target's own responses at that temperature.
        `variant` names the variant of α (see `variant_of`)."""
        raise NotImplementedError

    def hear(self, logits_BQV: Tensor, cache: Any) -> None:
        """Learn from the target's logits after each scout of the last proposal. `cache` is the one
        that drafted it."""
        raise NotImplementedError

    def require_sound(self) -> None:
        """Raise UserError if buffers, loaded from a damaged file, hold values that no fit can have
        produced, such as ids outside the target's vocabulary."""

    def beyond_training(self, depth: int, tree: bool) -> str:
        """What to tell the user if chains or trees of this depth are deeper than the drafter was
        trained for, so that the deepest tokens are accepted less often; else empty."""
        return ""

    def settled(self, target: Target) -> "tuple[Drafter, Target]":
        """The drafter and the target to decode with, not yet attached: these two or, if the drafter
        `adapts_target`, a drafter without adapters and a copy of the target with them merged."""
        return self, target

    def weights_to_save(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of a draft on disk, from a state dict. Parts that only training needs, such
        as adapters on the draft's own weights, are merged into the others."""
        return dict(weights)


def starts_of(config: Any) -> Sequence[str]:
    """The values that the setting `start` may have in a config, or in a class of configs."""
    starts: Sequence[str] = getattr(config, "starts", ("target", "random"))
    return starts


def chosen_layers(
    configured: Sequence[int] | None, default: Sequence[int], target: TargetParts
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
