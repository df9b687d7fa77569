"""`Way`: a decoding configuration. The settings build it, `decode` takes it, evaluation measures
it, and reports name it."""

from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Self

from specdec.decoding.draft_length import Length
from specdec.decoding.verification_methods import VerificationMethod, named
from specdec.drafters.base import Drafter
from specdec.errors import require
from specdec.sampling.confidence import variant_of
from specdec.sampling.sampler import Sampler
from specdec.sampling.trees import Chain, Shape
from specdec.targets.parts import TargetParts


@dataclass(frozen=True)
class Way:
    """A decoding configuration: drafter, draft topology, sampler, and verification method. `Way()`
    is greedy vanilla decoding.

    `shape` is the draft topology (None: a chain as deep as the drafter was trained). `length` is an
    adaptive draft length for chains, which may learn from one response to the next. `verification`
    judges drafts (see `fitting_verification`). `greedy_draft` drafts the most likely token at T >
    0, as engines do by default. `compiled` runs the forward passes of target and draft through
    `torch.compile`, over caches of fixed size. Raises UserError as `require_draftable` and
    `fitting_verification` do, and for an adaptive draft length with a tree.
    """

    drafter: Drafter | None = None  # None: vanilla decoding
    shape: Shape | None = None
    sampler: Sampler = field(default_factory=lambda: Sampler(temperature=0.0))
    verification: str | VerificationMethod = "auto"
    greedy_draft: bool = False
    draft_length: Length | None = None
    compiled: bool = False

    def __post_init__(self) -> None:
        if self.drafter is not None:
            shape = self.shape or Chain(self.drafter.depth)
            object.__setattr__(self, "shape", shape)
            require_draftable(self.drafter, shape.depth, type(self.draft_length or Length()))
            require(
                isinstance(shape, Chain) or self.draft_length is None,
                "a length policy shortens chains, not trees: leave one out",
            )
        _ = self.verification_method  # raises if the verification method does not fit

    @property
    def verification_method(self) -> VerificationMethod:
        """The verification method that judges drafts."""
        return fitting_verification(self.verification, self.shape, self.sampler, self.greedy_draft)

    @property
    def variant(self) -> str:
        """The variant of α that describes the acceptance of drafts."""
        picked = self.greedy_draft or self.verification_method.siblings == "fixed"
        return variant_of(self.sampler.greedy, picked)

    @property
    def plain(self) -> "Way":
        """Vanilla decoding with the same sampler."""
        return Way(sampler=self.sampler, compiled=self.compiled)

    def drafting(self, shape: Shape, length: Length | None = None) -> Self:
        """A copy with the given topology and adaptive draft length."""
        return replace(self, shape=shape, draft_length=length)

    def fresh(self) -> Self:
        """A copy whose adaptive draft length learns independently from here on."""
        return replace(self, draft_length=deepcopy(self.draft_length))


def fitting_verification(
    name: str | VerificationMethod,
    shape: Shape | None,
    sampler: Sampler,
    greedy_draft: bool = False,
) -> VerificationMethod:
    """The verification method of this name. "auto" is block for chains, recursive for trees drawn
    from q, point_mass for other trees. Raises UserError if it does not support the topology."""
    if isinstance(name, VerificationMethod):
        return name
    tree, picked = not isinstance(shape, Chain | None), shape is not None and shape.fixed
    best = "point_mass" if picked else "recursive"  # the best verification method for a tree
    if name == "auto":
        name = "block" if not tree else "point_mass" if greedy_draft else best
    method = named(name)
    if tree and not sampler.greedy:
        require(
            method.trees,
            f"decode.verification={name} judges chains only: give {best} for this tree",
        )
        require(
            not picked or method.siblings == "fixed",
            f"decode.verification={name} needs siblings drawn from q, but this tree picks the "
            "likeliest: give decode.verification=point_mass, or a static tree",
        )
    return method


def require_read(target: TargetParts, drafter: Drafter | None, tree: bool, compiled: bool) -> None:
    """Raise UserError if the target supports no branches, but a tree is drafted, the drafter sends
    scouts (which branch off), or forward passes are compiled."""
    if target.reads_trees:
        return
    states = f"{target.title} {target.only_chains}"
    require(not tree, f"{states}: draft chains (decode.tree=null), not trees")
    require(
        drafter is None or not drafter.sends_scouts,
        f"{states}, but this drafter sends scouts beside its draft: give another drafter",
    )
    require(
        not compiled,
        f"{states}, which a graph of a pass would not do: give decode.compile=false",
    )


def require_draftable(drafter: Drafter, depth: int, length: type[Length]) -> None:
    """Raise UserError if the drafter cannot draft so deep, or does not have the q that the policy
    reads."""
    name, most = drafter.config.name, drafter.limits.depth
    require(
        most is None or depth <= most,
        f"decode.gamma={depth} (or a tree of that depth) is too deep: this {name} drafts at most "
        f"{most} tokens in a row",
    )
    require(
        not length.reads_q or not drafter.copies,
        f"{length.__name__} needs q, but {name} copies tokens: give another decode.draft_length",
    )
