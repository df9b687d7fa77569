"""A hybrid: a drafter that copies repeated text, and another drafter, its head, for everything
else.

In each speculation step, every row drafts the proposal that should commit the most tokens per
second: m copied tokens, γ tokens of the head, or none. `walltime_by_gamma` (Theorem 3.8 of
Leviathan et al. 2023) gives the rate of each. The head's rate depends on its cost c and its
acceptance, which is calibrated or else the recorded α. The rate of copied tokens, which cost
nothing to draft, depends on the fraction that is right at each depth after matches of the same
length and frequency. These fractions are initialised by `prior`, counted in `fit`, and rescaled at
each temperature by `weigh`.

The choice depends on the text only, so it is the same in every batch and with every cache, and
lossless: a copied token is a point mass. In a tree whose nodes are not drawn at random, the copied
chain becomes a branch of the head's tree; in a tree of drawn siblings, one of the two is chosen.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from specdec.context import Context, Proposal
from specdec.drafters.base import OWN, Drafter, DrafterConfig, Predictor, Sizes, rereading
from specdec.drafters.copying import (
    Copying,
    RowMemories,
    TextMemory,
    copied_chains,
    copied_trees,
    point_mass,
    whole,
)
from specdec.drafters.registry import family
from specdec.errors import UserError, require, require_between
from specdec.files import record
from specdec.sampling.choose import Choose
from specdec.sampling.confidence import Calibrations
from specdec.sampling.trees import Chain, Growth, Shape
from specdec.targets.parts import TargetParts
from specdec.theory.leviathan import pass_cost, walltime_by_gamma

LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)  # the shortest match of each cell
PRIOR = (0.3, 0.55, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97)  # share that is right after such a match
SURE, UNSURE = 0.7, 0.45  # PRIOR holds if SURE of the occurrences agree; below, UNSURE · PRIOR
WEIGHT = 20.0  # weight of the prior, in copied tokens
UNSEEN = 0.8  # share of the texts that the copying member learns before copying is counted
COUNTED = 20_000  # the most copied tokens that are counted
COSTS = 0.07, {1: 1.05, 8: 1.2}  # c, and v by γ, until they are measured


@dataclass
class HybridConfig(DrafterConfig):
    """A retrieval-based drafter combined with a head."""

    name: str = "hybrid"
    depth: int = 8  # most tokens that are copied per speculation step
    # folder of a trained draft, such as runs/NAME/best, or a method that needs no training
    head: str = ""
    copying: str = ""  # retrieval-based method, such as suffix
    gamma: int = 2  # most tokens that the head drafts per speculation step
    # the head's acceptance rate by depth; the last value holds for greater depths; null: the α
    # noted when the head was trained, or 0.4
    alpha: list[float] | None = None

    def __post_init__(self) -> None:
        require_between("drafter.gamma", self.gamma, 1)
        sound = self.alpha is None or (self.alpha and all(0 <= a <= 1 for a in self.alpha))
        require(bool(sound), f"drafter.alpha={self.alpha}: give numbers between 0 and 1, by depth")


@dataclass
class HybridMember:
    """The method, config and sizes of a member, as on its own card."""

    family: str
    config: dict[str, Any]
    sizes: dict[str, Any]


@dataclass(kw_only=True)
class HybridSizes(Sizes):
    copier: HybridMember
    head: HybridMember


class HybridCache:
    """The memory of each row, and the head's own cache."""

    def __init__(self, head: Any) -> None:
        self.memories, self.head = RowMemories(), head

    def select(self, rows: Sequence[int]) -> None:
        self.memories.select(rows)
        if self.head is not None:
            self.head.select(rows)


class Hybrid(Drafter):
    Config = HybridConfig
    Sizes = HybridSizes
    copies = fits_texts = weighs_choices = True
    runs_target = True  # its head may
    sizes: HybridSizes
    copier: Copying
    head: Predictor
    tried_NK: Tensor
    right_NK: Tensor

    def __init__(self, config: HybridConfig, sizes: HybridSizes) -> None:
        super().__init__(config, sizes)
        copying_family(sizes.copier.family)
        self.copier, self.head = self._made(sizes.copier), self._made(sizes.head)
        self.needs, theirs = self.head.needs, self.head.limits
        self.longest, self.gamma = (min(n, theirs.depth or n) for n in (config.depth, config.gamma))
        self.depth = self.longest  # depth of teacher forcing; an evaluation may request less
        # a copied branch joins the nodes of a tree
        self.limits = replace(theirs, slots=theirs.slots + self.longest)
        counts_NK = torch.zeros(2 * len(LENGTHS), config.depth, dtype=torch.long)
        self.register_buffer("tried_NK", counts_NK)
        self.register_buffer("right_NK", counts_NK.clone())
        (self.c, self.v), self.trust = COSTS, 1.0  # `trust`: the factor that scales the shares
        self.alpha = config.alpha or [0.4]
        self._rates: tuple[list[list[float]], list[float]] | None = None

    def beyond_training(self, depth: int, tree: bool) -> str:
        return self.head.beyond_training(depth if tree else self.gamma, tree)

    @property
    def copying_head(self) -> tuple[Drafter, int]:
        return self.head, self.gamma

    @property
    def calibrations(self) -> Calibrations:
        """The calibrations of the head; copied tokens have none."""
        return self.head.calibrations

    @calibrations.setter
    def calibrations(self, calibrations: Calibrations) -> None:
        self.head.calibrations = calibrations

    def _made(self, member: HybridMember) -> Any:
        kind, name = _member_family(member.family), member.family
        config: Any = record(kind.Config, member.config, f"the config of its {name}")
        sizes = record(kind.Sizes, member.sizes, f"the sizes of its {name}")
        theirs, ours = sizes.target_vocab, self.sizes.target_vocab
        require(theirs == ours, f"its {name} has a vocabulary of {theirs} tokens, not {ours}")
        return kind(config, sizes)

    @classmethod
    def plan(cls, config: HybridConfig, target: TargetParts) -> HybridSizes:
        return cls.build(config, target).sizes

    @classmethod
    def build(
        cls,
        config: HybridConfig,
        target: TargetParts,
        vocab_S: Tensor | None = None,
        earlier: Drafter | None = None,
    ) -> "Hybrid":
        """A hybrid; `earlier` may be a trained head. Raises UserError for members that do not
        fit."""
        copying = copying_family(config.copying)
        copier = copying.build(copying.Config(), target)
        if (head := earlier) is None:
            kind = _member_family(config.head)
            require(
                not kind.trains(kind.Config()),
                f"drafter.head={config.head} must be trained first: give the folder of a draft, "
                "such as runs/NAME/best",
            )
            head = kind.build(kind.Config(), target)
        require(
            not head.adapts_target(head.config),
            f"drafter.head: {head.config.name} was trained together with adapters on the target, "
            "which a hybrid does not have: give another draft",
        )
        require(
            not head.copies,
            f"drafter.head: {head.config.name} copies too: give another draft",
        )
        assert isinstance(head, Predictor)
        alpha = config.alpha or list(head.noted_alpha) or [0.4]
        members = member_of(copier), member_of(head)
        sizes = HybridSizes(target_vocab=target.vocab_size, copier=members[0], head=members[1])
        drafter = cls(replace(config, alpha=alpha), sizes)
        drafter.copier, drafter.head = copier, head
        drafter.to(target.device)
        drafter.attach(target)
        return drafter

    def attach(self, target: TargetParts) -> None:
        self.copier.attach(target)
        self.head.attach(target)

    def fit(self, texts: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]) -> None:
        """Fit the members to the texts. The fraction of correct copied tokens is counted on the
        last texts, before the copying member has read them."""
        first = int(UNSEEN * len(texts))
        if self.copier.fits_texts:
            self.copier.fit(texts[:first], masks[:first])
        self.tried_NK.zero_()
        self.right_NK.zero_()
        for e, k, right in islice(self._trials(texts[first:], masks[first:]), COUNTED):
            self.tried_NK[e, k] += 1
            self.right_NK[e, k] += right
        self._rates = None
        for member in (self.copier, self.head):
            if member.fits_texts:
                member.fit(texts, masks)
        self.sizes.copier, self.sizes.head = member_of(self.copier), member_of(self.head)

    def _trials(
        self, texts: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]]
    ) -> Iterator[tuple[int, int, bool]]:
        """The cell and depth of each token that would be copied along these texts, and whether it
        is right."""
        for ids, mask in zip(texts, masks, strict=True):
            memory, start = self.copier.memory(), 0
            for t in range(len(ids) - 1):
                memory.push(ids[t])
                if t < start or not mask[t + 1]:
                    continue
                start = t + 1
                for k, (guess, said) in enumerate(zip(memory.chain(self.longest), ids[start:])):
                    yield cell(memory), k, guess == said
                    if guess != said:
                        break
                    start += 1

    def require_sound(self) -> None:
        for member in (self.copier, self.head):
            member.require_sound()
        sound = (self.right_NK >= 0) & (self.right_NK <= self.tried_NK)
        require(bool(sound.all()), "tensors 'tried_NK' and 'right_NK' hold impossible counts")

    def weigh(
        self,
        cost: Callable[[Drafter, int], tuple[float, float]],
        texts: Sequence[Sequence[int]],
        masks: Sequence[Sequence[bool]],
        variant: str,
    ) -> None:
        known = self.head.calibrations.for_variant(variant)
        self.alpha = known.accepted if known else self.config.alpha or [0.4]
        self.c, of_head = cost(self.head, self.gamma)
        others = {1, self.longest} - {self.gamma}
        self.v = {self.gamma: of_head} | {n: cost(self.copier, n)[1] for n in others}
        expected = right = WEIGHT
        shares = self.shares().tolist()
        for e, k, hit in self._trials(texts, masks):
            expected, right = expected + shares[e][k], right + hit
        self.trust, self._rates = right / expected, None

    def shares(self) -> Tensor:
        """The fraction [N, K] of copied tokens that is right in texts like those of `fit`."""
        tried_NK, right_NK = self.tried_NK.cpu(), self.right_NK.cpu()
        return (WEIGHT * prior(tried_NK.shape[1]) + right_NK) / (WEIGHT + tried_NK)

    def speeds_of_members(self) -> tuple[list[list[float]], list[float]]:
        """Committed tokens per vanilla step: for steps with 0, 1, 2, … copied tokens in each cell,
        and for steps with 0, 1, 2, … tokens of the head."""
        if self._rates is None:
            alpha, v = [*self.alpha, *self.alpha[-1:] * self.gamma], pass_cost(self.v)
            shares = (self.trust * self.shares()).clamp_max(1).tolist()
            of_cells = [walltime_by_gamma(a, 0.0, self.longest, v) for a in shares]
            self._rates = of_cells, walltime_by_gamma(alpha, self.c, self.gamma, v)
        return self._rates

    def chain_of(self, memory: TextMemory, beside: bool = False) -> list[int]:
        """The tokens to copy at the end of a text. None if the head should commit more, unless both
        are drafted (`beside`) in a tree."""
        copied = memory.chain(self.longest)
        of_cells, of_head = self.speeds_of_members()
        rates = of_cells[cell(memory)][: len(copied) + 1]
        best = max(rates)
        return copied[: rates.index(best)] if beside or best >= max(of_head) else []

    def head_draft_length(self) -> int:
        """The number of tokens that the head drafts; 0 if a vanilla step is faster."""
        _, rates = self.speeds_of_members()
        return rates.index(max(rates))

    def copied(self, ctx: Context, anchors_BA: Tensor, depth: int) -> Tensor:
        return self.copier.walked(
            ctx,
            anchors_BA,
            depth,
            lambda memory: self.chain_of(memory) or [OWN] * self.head_draft_length(),
        )

    def draft_growth(self, ctx: Context, cache: Any = None) -> Growth:
        def logits(anchor_BT: Tensor, drafted_BTK: Tensor) -> Tensor:
            k = drafted_BTK.shape[2]
            ids_BT = self.copied(ctx, anchor_BT, k + 1)[..., k]
            logits_BTV, own_BT = point_mass(ids_BT, self.sizes.target_vocab), ids_BT == OWN
            if own_BT.any():
                hidden_BTD = self.head.hidden(ctx, anchor_BT, drafted_BTK)[:, :, k]
                logits_BTV[own_BT] = whole(self.head, self.head.unembed(hidden_BTD[own_BT], k))
            return logits_BTV

        return rereading(ctx, logits)

    def new_cache(self, capacity: int | None = None) -> HybridCache:
        return HybridCache(self.head.new_cache(capacity))

    @torch.no_grad()
    def draft(self, ctx: Context, shape: Shape, choose: Choose, cache: Any = None) -> Proposal:
        cache, chain = cache or HybridCache(None), isinstance(shape, Chain)
        beside = not chain and (shape.fixed or choose.siblings == "fixed")
        memories = cache.memories.read_new(ctx.rows(), self.copier.memory)
        copies = [self.chain_of(memory, beside)[: shape.depth] for memory in memories]
        if isinstance(shape, Chain):
            shape = Chain(min(shape.depth, self.head_draft_length()), shape.stop)
        if shape.depth == 0 or (all(copies) and not beside):
            return copied_chains(copies, ctx)
        choose = replace(choose, vocab_S=self.head.vocab_S)
        before_B = choose.draws.counter_B
        proposal = self.head.draft(ctx, shape, choose, cache.head)
        if choose.siblings != "fixed" and not beside:  # a row that copies uses no random numbers
            copying_B = torch.tensor([bool(ids) for ids in copies], device=before_B.device)
            counter_B = choose.draws.counter_B
            choose.draws.counter_B = torch.where(copying_B, before_B, counter_B)
        return joined(proposal, copies) if beside else replaced(proposal, copies)


def _member_family(name: str) -> type[Drafter]:
    require(bool(name), "a hybrid combines drafter.head and drafter.copying: give both")
    return family(name)


def copying_family(name: str) -> type[Copying]:
    """The method of this name. Raises UserError unless it copies from the text alone."""
    kind = _member_family(name)
    if not issubclass(kind, Copying) or kind.runs_target:
        raise UserError(f"{name} does not copy from the text alone: give a family that does")
    return kind


def member_of(drafter: Drafter) -> HybridMember:
    return HybridMember(drafter.config.name, asdict(drafter.config), asdict(drafter.sizes))


def cell(memory: TextMemory) -> int:
    """The cell of evidence [0, E) for a memory's last chain."""
    length, share = memory.evidence()
    return of_length(max(1, length)) + len(LENGTHS) * (share >= SURE)


def of_length(n: int) -> int:
    return bisect_right(LENGTHS, n) - 1


def prior(depths: int) -> Tensor:
    """The expected fraction [N, K] of correct copied tokens. A token at depth k counts as following
    a match that is longer by k, since the k copied tokens before it were right."""
    sure = [[PRIOR[of_length(n + k)] for k in range(depths)] for n in LENGTHS]
    return torch.tensor([[UNSURE * first, *others] for first, *others in sure] + sure)


def replaced(proposal: Proposal, copies: list[list[int]]) -> Proposal:
    """The proposal, with the copied chain in each row that has one."""
    G = max(proposal.tokens_BG.shape[1], *map(len, copies))
    more = G - proposal.tokens_BG.shape[1]
    tokens_BG = pad(proposal.tokens_BG, (0, more), value=-1)
    q_BGV = None if proposal.q_BGV is None else pad(proposal.q_BGV, (0, 0, 0, more))
    parents_BG = (
        None if proposal.parents_BG is None else pad(proposal.parents_BG, (0, more), value=-1)
    )
    for b, ids in enumerate(copies):
        if ids:
            tokens_BG[b] = tokens_BG.new_tensor([*ids, *[-1] * (G - len(ids))])
            if parents_BG is not None:
                parents_BG[b] = torch.arange(-1, G - 1, device=parents_BG.device)
            if q_BGV is not None:
                q_BGV[b] = point_mass(tokens_BG[b], q_BGV.shape[-1]).exp()
    return Proposal(tokens_BG, q_BGV, parents_BG)


def joined(proposal: Proposal, copies: list[list[int]]) -> Proposal:
    """A tree of fixed nodes with a copied chain as an additional branch of each row."""
    trees, parents = [], (proposal.above_BG - 1).tolist()
    for tokens, above, ids in zip(proposal.tokens_BG.tolist(), parents, copies, strict=True):
        nodes, parent = list(zip(tokens, above, strict=True)), -1
        for token in ids:
            if (token, parent) not in nodes:
                nodes.append((token, parent))
            parent = nodes.index((token, parent))
        trees.append(nodes)
    return copied_trees(trees, proposal.tokens_BG.device)
