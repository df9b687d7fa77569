"""What some drafters can do besides drafting.

Whoever needs a capability asks for it by `isinstance`, or of a family by `issubclass`; a drafter
that lacks it has none of its methods.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from torch import Tensor

from specdec.context import Context, Known
from specdec.drafters.proposer import Drafter
from specdec.sampling.confidence import Calibrations
from specdec.sampling.trees import Growth
from specdec.targets.base import Target


class Grows(ABC):
    """Drafts node by node, given what was chosen before. Beam search, which chooses by itself, asks
    for this in place of a whole draft."""

    @abstractmethod
    def begin(self, ctx: Context, cache: Any = None) -> Growth:
        """The state of one round at its anchors."""


class Calibrated:
    """Has a confidence in each drafted token, and what was measured of its acceptance: calibrations
    of that confidence, and the greedy α by depth on held-out text that was noted on disk."""

    calibrations = Calibrations()
    noted_alpha: Sequence[float] = ()


class Sound(ABC):
    """Has buffers whose values may be impossible when they are loaded from a damaged file."""

    @abstractmethod
    def require_sound(self) -> None:
        """Raise UserError if they hold values that no fit can have produced, such as ids outside
        the target's vocabulary."""


class TrainedDepth(ABC):
    """Was trained to draft a certain number of tokens in a row; drafts longer runs less well."""

    @abstractmethod
    def beyond_training(self, depth: int, tree: bool) -> str:
        """What to tell the user if chains or trees of this depth are deeper than the drafter was
        trained for; empty if they are not, or cannot be drafted at all."""


NOTHING, OWN = -1, -2  # in place of a copied id: none is drafted; the head drafts (see `Combines`)


class Copies(Grows):
    """Proposes tokens that it finds. They have no q and no second-best token: each is a point mass.
    Along a known text it answers with these tokens themselves."""

    @abstractmethod
    def copied(self, ctx: Context, anchors_BA: Tensor, depth: int) -> Tensor:
        """The ids [B, A, K] of the K = `depth` tokens that it drafts at each anchor; `NOTHING`
        where it drafts none."""


class Combines(Copies):
    """Copies at some anchors, and at others lets another drafter, its `head`, draft up to `gamma`
    tokens. Where the head drafts, `copied` returns `OWN`."""

    head: Drafter
    gamma: int


class Fits(ABC):
    """Learns from texts without gradients, and keeps what it learned (counts, an index) in buffers.
    A family that has nothing else to learn is fitted in place of training."""

    @abstractmethod
    def fit(self, texts: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]) -> None:
        """Learn from training texts; `masks` mark the assistant's tokens."""


class Solves(ABC):
    """Can solve in closed form for the weights that training starts from, by least squares over a
    part of the training texts."""

    regressed: int = 2  # how many depths are solved for
    config: Any

    @property
    def regresses(self) -> bool:
        """Whether training starts in this way with the drafter's config."""
        return getattr(self.config, "start", None) == "regression"

    @abstractmethod
    def regress(self, known: Callable[[], Iterable[Known]]) -> None:
        """Solve for the weights. `known()` yields the same part of the training texts every time.
        Called only if the drafter `regresses`."""


class Adapts(ABC):
    """Trains adapters on the target along with itself, if its config says so. The target with these
    adapters is then the one that it drafts for."""

    @classmethod
    @abstractmethod
    def adapts_target(cls, config: Any) -> bool:
        """Whether a drafter with this config does so."""

    @abstractmethod
    def adapted(self, ctx: Context, progress: float) -> tuple[Tensor, float] | None:
        """If the target is adapted: its final hidden states [B, T, D] with the current adapters,
        and the weight of the draft's own loss when the share `progress` of a run is done. The
        divergence of the adapted target from the original is added with weight 1."""

    @abstractmethod
    def settled(self, target: Target) -> tuple[Drafter, Target]:
        """The drafter and the target to decode with, not yet attached: these two or, if the target
        was adapted, a drafter without adapters and a copy of the target with them merged."""


class Extends(ABC):
    """Has parts that only training needs, such as adapters on its own weights. A draft on disk is
    without them."""

    @abstractmethod
    def begin_training(self, inherited: bool) -> None:
        """Add these parts to fresh weights, or to those `inherited` from an earlier draft."""

    @abstractmethod
    def finished(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights to save, in which the parts are merged, from a state dict that has them."""


class Hears(ABC):
    """Sends scouts, tokens that the target reads beside the draft, and learns from what the target
    predicts after them."""

    @abstractmethod
    def hear(self, logits_BQV: Tensor, cache: Any) -> None:
        """Take the target's logits after each scout of the last proposal; `cache` is the one used
        for that draft."""


class Separate(ABC):
    """Has a head for each depth that reads only states of the target: no drafted token, and
    nothing of another head. So training needs the tensors of one head at a time (Gloeckle et al.
    2024, arXiv 2404.19737, section 2): its logits are made, give their gradient and are freed
    before the next head's are made, unless the objective couples the depths."""

    @abstractmethod
    def read_by_heads(self, ctx: Context, anchors_BA: Tensor) -> Tensor:
        """The states [B, A, K, D] that the heads read at each anchor, or [B, A, 1, D] if all heads
        read the same."""

    @abstractmethod
    def heads_of(self, read_NKD: Tensor, first: int) -> Tensor:
        """Hidden states [N, K, D] of K depths, from depth `first` on, made from the states that
        their heads read."""


class Estimates(ABC):
    """Estimates its own acceptance. The estimate is trained along with the draft, whatever the
    draft's own loss (see `Objective.loss`), and decoding reads it as the draft's confidence."""

    @abstractmethod
    def confidence(self, hidden_NKD: Tensor) -> Tensor:
        """The estimated α [N, K] at each depth, from hidden states."""


class Weighs(ABC):
    """Chooses in each round between several ways to draft, by what it has learned of their costs
    and of their acceptance at the temperature of decoding."""

    @abstractmethod
    def weigh(
        self,
        cost: Callable[[Drafter, int], tuple[float, float]],
        texts: Sequence[Sequence[int]],
        masks: Sequence[Sequence[bool]],
        variant: str,
    ) -> None:
        """Learn what the choice depends on, before decoding at a temperature. `cost(member, γ)`
        measures the time of one draft step of a member that drafts γ tokens, and of a pass over
        γ + 1 tokens, both in plain steps. Where `masks` is true, the tokens of `texts` are the
        target's own answers at that temperature. `variant` names the variant of α (see
        `variant_of`)."""


class RunsTarget:
    """Runs the target's own layers, even in training, so it needs a whole target: its parts are not
    enough. Families that combine drafters count as well if one of those may do so."""


class InTransformers:
    """Drafts as `generate` in transformers can, so that benches can compare the two.
    `in_transformers` names that way of drafting: `assistant` or `prompt lookup`."""

    in_transformers: ClassVar[str]


class ForLongPrompts:
    """Pays only where prompts are long. Benches measure it there, with each of these configs."""

    long_prompts: ClassVar[Mapping[str, Any]]


def adapts(kind: type, config: Any) -> bool:
    """Whether a drafter of this class with this config adapts the target."""
    return issubclass(kind, Adapts) and kind.adapts_target(config)


def in_transformers(kind: type) -> str | None:
    """What `generate` in transformers calls drafting like this class; None if it does not do so."""
    return kind.in_transformers if issubclass(kind, InTransformers) else None


def finished(drafter: Drafter, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a draft to save, from a state dict."""
    return drafter.finished(weights) if isinstance(drafter, Extends) else dict(weights)
